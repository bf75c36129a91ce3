"""The loop: who plans what, what is launched together, and who hears of it."""

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import cast

import pytest

from crossdock.core.part import Delivery, Part, StepBudget
from crossdock.core.sequence import Chunk, ChunkResult, Sequence, take_chunk
from crossdock.model.engine import Engine
from crossdock.model.executor import Executor

from ..parts import free, request, spans, tables_of


@dataclass(slots=True, eq=False)
class FakeLaunched:
    chunks: Seq[Chunk]
    previous: "FakeLaunched | None"
    num_groups_done: int = 0
    is_done: bool = False

    def results(self) -> list[ChunkResult]:
        """As the device's own: waits until the step has run."""
        self.num_groups_done, self.is_done = 3, True
        return [ChunkResult(100 + number if chunk.samples else None) for number, chunk in enumerate(self.chunks)]


class FakeExecutor:
    def launch(self, chunks: Seq[Chunk], previous: FakeLaunched | None) -> FakeLaunched:
        return FakeLaunched(chunks, previous)


@dataclass(slots=True, eq=False)
class FakePart:
    """Plans each of its sequences, all that is left and fits, and keeps what it hears in ``log``."""

    name: str
    log: list[str]
    sequences: list[Sequence] = field(default_factory=list)

    @property
    def has_work(self) -> bool:
        return any(sequence.num_unscheduled for sequence in self.sequences)

    def handle(self, delivery: Delivery, now: float) -> bool:
        return False

    def plan(self, budget: StepBudget, now: float) -> list[Chunk]:
        self.log.append(f"{self.name} may plan {budget.num_tokens} tokens of {budget.num_sequences} sequences")
        chunks = []
        for sequence in self.sequences:
            num_tokens = min(sequence.num_unscheduled, budget.num_tokens)
            if num_tokens:
                budget.take(num_tokens)
                chunks.append(take_chunk(sequence, num_tokens))
        return chunks

    def apply(self, done: Seq[tuple[Chunk, ChunkResult]], now: float) -> None:
        self.log += [f"{self.name} hears {spans([chunk])[0]} {result.token_id}" for chunk, result in done]

    def layers_done(self, chunks: Seq[Chunk], groups: range, now: float) -> None:
        self.log.append(f"{self.name} has groups {[*groups]} of {', '.join(spans(chunks))}")

    def sweep(self, now: float) -> None: ...

    def lose(self, peer: object, now: float) -> None: ...


class Bench:
    def __init__(self) -> None:
        self.tables = tables_of(8)
        self.log: list[str] = []
        self.first, self.second = FakePart("one", self.log), FakePart("two", self.log)
        parts = [cast(Part, self.first), cast(Part, self.second)]
        self.engine = Engine(cast(Executor, FakeExecutor()), self.tables, parts, chunk_tokens=32, max_num_seqs=4)

    def add(self, part: FakePart, name: str, num_prompt: int) -> Sequence:
        sequence = Sequence.of(request(name, num_prompt))
        self.tables.grow(sequence, num_prompt)
        part.sequences.append(sequence)
        return sequence

    def take_log(self) -> list[str]:
        taken, self.log[:] = list(self.log), []
        return taken


def test_the_first_part_plans_first_and_the_second_gets_what_is_left() -> None:
    bench = Bench()
    bench.add(bench.first, "a", 10)
    bench.add(bench.second, "b", 40)
    step = bench.engine.launch(None, 0.0)
    assert step is not None
    assert spans(step.launched.chunks) == ["a 0-10 ->", "b 0-22"]
    assert bench.log == ["one may plan 32 tokens of 4 sequences", "two may plan 22 tokens of 3 sequences"]


def test_without_work_nothing_is_launched() -> None:
    bench = Bench()
    assert (bench.engine.has_work, bench.engine.launch(None, 0.0), bench.engine.num_steps) == (False, None, 0)


def test_every_part_hears_of_its_own_chunks_and_each_layer_group_once() -> None:
    bench = Bench()
    bench.add(bench.first, "a", 10)
    bench.add(bench.second, "b", 40)
    step = bench.engine.launch(None, 0.0)
    assert step is not None
    bench.take_log()
    cast(FakeLaunched, step.launched).num_groups_done = 1
    bench.engine.tell_progress(step, 0.0)
    bench.engine.tell_progress(step, 0.0)
    assert bench.take_log() == ["one has groups [0] of a 0-10 ->", "two has groups [0] of b 0-22"]
    bench.engine.finish(step, 0.0)
    assert bench.take_log() == [
        "one hears a 0-10 -> 100",
        "two hears b 0-22 None",
        "one has groups [1, 2] of a 0-10 ->",
        "two has groups [1, 2] of b 0-22",
    ]


def test_a_step_is_launched_before_the_one_before_it_is_finished() -> None:
    bench = Bench()
    sequence = bench.add(bench.first, "a", 40)
    first = bench.engine.step(None, 0.0)
    assert (first is not None, sequence.num_in_flight) == (True, 1)
    bench.take_log()
    second = bench.engine.step(first, 0.0)
    assert second is not None and first is not None
    assert cast(FakeLaunched, second.launched).previous is cast(object, first.launched)
    assert "one hears a 0-32 None" in bench.take_log()
    assert sequence.num_in_flight == 1
    assert (bench.engine.num_steps, spans(second.launched.chunks)) == (2, ["a 32-40 ->"])


def test_blocks_of_what_ended_during_a_step_come_back_when_the_step_is_finished() -> None:
    bench = Bench()
    sequence = bench.add(bench.first, "a", 10)
    step = bench.engine.launch(None, 0.0)
    assert step is not None
    bench.tables.release(sequence)
    assert bench.tables.pool.books().leased == 1
    bench.engine.finish(step, 0.0)
    assert bench.tables.pool.books() == free(8)


@pytest.mark.parametrize("name", ["one", "two"])
def test_there_is_work_if_any_part_has_some(name: str) -> None:
    bench = Bench()
    bench.add(bench.first if name == "one" else bench.second, "a", 10)
    assert bench.engine.has_work
