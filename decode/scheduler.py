"""Which requests decode in the next step, and who gives way when blocks run out."""

from bisect import insort

from ..core.block_pool import OutOfBlocks
from ..core.block_tables import BlockTables
from ..core.part import MayRun, StepBudget
from ..core.sequence import Chunk, Sequence, take_chunk, take_next


class DecodeScheduler:
    """Continuous batching: every running request that may takes part in every step, by priority, then oldest first.

    A request holds blocks and runs, or was preempted and holds none. When one can't get its next block the last in
    this order that has blocks gives way: once its step has ended it loses them, and later computes prompt and output
    tokens again, as chunks within the step's budget. The first request always finds room in the end, since
    none is longer than the pool; so every request ends.
    """

    def __init__(self, tables: BlockTables, may_run: MayRun = lambda sequence: True) -> None:
        self._tables = tables
        self._may_run = may_run
        self._requests: list[Sequence] = []
        self._giving_way: Sequence | None = None
        self.num_preemptions = 0

    @property
    def num_running(self) -> int:
        return sum(1 for sequence in self._requests if sequence.blocks)

    @property
    def num_preempted(self) -> int:
        return len(self._requests) - self.num_running

    @property
    def num_held_back(self) -> int:
        """Blocks that newcomers must leave free: one for each running request to grow, and what the next
        preempted request needs to come back."""
        preempted = next((sequence for sequence in self._requests if not sequence.blocks), None)
        to_return = self._tables.num_missing(preempted, preempted.num_tokens + 1) if preempted else 0
        return self.num_running + to_return

    @property
    def has_work(self) -> bool:
        return any(not sequence.is_at_limit for sequence in self._requests)

    def add(self, sequence: Sequence) -> None:
        """A newcomer whose blocks hold all but its last token; it is the youngest of its priority from now on."""
        insort(self._requests, sequence, key=lambda other: other.request.priority)

    def remove(self, sequence: Sequence) -> None:
        """Forget a request that ended; its blocks are the caller's affair."""
        self._requests.remove(sequence)
        if self._giving_way is sequence:
            self._giving_way = None

    def plan(self, budget: StepBudget) -> list[Chunk]:
        """A token for every running request that can grow, chunks for those that come back.

        Such a chunk leaves a token of the budget to each running request behind it.
        """
        self._preempt()
        chunks: list[Chunk] = []
        num_left, may_return, block_size = budget.num_tokens, True, self._tables.block_size
        for place, sequence in enumerate(self._requests):
            if num_left <= 0 or len(chunks) >= budget.num_sequences:
                break
            if sequence is self._giving_way or not self._may_run(sequence):
                continue
            if (next_one := take_next(sequence, block_size)) is not None:
                chunks.append(next_one)
                num_left -= 1
                continue
            if sequence.is_at_limit:
                continue
            if not sequence.blocks:
                may_return = may_return and self._readmit(sequence)
                if not may_return:
                    continue
            num_tokens = sequence.num_unscheduled
            if num_tokens > 1:
                num_behind = sum(1 for other in self._requests[place + 1 :] if other.blocks)
                num_tokens = min(num_tokens, max(1, num_left - num_behind))
            try:
                self._tables.grow(sequence, sequence.num_scheduled + num_tokens)
            except OutOfBlocks:
                self._make_way()
            else:
                chunks.append(take_chunk(sequence, num_tokens))
                num_left -= num_tokens
        budget.take(budget.num_tokens - num_left, len(chunks))
        if not chunks and self._giving_way is not None and self._giving_way.num_in_flight == 0:
            return self.plan(budget)
        return chunks

    def _preempt(self) -> None:
        """Take the blocks of the one that gives way, as soon as no step on the device writes to them."""
        if self._giving_way is not None and self._giving_way.num_in_flight == 0:
            self._tables.reset(self._giving_way)
            self._giving_way = None
            self.num_preemptions += 1

    def _make_way(self) -> None:
        """Somebody found no block."""
        if self._giving_way is None:
            self._giving_way = next(other for other in reversed(self._requests) if other.blocks)

    def _readmit(self, sequence: Sequence) -> bool:
        """Give a preempted request the blocks for all its tokens and one more, or nothing."""
        num_running = self.num_running
        self._tables.reuse(sequence, sequence.num_tokens - 1)
        missing = self._tables.num_missing(sequence, sequence.num_tokens + 1)
        if missing > self._tables.pool.num_available - num_running:
            self._tables.reset(sequence)
            return False
        self._tables.grow(sequence, sequence.num_tokens)
        return True
