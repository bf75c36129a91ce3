"""Random operations on pool, prefix cache and block tables, against a memory that remembers what was written where.

Each slot of the memory holds what its KV was computed from: the tenant, the position's token and all before it. A
step in flight destroys what it will overwrite, so that a block reused too early, matched too early or written by
two owners is read wrong by somebody.
"""

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import hypothesis.strategies as st
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from crossdock.core.block_hash import BlockHasher, model_root
from crossdock.core.block_pool import BlockPool, OutOfBlocks
from crossdock.core.block_tables import BlockTables
from crossdock.core.kv_layout import KvLayout
from crossdock.core.prefix_cache import PrefixCache
from crossdock.core.request import Request, RequestId, SamplingParams, pack_ids
from crossdock.core.sequence import Chunk, ChunkResult, Sequence, settle, take_chunk

BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS = 2, 9, 6
KEY = b"cluster"
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=BLOCK_SIZE, dtype="float32")
HASHER = BlockHasher(KEY, model_root(KEY, "tiny@1", LAYOUT), BLOCK_SIZE)

Written = tuple[bytes, *tuple[int, ...]] | None
FOREIGN: Written = (b"another worker",)
indices = st.integers(min_value=0, max_value=99)


@dataclass(slots=True)
class Memory:
    """The KV bytes of the pool, as the tokens they stand for; ``None`` is garbage."""

    slots: list[Written] = field(default_factory=lambda: [None] * (NUM_BLOCKS * BLOCK_SIZE))

    def write(self, chunk: Chunk, is_done: bool) -> None:
        for position in range(chunk.start, chunk.end):
            is_known = is_done and position < len(chunk.sequence.token_ids)
            written = content(chunk.sequence, position) if is_known else None
            self.slots[self._slot(chunk.blocks, position)] = written

    def receive(self, blocks: list[int]) -> None:
        for block in blocks:
            self.slots[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] = [FOREIGN] * BLOCK_SIZE

    def assert_received(self, blocks: list[int]) -> None:
        for block in blocks:
            assert self.slots[block * BLOCK_SIZE : (block + 1) * BLOCK_SIZE] == [FOREIGN] * BLOCK_SIZE

    def assert_holds(self, sequence: Sequence, blocks: Seq[int], num_tokens: int) -> None:
        for position in range(num_tokens):
            assert self.slots[self._slot(blocks, position)] == content(sequence, position)

    @staticmethod
    def _slot(blocks: Seq[int], position: int) -> int:
        return blocks[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE


def content(sequence: Sequence, position: int) -> Written:
    return (sequence.request.salt, *sequence.token_ids[: position + 1])


class Accounting(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.prefixes = PrefixCache(self.pool, is_enabled=True)
        self.tables = BlockTables(self.pool, self.prefixes, HASHER, BLOCK_SIZE)
        self.memory = Memory()
        self.sequences: list[Sequence] = []
        self.flying: deque[Chunk] = deque()
        self.leases: list[list[int]] = []
        self.quarantined: list[list[int]] = []
        self.routers_copy: set[bytes] = set()

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.sequences if not sequence.is_released]

    def begin(self, sequence: Sequence) -> None:
        self.tables.reuse(sequence, sequence.num_tokens - 1)
        self.memory.assert_holds(sequence, sequence.blocks, sequence.num_computed)
        assert sequence.num_computed == len(sequence.blocks) * BLOCK_SIZE < sequence.num_tokens

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9), salt=st.sampled_from([b"", b"tenant"]))
    def arrive(self, tokens: list[int], salt: bytes) -> None:
        params = SamplingParams(max_tokens=MAX_TOKENS, seed=0)
        request = Request(request_id=RequestId("r"), prompt=pack_ids(tokens), params=params, salt=salt)
        sequence = Sequence.of(request)
        self.begin(sequence)
        self.sequences.append(sequence)

    @rule(budget=st.integers(1, 12))
    def launch_a_step(self, budget: int) -> None:
        for sequence in self.running():
            num_tokens = min(budget, sequence.num_unscheduled)
            if num_tokens > 0 and sequence.num_in_flight < 2 and self.grow(sequence, num_tokens):
                chunk = take_chunk(sequence, num_tokens)
                self.memory.write(chunk, is_done=False)
                self.flying.append(chunk)
                budget -= num_tokens

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        end = sequence.num_scheduled + num_tokens
        num_missing, blocks = self.tables.num_missing(sequence, end), list(sequence.blocks)
        try:
            self.tables.grow(sequence, end)
        except OutOfBlocks:
            assert num_missing > self.pool.num_available
            assert sequence.blocks == blocks
            return False
        assert len(sequence.blocks) == len(blocks) + num_missing
        return True

    @precondition(lambda self: self.flying)
    @rule(token_ids=st.lists(st.integers(0, 1), min_size=1, max_size=4))
    def finish_the_oldest_chunks(self, token_ids: list[int]) -> None:
        for token_id in token_ids[: len(self.flying)]:
            self.finish(self.flying.popleft(), token_id)

    def finish(self, chunk: Chunk, token_id: int) -> None:
        sequence = chunk.sequence
        self.memory.write(chunk, is_done=True)
        self.memory.assert_holds(sequence, chunk.blocks, chunk.end)
        settle(chunk, ChunkResult(token_id if chunk.samples else None))
        self.tables.publish(sequence)
        self.tables.step_done(chunk)

    @precondition(lambda self: self.sequences)
    @rule(index=indices)
    def release(self, index: int) -> None:
        sequence = self.sequences[index % len(self.sequences)]
        if sequence.is_released and not sequence.num_in_flight:
            self.sequences.remove(sequence)
        self.tables.release(sequence)

    @precondition(lambda self: any(sequence.num_in_flight == 0 for sequence in self.running()))
    @rule(index=indices)
    def preempt(self, index: int) -> None:
        resting = [sequence for sequence in self.running() if sequence.num_in_flight == 0]
        sequence = resting[index % len(resting)]
        self.tables.reset(sequence)
        self.begin(sequence)

    @rule(num_blocks=st.integers(1, 4))
    def reserve_for_a_transfer(self, num_blocks: int) -> None:
        num_available = self.pool.num_available
        try:
            blocks = self.pool.take(num_blocks)
        except OutOfBlocks:
            assert num_blocks > num_available == self.pool.num_available
            return
        self.memory.receive(blocks)
        self.leases.append(blocks)

    @precondition(lambda self: self.leases)
    @rule(index=indices, is_writer_stopped=st.booleans())
    def end_a_lease(self, index: int, is_writer_stopped: bool) -> None:
        blocks = self.leases.pop(index % len(self.leases))
        self.memory.assert_received(blocks)
        if is_writer_stopped:
            self.pool.give_back(blocks)
        else:
            self.pool.quarantine(blocks)
            self.quarantined.append(blocks)

    @precondition(lambda self: self.quarantined)
    @rule(index=indices)
    def write_late_and_end_the_quarantine(self, index: int) -> None:
        blocks = self.quarantined.pop(index % len(self.quarantined))
        self.memory.receive(blocks)
        self.pool.end_quarantine(blocks)

    @rule()
    def tell_the_router(self) -> None:
        snapshot = self.prefixes.snapshot()
        assert (set(snapshot.hashes), len(snapshot.hashes)) == (self.routers_copy, len(self.routers_copy))
        events = self.prefixes.take_events()
        if events is not None:
            assert events.number == snapshot.number + 1
            assert self.routers_copy.isdisjoint(events.stored) and self.routers_copy.issuperset(events.evicted)
            self.routers_copy = (self.routers_copy | set(events.stored)) - set(events.evicted)
        held = {self.pool.hash_of(block) for block in range(NUM_BLOCKS)} - {None}
        assert self.routers_copy == held

    @invariant()
    def every_block_is_accounted_for(self) -> None:
        self.prefixes.check()
        held = {block for sequence in self.sequences for block in sequence.blocks}
        leased = [block for blocks in self.leases for block in blocks]
        quarantined = [block for blocks in self.quarantined for block in blocks]
        assert held.isdisjoint(leased) and held.isdisjoint(quarantined)
        books = self.pool.books()
        assert (books.leased, books.quarantined) == (len(held) + len(leased), len(quarantined))
        assert books.free + books.cached == self.pool.num_available == NUM_BLOCKS - books.leased - books.quarantined

    @invariant()
    def what_is_computed_is_there(self) -> None:
        for sequence in self.running():
            assert sequence.num_published <= sequence.num_computed // BLOCK_SIZE
            self.memory.assert_holds(sequence, sequence.blocks, sequence.num_computed)

    def teardown(self) -> None:
        for sequence in self.sequences:
            self.tables.release(sequence)
        while self.flying:
            self.finish(self.flying.popleft(), 0)
        for blocks in self.leases:
            self.pool.give_back(blocks)
        for blocks in self.quarantined:
            self.pool.end_quarantine(blocks)
        self.prefixes.check()
        assert self.pool.num_available == NUM_BLOCKS


TestAccounting = Accounting.TestCase
TestAccounting.settings = settings(max_examples=200, stateful_step_count=50, deadline=None, database=None)
