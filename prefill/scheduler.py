"""Which prompts are computed next: first come, first served within a priority, under a token budget."""

from bisect import insort
from collections import deque
from collections.abc import Callable

from ..core.block_tables import BlockTables
from ..core.part import StepBudget
from ..core.request import Pooling
from ..core.sequence import Chunk, Sequence, take_chunk


class PromptScheduler:
    """Cuts prompts into chunks.

    A prompt starts only when the pool can hold all of it, so that prompts half done never wait for each
    other's blocks. ``held_back()`` blocks are left to the decode part. Nobody overtakes within a priority:
    a long prompt at the head waits for room, and those behind it wait for it.
    """

    def __init__(self, tables: BlockTables, held_back: Callable[[], int]) -> None:
        self._tables = tables
        self._held_back = held_back
        self._waiting: list[Sequence] = []
        self._computing: list[Sequence] = []

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        return bool(self._waiting or self._computing)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens no step computes yet, cached prefixes of waiting prompts not deducted."""
        return sum(sequence.num_unscheduled for sequence in (*self._computing, *self._waiting))

    def add(self, sequence: Sequence) -> None:
        """Queue a prompt behind those of its priority; a lower number goes first."""
        insort(self._waiting, sequence, key=_priority)

    def remove(self, sequence: Sequence) -> None:
        """Forget a prompt, wherever it stands; its blocks are the caller's affair."""
        for queue in (self._waiting, self._computing):
            if sequence in queue:
                queue.remove(sequence)

    def plan(self, budget: StepBudget) -> list[Chunk]:
        """Chunks of prompts under way, then of new ones, priority by priority, as far as budget and pool allow.

        They are whole blocks, so that a block is filled in one step; a step whose budget is less takes what it gets,
        lest running requests keep prompts waiting for ever.
        """
        unit = max(1, min(self._tables.block_size, budget.num_tokens))
        chunks: list[Chunk] = []
        under_way = deque(self._computing)
        may_start = True
        while budget.num_tokens > 0 and budget.num_sequences > 0:
            if may_start and self._is_newcomer_next(under_way):
                may_start = budget.num_tokens >= unit and self._admit(self._waiting[0])
                if not may_start:
                    continue
                sequence = self._waiting.pop(0)
                insort(self._computing, sequence, key=_priority)
            elif under_way:
                sequence = under_way.popleft()
            else:
                break
            chunks += self._cut(sequence, budget, unit)
        self._computing = [sequence for sequence in self._computing if sequence.num_scheduled < sequence.num_prompt]
        return chunks

    def _is_newcomer_next(self, under_way: deque[Sequence]) -> bool:
        if not self._waiting:
            return False
        return not under_way or _priority(self._waiting[0]) < _priority(under_way[0])

    def _cut(self, sequence: Sequence, budget: StepBudget, unit: int) -> list[Chunk]:
        """At most one chunk, the rest of the prompt or a multiple of ``unit`` tokens."""
        remaining = sequence.num_prompt - sequence.num_scheduled
        num_tokens = min(remaining, budget.num_tokens)
        if num_tokens < remaining:
            num_tokens -= num_tokens % unit
        if num_tokens <= 0 or budget.num_sequences <= 0:
            return []
        budget.take(num_tokens)
        return [take_chunk(sequence, num_tokens)]

    def _admit(self, sequence: Sequence) -> bool:
        """Give the prompt all its blocks, or nothing; there must be room for the copies that its forks need, too.

        The last token is always computed, since its output is the first token; prompt log-probabilities and means need
        every position computed.
        """
        request, tables = sequence.request, self._tables
        wants_all = request.params.prompt_logprobs is not None or request.pooling is Pooling.MEAN
        tables.reuse(sequence, 0 if wants_all else sequence.num_prompt - 1)
        missing = tables.num_missing(sequence, sequence.num_prompt) + request.num_copies(tables.block_size)
        if missing > tables.pool.num_available - self._held_back():
            tables.reset(sequence)
            return False
        tables.grow(sequence, sequence.num_prompt)
        return True


def _priority(sequence: Sequence) -> int:
    return sequence.request.priority
