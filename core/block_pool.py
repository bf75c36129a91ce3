"""The blocks of one worker. Each is in exactly one state, and ``free + cached + leased + quarantined`` is their number.

* free: nobody's, its content is worthless;
* cached: nobody's, but it carries a hash, so that its content may be used again until it is evicted;
* leased: somebody holds references to it;
* quarantined: nobody's, but a transfer that can't be stopped may still write to it.

Every operation costs O(1) a block. A misuse is a fault of this program and an assertion.
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
        self.on_evict: Callable[[int, bytes], None] = lambda block, block_hash: None
        """Called when a block loses its hash, before it can be used for anything else."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._quarantined: set[int] = set()
        self._num_references = [0] * num_blocks
        self._num_leased = 0
        self._hashes: list[bytes | None] = [None] * num_blocks

    @property
    def num_available(self) -> int:
        """What `take` could give: free and cached blocks."""
        return len(self._free) + len(self._cached)

    def take(self, num_blocks: int) -> list[int]:
        """Blocks with one reference each: free ones first, then the least recently used cached ones.

        Raises `OutOfBlocks`, having taken nothing.
        """
        if num_blocks > self.num_available:
            raise OutOfBlocks(f"{num_blocks} blocks wanted, {self.num_available} of {self.num_blocks} available")
        return [self._take_one() for _ in range(num_blocks)]

    def _take_one(self) -> int:
        block = self._free.pop() if self._free else self._evict()
        self._num_references[block] = 1
        self._num_leased += 1
        return block

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hashes[block]
        assert block_hash is not None, "a cached block carries a hash"
        self._hashes[block] = None
        self.on_evict(block, block_hash)
        return block

    def share(self, block: int) -> None:
        """One more reference to a cached or leased block."""
        if self._num_references[block] == 0:
            assert block in self._cached, f"block {block} is neither cached nor leased"
            del self._cached[block]
            self._num_leased += 1
        self._num_references[block] += 1

    def give_back(self, blocks: Sequence[int]) -> None:
        """One reference less each; without any a block becomes cached if it carries a hash, else free.

        ``blocks`` are in the order of their sequence: the deepest is evicted first, because it is of no use
        without those before it.
        """
        for block in reversed(blocks):
            assert self._num_references[block] > 0, f"block {block} is given back but not leased"
            self._num_references[block] -= 1
            if self._num_references[block] == 0:
                self._num_leased -= 1
                if self._hashes[block] is None:
                    self._free.append(block)
                else:
                    self._cached[block] = None

    def quarantine(self, blocks: Iterable[int]) -> None:
        """The caller's reference, which must be the only one, ends; the block is unusable until `end_quarantine`."""
        for block in blocks:
            assert self._num_references[block] == 1, f"block {block} is quarantined with other users"
            assert self._hashes[block] is None, f"block {block} is published, so nobody may write to it"
            self._num_references[block] = 0
            self._num_leased -= 1
            self._quarantined.add(block)

    def end_quarantine(self, blocks: Iterable[int]) -> None:
        """Nobody writes to these blocks any more: they are free."""
        for block in blocks:
            assert block in self._quarantined, f"block {block} is not quarantined"
            self._quarantined.remove(block)
            self._free.append(block)

    def set_hash(self, block: int, block_hash: bytes) -> None:
        """Name the content of a leased block; kept until the block is evicted. Only `PrefixCache` calls this."""
        assert self._num_references[block] > 0, f"block {block} is hashed but nobody holds it"
        assert self._hashes[block] is None, f"block {block} already carries a hash"
        self._hashes[block] = block_hash

    def num_references(self, block: int) -> int:
        return self._num_references[block]

    def hash_of(self, block: int) -> bytes | None:
        return self._hashes[block]

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
            assert self._hashes[block] is not None, f"block {block} is cached without a hash"
        for block in (*self._free, *self._quarantined):
            assert self._hashes[block] is None, f"block {block} is free or quarantined and carries a hash"
