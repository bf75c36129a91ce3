"""Which block hash lies in which block of the pool, and what the router must hear about it."""

from collections.abc import Sequence
from itertools import compress

from .block_pool import BlockPool
from .messages import CacheEvents, CacheSnapshot


class PrefixCache:
    """The index over the hashed blocks of one pool. It holds no references: a hash lives until its block is evicted.

    With ``is_enabled`` false nothing is ever published, and so nothing matches.
    """

    def __init__(self, pool: BlockPool, is_enabled: bool = True) -> None:
        self.is_enabled = is_enabled
        self._pool = pool
        self._blocks: dict[bytes, int] = {}
        self._number = 0
        self._stored: dict[bytes, None] = {}
        self._evicted: dict[bytes, None] = {}
        pool.on_evict = self._on_evict

    def match(self, hashes: list[bytes]) -> list[int]:
        """The blocks of the longest prefix of ``hashes`` that is held; takes no reference."""
        blocks = map(self._blocks.get, hashes)
        return list(iter(blocks.__next__, None))  # as far as nothing is missing

    def publish(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """From now on each block, whose KV is written, is found under its hash, which no other of them has.

        The first block of a hash wins: where two sequences computed the same, the second keeps its copy
        for itself.
        """
        if not self.is_enabled:
            return
        if held := self._blocks.keys() & hashes:
            is_new = [block_hash not in held for block_hash in hashes]
            blocks, hashes = list(compress(blocks, is_new)), list(compress(hashes, is_new))
        self._pool.set_hashes(blocks, hashes)
        self._blocks.update(zip(hashes, blocks, strict=True))
        _note(hashes, self._stored, self._evicted)

    def _on_evict(self, blocks: list[int], hashes: list[bytes]) -> None:
        found = list(map(self._blocks.pop, hashes))
        assert found == blocks, "the hash of a block leads back to it"
        _note(hashes, self._evicted, self._stored)

    def take_events(self) -> CacheEvents | None:
        """What has changed since the last call, ``None`` if nothing; numbered from 1 without gaps.

        A hash that came and went in between (or went and came back) is in neither list, so that the order
        in which a receiver applies them does not matter.
        """
        if not self._stored and not self._evicted:
            return None
        self._number += 1
        events = CacheEvents(number=self._number, stored=list(self._stored), evicted=list(self._evicted))
        self._stored.clear()
        self._evicted.clear()
        return events

    def snapshot(self) -> CacheSnapshot:
        """All hashes as the last events told them; what is not told yet comes with the next ones."""
        told = [block_hash for block_hash in self._blocks if block_hash not in self._stored]
        return CacheSnapshot(number=self._number, hashes=told + list(self._evicted))

    def check(self) -> None:
        """Assert that the pool is sound and knows the same hashes as this index; O(num_blocks)."""
        self._pool.check()
        hashed = {self._pool.hash_of(block): block for block in range(self._pool.num_blocks)}
        hashed.pop(None, None)
        assert hashed == self._blocks, "the pool and the prefix cache disagree on a hash"


def _note(hashes: Sequence[bytes], changed: dict[bytes, None], changed_back: dict[bytes, None]) -> None:
    """Add the hashes to ``changed``, but for those that undo what is in ``changed_back``: nothing is told of these."""
    undone = changed_back.keys() & hashes
    for block_hash in undone:
        del changed_back[block_hash]
    changed.update(dict.fromkeys([each for each in hashes if each not in undone] if undone else hashes))
