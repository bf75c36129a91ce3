"""Which worker holds which block hash, as told by the workers' cache events.

A hint for placement and never more: what a worker really holds shows when it matches its own index.
Memory is bounded by what the workers hold, about 100 bytes a block.
"""

from dataclasses import dataclass, field

from ..core.messages import CacheEvents, CacheSnapshot, Incarnation

ASK_AGAIN_SECONDS = 1.0


@dataclass(slots=True)
class _Holdings:
    """The hashes of one worker when event ``number`` had been applied."""

    number: int = 0
    hashes: set[bytes] = field(default_factory=set)
    asked_at: float | None = None


class PrefixMap:
    def __init__(self) -> None:
        self._holdings: dict[Incarnation, _Holdings] = {}

    def add(self, worker: Incarnation, now: float) -> None:
        """A worker has joined, and the caller asks it for a snapshot."""
        self._holdings[worker] = _Holdings(asked_at=now)

    def drop(self, worker: Incarnation) -> None:
        self._holdings.pop(worker, None)

    def apply(self, worker: Incarnation, events: CacheEvents, now: float) -> bool:
        """Take events in order, ignore repeated ones; true if a gap makes a snapshot necessary."""
        held = self._holdings.get(worker)
        if held is None or events.number <= held.number:
            return False
        if events.number > held.number + 1:
            return self._must_ask(held, now)
        held.number = events.number
        held.hashes.difference_update(events.evicted)
        held.hashes.update(events.stored)
        return False

    def _must_ask(self, held: _Holdings, now: float) -> bool:
        """One question at a time, repeated if no answer comes."""
        if held.asked_at is not None and now - held.asked_at < ASK_AGAIN_SECONDS:
            return False
        held.asked_at = now
        return True

    def replace(self, worker: Incarnation, snapshot: CacheSnapshot) -> None:
        """A snapshot; one older than the events already applied is ignored."""
        held = self._holdings.get(worker)
        if held is not None and snapshot.number >= held.number:
            self._holdings[worker] = _Holdings(snapshot.number, set(snapshot.hashes))

    def num_cached(self, hashes: list[bytes]) -> dict[Incarnation, int]:
        """For each worker the length, in blocks, of the longest prefix of ``hashes`` that it holds."""
        return {worker: _prefix_length(held.hashes, hashes) for worker, held in self._holdings.items()}

    def num_hashes(self, worker: Incarnation) -> int:
        held = self._holdings.get(worker)
        return len(held.hashes) if held is not None else 0


def _prefix_length(held: set[bytes], hashes: list[bytes]) -> int:
    for length, block_hash in enumerate(hashes):
        if block_hash not in held:
            return length
    return len(hashes)
