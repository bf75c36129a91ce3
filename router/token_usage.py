"""What an answer cost, in tokens: as its client is told and its key is charged."""

from collections.abc import Iterable
from dataclasses import dataclass

from .output import OutputAssembler


@dataclass(frozen=True, slots=True)
class TokenUsage:
    """Of one request, all its choices together."""

    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    num_reasoning: int = 0
    """Of the output."""

    @property
    def num_total(self) -> int:
        return self.num_prompt + self.num_output


def token_usage(assemblers: Iterable[OutputAssembler]) -> TokenUsage:
    """A prompt counts once however many choices it has, from its first token on, and as cached what was there when its
    first choice came."""
    prompts: dict[int, list[OutputAssembler]] = {}
    num_output = num_reasoning = 0
    for assembler in assemblers:
        if assembler.num_output or assembler.finish is not None:
            num_output += assembler.num_output
            num_reasoning += assembler.num_reasoning
            prompts.setdefault(id(assembler.choice.prompt), []).append(assembler)
    return TokenUsage(
        num_prompt=sum(len(of_prompt[0].choice.prompt.token_ids) for of_prompt in prompts.values()),
        num_cached=sum(min(assembler.cached_tokens for assembler in of_prompt) for of_prompt in prompts.values()),
        num_output=num_output,
        num_reasoning=num_reasoning,
    )
