"""Prompts whose greedy answers are known, and whether what a client got is one of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import AutoModelForCausalLM

from crossdock.router.text import TextModel, load_text

from .clients import Answer, Json
from .reference import greedy, random_prompts

VOCAB_SIZE = 319
"""Ids below the small model's end of sequence."""


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt and, by Transformers, the longest answer that tests ask for."""

    prompt: list[int]
    answer_ids: list[int]
    text_model: TextModel

    @property
    def longest(self) -> int:
        return len(self.answer_ids)

    def body(self, max_tokens: int, *, stream: bool) -> Json:
        usage: Json = {"stream_options": {"include_usage": True}} if stream else {}
        return {
            "prompt": self.prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": stream,
            **usage,
        }

    def text(self, max_tokens: int) -> str:
        return self.text_model.decode(self.answer_ids[:max_tokens])

    def fault_of(self, answer: Answer, max_tokens: int) -> str | None:
        """What is wrong with an answer that must be the right text, or an error after a right beginning of it."""
        right = self.text(max_tokens)
        if answer.error is None:
            got = (answer.status, answer.text, answer.finish_reason, answer.num_completion_tokens)
            return None if got == (200, right, "length", max_tokens) else f"{got} for {right!r}"
        if answer.finish_reason is not None or answer.is_closed_by_done:
            return f"an error after the end: {answer}"
        if not right.startswith(answer.text):
            return f"a wrong beginning {answer.text!r} of {right!r}"
        return None if answer.status in (200, 503) else f"status {answer.status}: {answer.error}"


def random_questions(model: Path, num_questions: int, longest_prompt: int, num_tokens: int) -> Sequence[Question]:
    text_model = load_text(model)
    network = AutoModelForCausalLM.from_pretrained(model)
    network.generation_config.eos_token_id = None
    end = list(text_model.encode("a").ids)  # a whole character, lest the answer's text depend on the prompt's
    prompts = [prompt[:-1] + end for prompt in random_prompts(num_questions, longest_prompt, VOCAB_SIZE, seed=2)]
    answers = [list(map(int, greedy(network, prompt, num_tokens).tokens)) for prompt in prompts]
    return [Question(prompt, answer, text_model) for prompt, answer in zip(prompts, answers, strict=True)]
