"""The one place where sequences get and lose blocks.

It keeps three promises. A hash is published only when the KV of its block is written (``num_computed``
covers it). A block is given back only when no launched step can still write to it (``num_in_flight`` is 0). A block
is written only for its one holder: sequences that fork after a prompt hold the same blocks, and each gets a copy of a
partial last one, at the step in which it first writes there, as long as others still hold it.
``sequence.num_published`` counts blocks from the start: those published, or found published by `reuse`.
"""

from collections import Counter
from collections.abc import Sequence as Seq

from .block_hash import HASH_BYTES, BlockHasher
from .block_pool import BlockPool
from .prefix_cache import PrefixCache
from .request import Request
from .sequence import Chunk, Sequence


class BlockTables:
    def __init__(self, pool: BlockPool, prefixes: PrefixCache, hasher: BlockHasher, block_size: int) -> None:
        self.pool = pool
        self.prefixes = prefixes
        self.block_size = block_size
        self._hasher = hasher
        self._being_copied: Counter[int] = Counter()

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
        blocks = self.prefixes.match(self._hashes(sequence, 0, num_blocks))
        self.pool.share(blocks)
        sequence.blocks = blocks
        sequence.num_published = len(blocks)
        sequence.num_scheduled = sequence.num_computed = len(blocks) * self.block_size
        return sequence.num_computed

    def grow(self, sequence: Sequence, num_tokens: int) -> None:
        """Blocks for ``num_tokens`` tokens in all. Raises `OutOfBlocks`, having changed nothing.

        A shared block that would be written next is replaced by one that the next chunk makes a copy of it.
        """
        assert not sequence.is_released, "a released sequence gets no blocks"
        if num_tokens <= len(sequence.blocks) * self.block_size and not sequence.may_share_tail:
            return
        is_shared = sequence.may_share_tail and self._is_tail_shared(sequence)
        blocks = self.pool.take(self.num_missing(sequence, num_tokens) + is_shared)
        if is_shared:
            tail = sequence.num_scheduled // self.block_size
            sequence.blocks = list(sequence.blocks)  # chunks in flight keep the former list
            sequence.copy_from, sequence.blocks[tail] = sequence.blocks[tail], blocks.pop()
            self._being_copied[sequence.copy_from] += 1
        sequence.may_share_tail = False
        sequence.blocks += blocks

    def _is_tail_shared(self, sequence: Sequence) -> bool:
        """The reference of a copy under way no longer counts: it reads before the last holder writes."""
        block = sequence.blocks[sequence.num_scheduled // self.block_size]
        return self.pool.num_references(block) - self._being_copied[block] > 1

    def num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Blocks that `grow` would take."""
        return max(0, -(-num_tokens // self.block_size) - len(sequence.blocks))

    def split(self, sequence: Sequence, first_token_ids: Seq[int | None]) -> list[Sequence]:
        """One sequence for each choice that goes on from a first token, once the prompt and nothing else is computed.

        ``sequence`` goes on as the first choice, or is released if that one does not.
        """
        (request, *forks), (token_id, *others) = sequence.request.choices, first_token_ids
        sequence.request = request
        going_on = [
            self._fork(sequence, fork, other) for fork, other in zip(forks, others, strict=True) if other is not None
        ]
        if token_id is None:
            self.release(sequence)
            return going_on
        del sequence.token_ids[sequence.num_prompt :]
        sequence.token_ids.append(token_id)
        return [sequence, *going_on]

    def _fork(self, sequence: Sequence, request: Request, first_token_id: int) -> Sequence:
        num_prompt, blocks = sequence.num_prompt, list(sequence.blocks)
        token_ids = sequence.token_ids[:num_prompt]
        token_ids.append(first_token_id)
        assert sequence.num_scheduled == sequence.num_computed == num_prompt, "forks part where the prompt ends"
        self.pool.share(blocks)
        fork = Sequence(request, token_ids, num_prompt, blocks)
        fork.block_hashes, fork.num_published = list(sequence.block_hashes), sequence.num_published
        fork.num_scheduled = fork.num_computed = num_prompt
        fork.may_share_tail = sequence.may_share_tail = num_prompt % self.block_size > 0
        return fork

    def publish(self, sequence: Sequence) -> None:
        """Publish every full block whose KV is written and whose token ids the host knows, output tokens too.

        A released sequence publishes nothing.
        """
        if sequence.num_computed // self.block_size <= sequence.num_published:
            return  # nearly always
        if sequence.is_released or not self.prefixes.is_enabled:
            return
        num_full = min(sequence.num_computed, len(sequence.token_ids)) // self.block_size
        if num_full <= sequence.num_published:
            return
        start = sequence.num_published
        self.prefixes.publish(sequence.blocks[start:num_full], self._hashes(sequence, start, num_full))
        sequence.num_published = num_full

    def release(self, sequence: Sequence) -> None:
        """The end of a sequence; its blocks follow when its last launched step is done. Repeating it is fine."""
        sequence.is_released = True
        self._give_back_if_idle(sequence)

    def step_done(self, *chunks: Chunk) -> None:
        """The step with these chunks has finished on the device."""
        for chunk in chunks:
            sequence = chunk.sequence
            if chunk.copy_from is not None:
                self._being_copied[chunk.copy_from] -= 1
                self.pool.give_back([chunk.copy_from])
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
        sequence.may_share_tail = False

    def _give_back_if_idle(self, sequence: Sequence) -> None:
        if sequence.num_in_flight == 0:
            self.pool.give_back(sequence.blocks)
            sequence.blocks = []

    def prompt_hashes(self, sequence: Sequence) -> bytes:
        """Of the full blocks of its prompt, one after the other; empty if nothing is ever published here."""
        return b"".join(self._hashes(sequence, 0, sequence.num_prompt // self.block_size))

    def believe(self, sequence: Sequence, hashes: bytes) -> bool:
        """Take `prompt_hashes` from another worker for a new sequence; false if they are not those of its prompt.

        Only the first and the last are made here again. That finds another key, model, salt or block size, and blocks
        that are too many, missing or displaced. A forged chain between them could give the request KV of other tokens,
        or publish its KV under their name. That takes a worker with the cluster's key, and such a worker can do as much
        with the KV itself, which nobody can check.
        """
        assert not sequence.block_hashes, "a new sequence has no hashes"
        if not (self.prefixes.is_enabled and hashes):
            return True
        size, num_blocks = self.block_size, sequence.num_prompt // self.block_size
        if len(hashes) != num_blocks * HASH_BYTES:
            return False
        told = [hashes[start : start + HASH_BYTES] for start in range(0, len(hashes), HASH_BYTES)]
        salt, ids = sequence.request.salt, sequence.token_ids
        first = self._hasher.hashes(ids[:size].tobytes(), salt)
        parent = told[-2] if num_blocks > 1 else None
        last = self._hasher.hashes(ids[(num_blocks - 1) * size : num_blocks * size].tobytes(), salt, parent)
        if [*first, *last] != [told[0], told[-1]]:
            return False
        sequence.block_hashes = told
        return True

    def _hashes(self, sequence: Sequence, start: int, end: int) -> list[bytes]:
        """Of blocks ``start`` to ``end``; kept with the sequence, whose known tokens never change."""
        known = sequence.block_hashes
        if self.prefixes.is_enabled and len(known) < end:
            tokens = sequence.token_ids[len(known) * self.block_size : end * self.block_size].tobytes()
            known += self._hasher.hashes(tokens, sequence.request.salt, known[-1] if known else None)
        return known[start:end]
