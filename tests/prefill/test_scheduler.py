"""Which prompts are computed next; blocks of 16 tokens."""

import pytest

from crossdock.core.block_tables import BlockTables
from crossdock.core.messages import PoolBooks
from crossdock.core.part import StepBudget
from crossdock.core.sequence import Chunk, Sequence
from crossdock.prefill.scheduler import PromptScheduler

from ..parts import finish, free, request, spans, tables_of


class Bench:
    def __init__(self, num_blocks: int) -> None:
        self.tables: BlockTables = tables_of(num_blocks)
        self.num_held_back = 0
        self.scheduler = PromptScheduler(self.tables, lambda: self.num_held_back)

    def add(self, name: str, num_prompt: int, priority: int = 0, first_id: int = 0) -> Sequence:
        sequence = Sequence.of(request(name, num_prompt, priority=priority, first_id=first_id))
        self.scheduler.add(sequence)
        return sequence

    def plan(self, num_tokens: int = 512, num_sequences: int = 8) -> list[Chunk]:
        return self.scheduler.plan(StepBudget(num_tokens, num_sequences))

    def step(self, num_tokens: int = 512, num_sequences: int = 8) -> list[str]:
        """Plan and run."""
        chunks = self.plan(num_tokens, num_sequences)
        finish(self.tables, chunks)
        return spans(chunks)


def test_prompts_start_in_order_of_arrival_within_their_priority() -> None:
    bench = Bench(8)
    for number, (name, priority) in enumerate([("a", 1), ("b", 0), ("c", 1), ("d", 0), ("e", -1)]):
        bench.add(name, 10, priority, first_id=100 * number)
    assert bench.step() == ["e 0-10 ->", "b 0-10 ->", "d 0-10 ->", "a 0-10 ->", "c 0-10 ->"]
    assert not bench.scheduler.has_work


def test_a_long_prompt_is_cut_at_block_borders_and_the_next_one_starts_in_what_its_last_chunk_leaves() -> None:
    bench = Bench(16)
    bench.add("a", 80)
    bench.add("b", 40, first_id=100)
    assert bench.step(40) == ["a 0-32"]
    assert bench.step(40) == ["a 32-64"]
    assert bench.step(40) == ["a 64-80 ->", "b 0-16"]
    assert bench.scheduler.num_queued_tokens == 24
    assert bench.step(40) == ["b 16-40 ->"]


def test_the_next_chunk_is_planned_while_the_one_before_is_on_the_device() -> None:
    bench = Bench(16)
    bench.add("a", 70)
    first, second, third = bench.plan(32), bench.plan(32), bench.plan(32)
    assert spans([*first, *second, *third]) == ["a 0-32", "a 32-64", "a 64-70 ->"]
    assert bench.plan(32) == []


def test_prompts_under_way_go_on_before_new_ones_of_their_priority_and_after_more_urgent_ones() -> None:
    bench = Bench(16)
    bench.add("a", 20)
    bench.add("b", 100, first_id=100)
    assert bench.step(64) == ["a 0-20 ->", "b 0-32"]
    bench.add("c", 20, priority=-1, first_id=300)
    bench.add("d", 20, first_id=400)
    assert bench.step(64) == ["c 0-20 ->", "b 32-64"]
    assert bench.step(64) == ["b 64-100 ->", "d 0-20 ->"]


def test_no_more_prompts_are_in_a_step_than_it_may_have_sequences() -> None:
    bench = Bench(8)
    for number, name in enumerate("abc"):
        bench.add(name, 10, first_id=100 * number)
    assert bench.step(num_sequences=2) == ["a 0-10 ->", "b 0-10 ->"]
    assert bench.step(num_sequences=0) == []
    assert bench.step(num_sequences=2) == ["c 0-10 ->"]


def test_a_prompt_without_room_waits_and_nobody_overtakes_it() -> None:
    bench = Bench(8)
    first = bench.add("a", 100)
    bench.add("b", 40, first_id=200)
    bench.add("c", 10, first_id=300)
    assert bench.step() == ["a 0-100 ->"]
    assert bench.step() == []
    assert bench.scheduler.num_waiting == 2
    bench.tables.release(first)
    assert bench.step() == ["b 0-40 ->", "c 0-10 ->"]


def test_a_prompt_starts_only_when_the_pool_holds_all_of_it() -> None:
    bench = Bench(8)
    bench.add("a", 64)
    bench.add("b", 80, first_id=200)
    assert bench.step(16) == ["a 0-16"]
    assert bench.tables.pool.books() == PoolBooks(free=4, cached=0, leased=4, quarantined=0)
    assert [bench.step(64), bench.step(64)] == [["a 16-64 ->"], []]
    assert bench.tables.pool.books() == PoolBooks(free=4, cached=0, leased=4, quarantined=0)


@pytest.mark.parametrize(("num_held_back", "planned"), [(6, ["a 0-32 ->"]), (7, [])])
def test_blocks_that_running_requests_need_are_left_to_them(num_held_back: int, planned: list[str]) -> None:
    bench = Bench(8)
    bench.num_held_back = num_held_back
    bench.add("a", 32)
    assert bench.step() == planned


def test_a_prompt_as_long_as_the_pool_starts_when_the_pool_is_empty() -> None:
    bench = Bench(8)
    bench.add("a", 128)
    assert bench.step() == ["a 0-128 ->"]


def test_a_held_prefix_is_not_computed_again_but_the_last_token_is() -> None:
    bench = Bench(8)
    bench.add("a", 32)
    bench.step()
    bench.add("longer", 40)
    bench.add("equal", 32)
    assert bench.step() == ["longer 32-40 ->", "equal 16-32 ->"]
    bench.tables.prefixes.check()


def test_two_prompts_with_one_prefix_share_nothing_before_its_kv_is_written() -> None:
    bench = Bench(8)
    bench.add("a", 40)
    bench.add("b", 40)
    assert bench.step() == ["a 0-40 ->", "b 0-40 ->"]


def test_an_abort_before_the_step_has_run_leaves_nothing_to_reuse() -> None:
    bench = Bench(8)
    first = bench.add("a", 64)
    (chunk,) = bench.plan()
    bench.tables.release(first)
    assert bench.tables.pool.books().leased == 4
    bench.tables.step_done(chunk)
    assert bench.tables.pool.books() == free(8)
    bench.add("b", 64)
    assert bench.step() == ["b 0-64 ->"]


def test_a_prompt_whose_logprobs_are_wanted_is_computed_from_its_beginning() -> None:
    bench = Bench(8)
    bench.add("a", 40)
    bench.step()
    bench.scheduler.add(Sequence.of(request("scored", 40, prompt_logprobs=0)))
    assert bench.step() == ["scored 0-40 ->"]


def test_a_budget_below_a_block_still_brings_a_prompt_to_its_end() -> None:
    bench = Bench(8)
    bench.add("a", 40)
    assert [bench.step(15) for _ in range(3)] == [["a 0-15"], ["a 15-30"], ["a 30-40 ->"]]
    bench.add("b", 40, first_id=100)
    assert [bench.step(0), bench.step(1), bench.step(20), bench.step(64)] == [[], ["b 0-1"], ["b 1-17"], ["b 17-40 ->"]]


def test_what_a_step_has_left_beside_a_long_prompt_starts_no_crumbs() -> None:
    bench = Bench(16)
    bench.add("a", 100)
    bench.add("b", 10, first_id=200)
    assert bench.step(40) == ["a 0-32"]


def test_a_removed_prompt_is_forgotten_wherever_it_stands() -> None:
    bench = Bench(8)
    computing, waiting = bench.add("a", 64), bench.add("b", 64, first_id=100)
    bench.plan(32)
    bench.scheduler.remove(waiting)
    bench.scheduler.remove(computing)
    bench.scheduler.remove(computing)
    assert (bench.scheduler.has_work, bench.plan()) == (False, [])


def test_a_refused_prompt_gives_its_shared_prefix_back() -> None:
    bench = Bench(6)
    first = bench.add("a", 40)
    bench.step()
    bench.tables.release(first)
    other = bench.add("other", 33, first_id=200)
    bench.step()
    bench.add("b", 64)
    assert bench.step() == []
    assert bench.tables.pool.books() == PoolBooks(free=1, cached=2, leased=3, quarantined=0)
    bench.tables.release(other)
    assert bench.step() == ["b 32-64 ->"]
