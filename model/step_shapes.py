"""The sizes that steps on a GPU come in: few, so that graphs and kernels for all are there before the first request."""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

SHORT_PROMPT = 32
"""Chunks of at most so many tokens are attended to like decode rows: the context is split, since queries are few."""
MAX_SHORT_PROMPTS = 32
GRAPHED_PROMPTS = 4
GRAPHED_TOKENS = (16, 32, 64, 128)
PROMPT_NUMBERS = (GRAPHED_PROMPTS, MAX_SHORT_PROMPTS)


@dataclass(frozen=True, slots=True)
class StepShape:
    """A step as its launch sees it, padding counted.

    ``num_decodes`` one-token chunks, then ``num_tokens - num_decodes`` rows of ``num_prompts`` prompts, each short if
    ``is_short``.
    """

    num_decodes: int
    num_prompts: int
    num_tokens: int
    is_short: bool

    @property
    def num_sequences(self) -> int:
        return self.num_decodes + self.num_prompts


@dataclass(frozen=True, slots=True)
class StepShapes:
    """All shapes for steps of at most ``max_num_seqs`` sequences."""

    max_num_seqs: int

    @property
    def decode_ladder(self) -> list[int]:
        """Powers of two to 8, then every eighth, up to ``max_num_seqs``."""
        return [
            *(size for size in (1, 2, 4, *range(8, self.max_num_seqs, 8)) if size < self.max_num_seqs),
            self.max_num_seqs,
        ]

    @property
    def prompt_ladder(self) -> list[int]:
        return [*(size for size in PROMPT_NUMBERS if size < self.max_num_seqs), max(self.max_num_seqs, GRAPHED_PROMPTS)]

    @property
    def max_sequences(self) -> int:
        return self.decode_ladder[-1] + self.prompt_ladder[-1]

    def padded(self, num_decodes: int, prompt_tokens: list[int]) -> StepShape:
        """The shape for so many one-token chunks and for prompt chunks of these sizes."""
        num_decodes = _next(num_decodes, self.decode_ladder)
        num_prompts, num_tokens = _next(len(prompt_tokens), self.prompt_ladder), sum(prompt_tokens)
        is_short = 0 < num_prompts <= MAX_SHORT_PROMPTS and max(prompt_tokens) <= SHORT_PROMPT
        if is_short and num_decodes == 0 and num_prompts == GRAPHED_PROMPTS:
            num_tokens = _next(num_tokens, list(GRAPHED_TOKENS))
        return StepShape(num_decodes, num_prompts, num_decodes + num_tokens, is_short)

    def graphed(self) -> Iterator[StepShape]:
        """Those that get a graph, largest first: the smaller ones find their memory in the largest one's."""
        for size in reversed(self.decode_ladder):
            yield StepShape(size, 0, size, False)
        for num_tokens in reversed(GRAPHED_TOKENS):
            yield StepShape(0, GRAPHED_PROMPTS, num_tokens, True)


def _next(size: int, ladder: list[int]) -> int:
    """The next size of the ladder; 0 stays 0."""
    return ladder[bisect_left(ladder, size)] if size else 0
