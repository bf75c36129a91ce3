"""The loop: plan, launch, finish, one step ahead of the device.

The engine has no roles and no policy. Its parts plan, it launches what they planned together, and gives
them the results. A launched step goes round as a value: ``launched = engine.step(launched, now)``.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ..core.block_tables import BlockTables
from ..core.part import Part, StepBudget
from ..core.sequence import Chunk
from .executor import Executor, Launched


@dataclass(slots=True, eq=False)
class Step:
    """A launched step and which chunks of it belong to which part."""

    launched: Launched
    shares: Seq[tuple[Part, Seq[Chunk]]]
    num_groups_told: int = 0


class Engine:
    """One executor, one pool, two parts. Parts earlier in ``parts`` plan first, so decode tokens never wait."""

    def __init__(
        self, executor: Executor, tables: BlockTables, parts: Seq[Part], chunk_tokens: int, max_num_seqs: int
    ) -> None:
        self._executor = executor
        self._tables = tables
        self._parts = parts
        self._chunk_tokens = chunk_tokens
        self._max_num_seqs = max_num_seqs
        self.num_steps = 0

    @property
    def has_work(self) -> bool:
        return any(part.has_work for part in self._parts)

    def step(self, previous: Step | None, now: float) -> Step | None:
        """Launch the next step, then wait for the previous one and finish it."""
        launched = self.launch(previous, now)
        if previous is not None:
            self.finish(previous, now)
        return launched

    def launch(self, previous: Step | None, now: float) -> Step | None:
        """Plan and launch while ``previous`` is still on the device; ``None`` if there is nothing to do."""
        budget = StepBudget(self._chunk_tokens, self._max_num_seqs)
        shares = [(part, chunks) for part in self._parts if (chunks := part.plan(budget, now))]
        if not shares:
            return None
        chunks = [chunk for _, share in shares for chunk in share]
        self.num_steps += 1
        return Step(self._executor.launch(chunks, previous.launched if previous else None), shares)

    def tell_progress(self, step: Step, now: float) -> None:
        """Tell the parts which layer groups of a running step have their KV written by now.

        All of them at once, since together they cost a transfer little more than one alone.
        """
        groups = range(step.num_groups_told, step.launched.num_groups_done)
        if groups:
            for part, chunks in step.shares:
                part.layers_done(chunks, groups, now)
            step.num_groups_told = groups.stop

    def finish(self, step: Step, now: float) -> None:
        """Wait for the step and give every part the results of its chunks.

        Layer groups of which it was not told come after them: somebody waits for tokens, and a group makes work.
        """
        results = step.launched.results()  # in the order of the shares
        end = 0
        for part, chunks in step.shares:
            start, end = end, end + len(chunks)
            part.apply(zip(chunks, results[start:end], strict=True), now)
            self._tables.step_done(*chunks)
        self.tell_progress(step, now)
