"""The sizes that steps on a GPU come in: few, so that graphs and kernels for all are there before the first request."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

FEW_PROMPTS = 4
PROMPT_NUMBERS = (FEW_PROMPTS, 32)
SHORT_PROMPT = 32
"""Few chunks of at most so many tokens are attended to like decode rows: the context is split, as queries are few."""
FEW_SHORT, FEW, MANY = (16, 32, 64, 128), (64, 128, 256, 384, 512, 640, 768, 1024), (256, 512, 1024)
"""Tokens that steps of prompts alone are padded to, so that they have a graph: few short ones, few, many. Larger steps
keep the device busy for longer than it takes to launch them kernel by kernel."""


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
        return [*(size for size in PROMPT_NUMBERS if size < self.max_num_seqs), max(self.max_num_seqs, FEW_PROMPTS)]

    @property
    def max_sequences(self) -> int:
        return self.decode_ladder[-1] + self.prompt_ladder[-1]

    def padded(self, num_decodes: int, prompt_tokens: list[int]) -> StepShape:
        """The shape for so many one-token chunks and for prompt chunks of these sizes."""
        num_decodes = _next(num_decodes, self.decode_ladder)
        num_prompts, num_tokens = _next(len(prompt_tokens), self.prompt_ladder), sum(prompt_tokens)
        is_short = 0 < num_prompts <= FEW_PROMPTS and max(prompt_tokens) <= SHORT_PROMPT
        ladder = _token_ladder(num_prompts, is_short)
        if num_decodes == 0 and num_tokens <= ladder[-1]:
            num_tokens = _next(num_tokens, ladder)
        return StepShape(num_decodes, num_prompts, num_decodes + num_tokens, is_short)

    def graphed(self) -> list[StepShape]:
        """Those that get a graph, largest first: the smaller ones find their memory in the largest one's."""
        shapes = [StepShape(size, 0, size, False) for size in self.decode_ladder]
        shapes += [StepShape(0, FEW_PROMPTS, tokens, True) for tokens in FEW_SHORT]
        for number in self.prompt_ladder:
            shapes += [StepShape(0, number, tokens, False) for tokens in _token_ladder(number, False)]
        return sorted(shapes, key=lambda shape: shape.num_tokens, reverse=True)


def _token_ladder(num_prompts: int, is_short: bool) -> Sequence[int]:
    if num_prompts > FEW_PROMPTS:
        return MANY
    return FEW_SHORT if is_short else FEW


def _next(size: int, ladder: Sequence[int]) -> int:
    """The next size of the ladder; 0 stays 0."""
    return ladder[bisect_left(ladder, size)] if size else 0
