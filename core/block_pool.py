"""The blocks of one worker. Each is in exactly one state, and ``free + cached + leased + quarantined`` is their number.

* free: nobody's, its content is worthless;
* cached: nobody's, but it carries a hash, so that its content may be used again until it is evicted;
* leased: somebody holds references to it;
* quarantined: nobody's, but a transfer that can't be stopped may still write to it.

Every operation takes many blocks at once and costs O(1) for each. A misuse is a fault of this program and an assertion.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence

from .messages import PoolBooks


class OutOfBlocks(Exception):
    """Fewer blocks are available than were asked for; none was taken."""


class BlockPool:
    """Blocks ``0 .. num_blocks - 1``, given out lowest first at the start and most recently freed first later."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.on_evict: Callable[[list[int], list[bytes]], None] = lambda blocks, hashes: None
        """Called when blocks lose their hashes, before they can be used for anything else."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._quarantined: set[int] = set()
        self._num_references = [0] * num_blocks
        self._num_leased = 0
        self._hashes: dict[int, bytes] = {}

    @property
    def num_available(self) -> int:
        """What `take` could give: free and cached blocks."""
        return len(self._free) + len(self._cached)

    def take(self, num_blocks: int) -> list[int]:
        """Blocks with one reference each: free ones first, then the least recently used cached ones; in rising order.

        Raises `OutOfBlocks`, having taken nothing.
        """
        if num_blocks > self.num_available:
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self.num_available} of {self.num_blocks} available")
        num_kept = max(0, len(self._free) - num_blocks)
        blocks = self._free[num_kept:][::-1]
        del self._free[num_kept:]
        if len(blocks) < num_blocks:
            blocks += self._evict(num_blocks - len(blocks))
        blocks.sort()  # neighbours are copied as one, or told to the driver in less time
        for block in blocks:
            self._num_references[block] = 1
        self._num_leased += num_blocks
        return blocks

    def _evict(self, num_blocks: int) -> list[int]:
        next_one = self._cached.popitem
        blocks = [next_one(last=False)[0] for _ in range(num_blocks)]
        self.on_evict(blocks, list(map(self._hashes.pop, blocks)))
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each of these cached or leased blocks."""
        references, cached = self._num_references, self._cached
        num_cached = len(cached)
        for block in blocks:
            if references[block] == 0:
                assert block in cached, f"block {block} is neither cached nor leased"
                del cached[block]
            references[block] += 1
        self._num_leased += num_cached - len(cached)

    def give_back(self, blocks: Sequence[int]) -> None:
        """One reference less each; without any a block becomes cached if it carries a hash, else free.

        ``blocks`` are in the order of their sequence: the deepest is evicted first, because it is of no use
        without those before it.
        """
        references, hashes, cached, free = self._num_references, self._hashes, self._cached, self._free
        num_available = self.num_available
        for block in reversed(blocks):
            num_left = references[block] - 1
            assert num_left >= 0, f"block {block} is given back but not leased"
            references[block] = num_left
            if num_left == 0:
                if block in hashes:
                    cached[block] = None
                else:
                    free.append(block)
        self._num_leased -= self.num_available - num_available

    def quarantine(self, blocks: Iterable[int]) -> None:
        """The caller's reference, which must be the only one, ends; the block is unusable until `end_quarantine`."""
        for block in blocks:
            assert self._num_references[block] == 1, f"block {block} is quarantined with other users"
            assert block not in self._hashes, f"block {block} is published, so nobody may write to it"
            self._num_references[block] = 0
            self._num_leased -= 1
            self._quarantined.add(block)

    def end_quarantine(self, blocks: Iterable[int]) -> None:
        """Nobody writes to these blocks any more: they are free."""
        for block in blocks:
            assert block in self._quarantined, f"block {block} is not quarantined"
            self._quarantined.remove(block)
            self._free.append(block)

    def set_hashes(self, blocks: Sequence[int], hashes: Sequence[bytes]) -> None:
        """Name the contents of leased blocks; kept until a block is evicted. Only `PrefixCache` calls this."""
        assert all(map(self._num_references.__getitem__, blocks)), "a block is hashed but nobody holds it"
        assert self._hashes.keys().isdisjoint(blocks), "a block already carries a hash"
        self._hashes.update(zip(blocks, hashes, strict=True))

    def num_references(self, block: int) -> int:
        return self._num_references[block]

    def hash_of(self, block: int) -> bytes | None:
        return self._hashes.get(block)

    def books(self) -> PoolBooks:
        """How many blocks are in each state."""
        return PoolBooks(
            free=len(self._free),
            cached=len(self._cached),
            leased=self._num_leased,
            quarantined=len(self._quarantined),
        )

    def check(self) -> None:
        """Assert that every block is in exactly one state and that all structures agree; O(num_blocks)."""
        leased = [block for block, count in enumerate(self._num_references) if count > 0]
        assert min(self._num_references, default=0) >= 0, "a block has fewer than no references"
        assert len(leased) == self._num_leased, f"{len(leased)} blocks have references, {self._num_leased} are counted"
        states = sorted([*self._free, *self._cached, *leased, *self._quarantined])
        assert states == list(range(self.num_blocks)), f"not every block is in exactly one state: {states}"
        for block in self._cached:
            assert block in self._hashes, f"block {block} is cached without a hash"
        for block in (*self._free, *self._quarantined):
            assert block not in self._hashes, f"block {block} is free or quarantined and carries a hash"
