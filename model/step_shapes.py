"""The sizes that steps on a GPU come in: few, so that graphs and kernels for all are there before the first request."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

FEW_PROMPTS, MANY_PROMPTS = 4, 32
SHORT_PROMPT = 32
"""Few chunks of at most so many tokens are attended to like decode rows: the context is split, as queries are few."""
GRAPHED_SHORT = {FEW_PROMPTS: (16, 32, 64, 128)}
GRAPHED_LONG = {FEW_PROMPTS: (64, *range(128, 1025, 128)), MANY_PROMPTS: (256, 512, 768, 1024)}
"""Tokens that steps of prompts alone are padded to, by the number of prompts: larger steps keep the device busy for
longer than it takes to launch them kernel by kernel."""


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

    @property
    def has_long_prompts(self) -> bool:
        """Whether there is enough to compute that KV is worth shipping before the end."""
        return self.num_prompts > 0 and not self.is_short


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
        numbers = (FEW_PROMPTS, MANY_PROMPTS)
        return [*(size for size in numbers if size < self.max_num_seqs), max(self.max_num_seqs, FEW_PROMPTS)]

    @property
    def max_sequences(self) -> int:
        return self.decode_ladder[-1] + self.prompt_ladder[-1]

    def padded(self, num_decodes: int, prompt_tokens: list[int]) -> StepShape:
        """The shape for so many one-token chunks and for prompt chunks of these sizes."""
        num_decodes = _next(num_decodes, self.decode_ladder)
        num_prompts, num_tokens = _next(len(prompt_tokens), self.prompt_ladder), sum(prompt_tokens)
        is_short = 0 < num_prompts <= FEW_PROMPTS and max(prompt_tokens) <= SHORT_PROMPT
        graphed = _graphed_tokens(num_prompts, is_short)
        if num_decodes == 0 and graphed and num_tokens <= graphed[-1]:
            num_tokens = _next(num_tokens, graphed)
        return StepShape(num_decodes, num_prompts, num_decodes + num_tokens, is_short)

    def graphed(self) -> list[StepShape]:
        """Those that get a graph, largest first: the smaller ones find their memory in the largest one's."""
        shapes = [StepShape(size, 0, size, False) for size in self.decode_ladder]
        for number, is_short in product(self.prompt_ladder, (True, False)):
            shapes += [StepShape(0, number, tokens, is_short) for tokens in _graphed_tokens(number, is_short)]
        return sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)


def _graphed_tokens(num_prompts: int, is_short: bool) -> Sequence[int]:
    return (GRAPHED_SHORT if is_short else GRAPHED_LONG).get(num_prompts, ())


def _next(size: int, ladder: Sequence[int]) -> int:
    """The next size of the ladder; 0 stays 0."""
    return ladder[bisect_left(ladder, size)] if size else 0
