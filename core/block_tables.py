"""The one place where sequences get and lose blocks.

It keeps two promises. A hash is published only when the KV of its block is written (``num_computed``
covers it). A block is given back only when no launched step can still write to it (``num_in_flight`` is 0).
``sequence.num_published`` counts blocks from the start: those published, or found published by `reuse`.
"""

from .block_hash import BlockHasher
from .block_pool import BlockPool
from .prefix_cache import PrefixCache
from .request import pack_ids
from .sequence import Sequence


class BlockTables:
    def __init__(self, pool: BlockPool, prefixes: PrefixCache, hasher: BlockHasher, block_size: int) -> None:
        self.pool = pool
        self.prefixes = prefixes
        self.block_size = block_size
        self._hasher = hasher

    def emptied(self) -> "BlockTables":
        """Tables of the same shape whose blocks are all free, for when nobody who held these is left."""
        pool = BlockPool(self.pool.num_blocks)
        return BlockTables(pool, PrefixCache(pool, self.prefixes.is_enabled), self._hasher, self.block_size)

    def reuse(self, sequence: Sequence, max_tokens: int) -> int:
        """Give a sequence without blocks the longest held prefix of its tokens.

        Whole blocks, at most ``max_tokens`` tokens: keep at least one back for the step that samples.
        Returns the number of tokens that need no computing.
        """
        assert not sequence.blocks and not sequence.is_released, "reuse starts a sequence"
        num_blocks = min(max_tokens, len(sequence.token_ids)) // self.block_size
        blocks = self.prefixes.match(self._hashes(sequence, num_blocks))
        for block in blocks:
            self.pool.share(block)
        sequence.blocks = blocks
        sequence.num_published = len(blocks)
        sequence.num_scheduled = sequence.num_computed = len(blocks) * self.block_size
        return sequence.num_computed

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Blocks for ``num_tokens`` tokens in all. Raises `OutOfBlocks`, having changed nothing."""
        assert not sequence.is_released, "a released sequence gets no blocks"
        sequence.blocks += self.pool.take(self.num_missing(sequence, num_tokens))

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that `grow` would take."""
        return max(0, -(-num_tokens // self.block_size) - len(sequence.blocks))

    def publish(self, sequence: Sequence) -> None:
        """Publish every full block whose KV is written and whose token ids the host knows, output tokens too.

        A released sequence publishes nothing.
        """
        if sequence.is_released or not self.prefixes.is_enabled:
            return
        num_full = min(sequence.num_computed, len(sequence.token_ids)) // self.block_size
        if num_full <= sequence.num_published:
            return
        hashes = self._hashes(sequence, num_full)
        for index in range(sequence.num_published, num_full):
            self.prefixes.publish(sequence.blocks[index], hashes[index])
        sequence.num_published = num_full

    def release(self, sequence: Sequence) -> None:
        """The end of a sequence; its blocks follow when its last launched step is done. Repeating it is fine."""
        sequence.is_released = True
        self._give_back_if_idle(sequence)

    def step_done(self, sequence: Sequence) -> None:
        """One launched step of the sequence has finished on the device."""
        assert sequence.num_in_flight > 0, "no step of this sequence is in flight"
        sequence.num_in_flight -= 1
        if sequence.is_released:
            self._give_back_if_idle(sequence)

    def reset(self, sequence: Sequence) -> None:
        """Take all blocks from a sequence that lives on and will be computed again (preemption)."""
        assert sequence.num_in_flight == 0, "a launched step still writes to these blocks"
        assert not sequence.is_released, "a released sequence does not come back"
        self._give_back_if_idle(sequence)
        sequence.num_published = sequence.num_scheduled = sequence.num_computed = 0

    def _give_back_if_idle(self, sequence: Sequence) -> None:
        if sequence.num_in_flight == 0:
            self.pool.give_back(sequence.blocks)
            sequence.blocks = []

    def _hashes(self, sequence: Sequence, num_blocks: int) -> list[bytes]:
        """The first ``num_blocks`` hashes; kept with the sequence, whose known tokens never change."""
        known = sequence.block_hashes
        if not self.prefixes.is_enabled:
            return []
        if len(known) < num_blocks:
            start, end = len(known) * self.block_size, num_blocks * self.block_size
            if end <= sequence.num_prompt:
                tokens = memoryview(sequence.request.prompt)[4 * start : 4 * end]
            else:
                tokens = memoryview(pack_ids(sequence.token_ids[start:end]))
            known += self._hasher.hashes(tokens, sequence.request.salt, known[-1] if known else None)
        return known[:num_blocks]
