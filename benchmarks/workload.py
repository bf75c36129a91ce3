"""What is asked, and when: random prompts and arrival times, all drawn from a seed."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

FIRST_ORDINARY_ID = 100
"""Below lie the special tokens of most vocabularies."""

# Words that are one token, with the space before them, in every common vocabulary.
WORDS = [
    "time", "year", "people", "way", "day", "man", "thing", "woman", "life", "child", "world", "school", "state",
    "family", "student", "group", "country", "problem", "hand", "part", "place", "case", "week", "company",
    "system", "program", "question", "work", "government", "number", "night", "point", "home", "water", "room",
    "mother", "area", "money", "story", "fact", "month", "lot", "right", "study", "book", "eye", "job", "word",
    "business", "issue", "side", "kind", "head", "house", "service", "friend", "father", "power", "hour", "game",
    "line", "end", "member", "law", "car", "city", "community", "name", "president", "team", "minute", "idea",
    "body", "information",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """A prompt, as text or token ids, that arrives ``at_seconds`` after the run has started."""

    prompt: str | tuple[int, ...]
    max_tokens: int
    at_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Lengths:
    """A number of tokens, drawn evenly from ``low`` to ``high`` inclusive."""

    low: int
    high: int

    def __post_init__(self) -> None:
        if not 1 <= self.low <= self.high:
            raise ValueError(f"lengths from {self.low} to {self.high} are not a range of positive numbers")

    @classmethod
    def parse(cls, text: str) -> "Lengths":
        """``256``, or ``128:512``; raises ``ValueError`` for anything else."""
        low, _, high = text.partition(":")
        return cls(int(low), int(high or low))

    def draw(self, source: random.Random) -> int:
        return source.randint(self.low, self.high)


@dataclass(frozen=True, slots=True)
class PromptSource:
    """How prompts are made: of token ids below ``vocab_size``, or (``vocab_size`` 0) of words of a token each."""

    vocab_size: int = 32_000

    def tokens(self, source: random.Random, num_tokens: int) -> list[int]:
        """Random token ids, or places in `WORDS`."""
        first = min(FIRST_ORDINARY_ID, self.vocab_size - 1)
        choices = range(first, self.vocab_size) if self.vocab_size else range(len(WORDS))
        return source.choices(choices, k=num_tokens)

    def prompt(self, tokens: Sequence[int]) -> str | tuple[int, ...]:
        return tuple(tokens) if self.vocab_size else " ".join(WORDS[token] for token in tokens)


def random_requests(
    num_requests: int,
    prompt_tokens: Lengths,
    output_tokens: Lengths,
    source: PromptSource,
    num_shared: int = 0,
    seed: int = 0,
) -> list[LoadRequest]:
    """Requests that all arrive at once; the first ``num_shared`` tokens of their prompts are the same."""
    draws = random.Random(seed)
    shared = source.tokens(draws, num_shared)
    made = []
    for _ in range(num_requests):
        own = source.tokens(draws, max(1, prompt_tokens.draw(draws) - num_shared))
        made.append(LoadRequest(source.prompt([*shared, *own]), output_tokens.draw(draws)))
    return made


def arriving_at_rate(requests: Sequence[LoadRequest], rate: float, seed: int = 0) -> list[LoadRequest]:
    """The same requests as a Poisson process of ``rate`` a second: independent, exponential gaps."""
    draws = random.Random(seed)
    now = 0.0
    spread = []
    for request in requests:
        spread.append(replace(request, at_seconds=now))
        now += draws.expovariate(rate)
    return spread
