"""How much of its limits one key has used. Pure: time is an argument.

A request enters (requests a minute, concurrency), reserves the tokens that it may use at most, is settled with those
that it did use, and leaves.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from .bucket import Bucket
from .caller import KeyLimits

CONCURRENCY_RETRY_SECONDS = 1.0
"""Nobody knows when one of the running requests ends."""


class Limit(StrEnum):
    """As OpenAI names them in the ``type`` of an error."""

    REQUESTS = "requests"
    TOKENS = "tokens"
    CONCURRENCY = "concurrency"


@dataclass(frozen=True, slots=True)
class OverLimit:
    """Refused: try again in ``seconds``."""

    limit: Limit
    allowed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Standing:
    """One limit as a client is told of it; ``seconds`` until all of it is there again."""

    limit: Limit
    allowed: int
    remaining: int
    seconds: float


class Account:
    """One key's. The tokens of a request that may use more than a minute's worth need a full bucket; what they take
    beyond it, those who come later wait for."""

    def __init__(self, limits: KeyLimits, now: float) -> None:
        self.num_open = 0
        self._max_concurrent = limits.max_concurrent
        self._buckets = {limit: Bucket.full(allowed, now) for limit, allowed in _rates(limits)}

    def change(self, limits: KeyLimits, now: float) -> None:
        """Other limits from now on; what was used stays used."""
        self._max_concurrent = limits.max_concurrent
        former, self._buckets = self._buckets, {}
        for limit, allowed in _rates(limits):
            self._buckets[limit] = former.get(limit) or Bucket.full(allowed, now)
            self._buckets[limit].change(allowed, now)

    def enter(self, now: float) -> OverLimit | None:
        """Count one request in, unless it is one too many."""
        if self._max_concurrent is not None and self.num_open >= self._max_concurrent:
            return OverLimit(Limit.CONCURRENCY, self._max_concurrent, CONCURRENCY_RETRY_SECONDS)
        taken = self._take(Limit.REQUESTS, 1, now)
        if isinstance(taken, OverLimit):
            return taken
        self.num_open += 1
        return None

    def leave(self) -> None:
        """The inverse of an `enter` that was not refused."""
        self.num_open -= 1

    def reserve(self, num_tokens: int, now: float) -> int | OverLimit:
        """Set aside what a request may use at most; how much that is, for `settle`."""
        return self._take(Limit.TOKENS, num_tokens, now)

    def settle(self, num_reserved: int, num_used: int, now: float) -> None:
        """A request for which `reserve` set tokens aside has used these."""
        if (bucket := self._buckets.get(Limit.TOKENS)) is not None:
            bucket.take(num_used - num_reserved, now)

    def standings(self, now: float) -> list[Standing]:
        """Of the limits a minute that this key has."""
        return [
            Standing(limit, allowed, max(0, int(bucket.level_at(now))), bucket.seconds_until(allowed, now))
            for limit, bucket in self._buckets.items()
            for allowed in (bucket.per_minute,)
        ]

    def _take(self, limit: Limit, num: int, now: float) -> int | OverLimit:
        bucket = self._buckets.get(limit)
        if bucket is None:
            return 0
        num = min(num, bucket.per_minute)
        if seconds := bucket.seconds_until(num, now):
            return OverLimit(limit, bucket.per_minute, seconds)
        bucket.take(num, now)
        return num


def _rates(limits: KeyLimits) -> Iterator[tuple[Limit, int]]:
    if limits.requests_per_minute is not None:
        yield Limit.REQUESTS, limits.requests_per_minute
    if limits.tokens_per_minute is not None:
        yield Limit.TOKENS, limits.tokens_per_minute
