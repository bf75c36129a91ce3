"""Which requests decode next and who gives way; blocks of 16 tokens."""

from crossdock.core.block_tables import BlockTables
from crossdock.core.part import StepBudget
from crossdock.core.sequence import Chunk, Sequence
from crossdock.decode.scheduler import DecodeScheduler

from ..parts import finish, free, name_of, request, spans, tables_of


class Bench:
    def __init__(self, num_blocks: int, prefix_cache: bool = True, held: tuple[str, ...] = ()) -> None:
        """Those of ``held`` run only when all their tokens are known, as with a grammar."""
        self.tables: BlockTables = tables_of(num_blocks, prefix_cache)
        self.scheduler = DecodeScheduler(self.tables, lambda one: one.num_pending == 0 or name_of(one) not in held)
        self.num_added = 0

    def add(
        self, name: str, num_prompt: int = 16, max_tokens: int = 20, first_id: int | None = None, priority: int = 0
    ) -> Sequence:
        """A request whose prompt is computed and whose first token is known; prompts differ unless told otherwise."""
        first_id = 100 * self.num_added if first_id is None else first_id
        sequence = Sequence.of(request(name, num_prompt, max_tokens, priority, first_id))
        self.num_added += 1
        self.tables.grow(sequence, num_prompt)
        sequence.num_scheduled = sequence.num_computed = num_prompt
        sequence.append(500)
        self.tables.publish(sequence)
        self.scheduler.add(sequence)
        return sequence

    def plan(self, num_tokens: int = 512, num_sequences: int = 64) -> list[Chunk]:
        return self.scheduler.plan(StepBudget(num_tokens, num_sequences))

    def step(self, num_tokens: int = 512) -> list[str]:
        """Plan and run."""
        chunks = self.plan(num_tokens)
        finish(self.tables, chunks)
        return spans(chunks)

    def end(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.tables.release(sequence)


def test_every_running_request_gets_a_token_in_every_step_oldest_first() -> None:
    bench = Bench(8)
    bench.add("a", 16)
    bench.add("b", 20)
    assert bench.step() == ["a 16-17 ->", "b 20-21 ->"]
    bench.add("c", 3)
    assert bench.step() == ["a 17-18 ->", "b 21-22 ->", "c 3-4 ->"]


def test_the_urgent_are_served_first_and_the_youngest_of_the_least_urgent_gives_way() -> None:
    bench = Bench(4)
    late = bench.add("late", priority=1)
    bench.add("b", priority=0)
    later = bench.add("later", priority=1)
    bench.add("a", priority=-1)
    assert bench.step() == ["a 16-17 ->"]
    assert [len(sequence.blocks) for sequence in (late, later)] == [1, 0]
    assert bench.step() == ["a 17-18 ->", "b 16-17 ->"]
    assert [len(sequence.blocks) for sequence in (late, later)] == [0, 0]


def test_the_next_token_is_planned_while_the_one_before_is_on_the_device() -> None:
    bench = Bench(8)
    bench.add("a", 16)
    first, second = bench.plan(), bench.plan()
    assert spans([*first, *second]) == ["a 16-17 ->", "a 17-18 ->"]
    assert [chunk.takes_pending for chunk in (*first, *second)] == [False, True]
    assert [chunk.output_index for chunk in (*first, *second)] == [1, 2]
    finish(bench.tables, first)
    (third,) = bench.plan()
    assert (third.start, third.takes_pending) == (18, True)


def test_who_waits_for_its_own_token_takes_part_in_every_other_step_and_holds_nobody_up() -> None:
    bench = Bench(8, held=("b",))
    for name in "abc":
        bench.add(name)
    planned, previous = [], bench.plan()
    for _ in range(3):
        following = bench.plan()
        planned.append(spans(following))
        finish(bench.tables, previous)
        previous = following
    assert planned == [
        ["a 17-18 ->", "c 17-18 ->"],
        ["a 18-19 ->", "b 17-18 ->", "c 18-19 ->"],
        ["a 19-20 ->", "c 19-20 ->"],
    ]


def test_who_waits_for_its_own_token_gives_way_and_returns_like_any_other() -> None:
    bench = Bench(4, prefix_cache=False, held=("b",))
    bench.add("a", max_tokens=40)
    b = bench.add("b", max_tokens=40)
    steps = [bench.step() for _ in range(32)]
    assert bench.scheduler.num_preemptions == 1
    assert (b.blocks, steps[-1]) == ([], ["a 47-48 ->"])


def test_no_step_is_planned_past_the_limit() -> None:
    bench = Bench(8)
    sequence = bench.add("a", 16, max_tokens=3)
    first, second = bench.plan(), bench.plan()
    assert spans([*first, *second]) == ["a 16-17 ->", "a 17-18 ->"]
    assert (bench.plan(), bench.scheduler.has_work) == ([], False)
    finish(bench.tables, first)
    finish(bench.tables, second)
    assert (sequence.num_output, bench.plan()) == (3, [])


def test_a_budget_that_is_too_small_goes_to_the_oldest() -> None:
    bench = Bench(8)
    for name in "abc":
        bench.add(name)
    assert bench.step(num_tokens=2) == ["a 16-17 ->", "b 16-17 ->"]
    assert spans(bench.plan(num_sequences=1)) == ["a 17-18 ->"]


def test_budget_is_taken_by_what_is_planned() -> None:
    bench = Bench(8)
    bench.add("a")
    bench.add("b")
    budget = StepBudget(10, 5)
    bench.scheduler.plan(budget)
    assert budget == StepBudget(8, 3)


def test_when_all_blocks_are_taken_the_youngest_give_way_one_after_the_other() -> None:
    bench = Bench(8)
    for name in "abcdefgh":
        bench.add(name)
    assert bench.tables.pool.num_available == 0
    assert bench.step() == ["a 16-17 ->"]  # h gave its block, b asked for g's too late for this step
    assert (bench.scheduler.num_running, bench.scheduler.num_preempted) == (7, 1)
    assert bench.step() == ["a 17-18 ->", "b 16-17 ->"]
    assert bench.step() == ["a 18-19 ->", "b 17-18 ->", "c 16-17 ->"]
    assert bench.step() == ["a 19-20 ->", "b 18-19 ->", "c 17-18 ->", "d 16-17 ->"]
    assert bench.step() == ["a 20-21 ->", "b 19-20 ->", "c 18-19 ->", "d 17-18 ->"]
    assert bench.scheduler.num_preemptions == 4


def test_a_victim_keeps_its_blocks_until_its_step_is_done() -> None:
    bench = Bench(3)
    bench.add("a", 31)
    young = bench.add("b", 10)
    first = bench.plan()
    assert spans(first) == ["a 31-32 ->", "b 10-11 ->"]
    assert bench.plan() == []  # a needs a block, and the step of b still writes
    assert (bench.plan(), len(young.blocks)) == ([], 1)
    finish(bench.tables, first)
    assert bench.step() == ["a 32-33 ->"]
    assert (young.blocks, young.num_scheduled, bench.scheduler.num_preemptions) == ([], 0, 1)


def test_a_victim_that_ends_by_itself_is_not_preempted() -> None:
    bench = Bench(3)
    bench.add("a", 31)
    young = bench.add("b", 10)
    first = bench.plan()
    assert bench.plan() == []
    finish(bench.tables, first)
    bench.end(young)
    assert bench.step() == ["a 32-33 ->"]
    assert bench.scheduler.num_preemptions == 0


def test_a_preempted_request_computes_prompt_and_output_again_and_samples_only_the_next_token() -> None:
    bench = Bench(4, prefix_cache=False)
    old = bench.add("a", 31)
    young = bench.add("b", 30)
    assert bench.step() == ["a 31-32 ->", "b 30-31 ->"]
    assert bench.step() == ["a 32-33 ->"]
    assert (young.output_ids, young.blocks) == ([500, 500], [])
    assert bench.step() == ["a 33-34 ->"]
    bench.end(old)
    assert bench.step(num_tokens=20) == ["b 0-20"]
    assert bench.step(num_tokens=20) == ["b 20-32 ->"]
    assert young.output_ids == [500, 500, 500]
    assert bench.step() == ["b 32-33 ->"]


def test_a_preempted_request_finds_its_blocks_in_the_prefix_cache_output_included() -> None:
    bench = Bench(5)
    old = bench.add("a", 31)
    young = bench.add("b", 30)
    assert [len(bench.step()) for _ in range(4)] == [2, 2, 1, 1]
    assert (young.output_ids, young.blocks) == ([500, 500, 500], [])
    bench.end(old)
    assert bench.step() == ["b 32-33 ->"]


def test_a_preempted_request_whose_blocks_are_all_held_by_a_twin_still_computes_its_last_token() -> None:
    bench = Bench(4)
    twin = bench.add("a", 16, first_id=0)
    bench.step()
    bench.add("b", 16, first_id=0)
    for _ in range(15):
        bench.step()
    assert bench.step() == ["a 32-33 ->"]
    bench.end(twin)
    assert bench.step() == ["b 16-32 ->"]


def test_those_who_gave_way_return_in_their_order() -> None:
    bench = Bench(4, prefix_cache=False)
    oldest = bench.add("a", 16)
    bench.add("b", 16)
    bench.add("c", 10)
    taken = bench.tables.pool.take(1)
    assert [bench.step(), bench.step()] == [["a 16-17 ->"], ["a 17-18 ->"]]
    assert bench.scheduler.num_preempted == 2
    bench.tables.pool.give_back(taken)
    assert bench.step() == ["a 18-19 ->"]  # c would fit now, but b comes first
    bench.end(oldest)
    assert bench.step() == ["b 0-17 ->", "c 0-11 ->"]


def test_a_request_that_comes_back_keeps_no_token_from_those_behind_it() -> None:
    bench = Bench(7, prefix_cache=False)
    bench.add("a", 48)
    taken = bench.tables.pool.take(4)
    assert bench.step() == []
    bench.tables.pool.give_back(taken)
    bench.add("b", 17)
    assert bench.step(num_tokens=20) == ["a 0-19", "b 17-18 ->"]
    assert bench.step(num_tokens=20) == ["a 19-38", "b 18-19 ->"]
    assert bench.step(num_tokens=1) == ["a 38-39"]
    assert bench.step(num_tokens=20) == ["a 39-49 ->", "b 19-20 ->"]
    assert bench.step(num_tokens=20) == ["a 49-50 ->", "b 20-21 ->"]


def test_a_return_leaves_every_running_request_a_block_to_grow() -> None:
    bench = Bench(4, prefix_cache=False)
    old = bench.add("a", 20)
    young = bench.add("b", 16)
    taken = bench.tables.pool.take(1)
    assert bench.step() == ["a 20-21 ->"]
    assert bench.step() == ["a 21-22 ->"]
    assert young.blocks == []
    bench.tables.pool.give_back(taken)
    assert bench.step() == ["a 22-23 ->"]  # two blocks are free, but a may need one of them
    bench.end(old)
    assert bench.step() == ["b 0-17 ->"]


def test_newcomers_leave_a_block_for_each_running_request_and_room_for_the_next_return() -> None:
    bench = Bench(8, prefix_cache=False)
    assert bench.scheduler.num_held_back == 0
    bench.add("a", 31)
    bench.add("b", 31)
    bench.add("c", 16)
    assert bench.scheduler.num_held_back == 3
    bench.tables.pool.take(3)
    bench.step()
    bench.step()
    assert (bench.scheduler.num_running, bench.scheduler.num_preempted) == (2, 1)
    assert bench.scheduler.num_held_back == 2 + 2  # c comes back with 17 tokens and its next


def test_a_request_that_is_alone_gives_way_to_blocks_held_outside_and_returns() -> None:
    bench = Bench(3)
    sequence = bench.add("a", 32)
    taken = bench.tables.pool.take(1)
    assert bench.step() == []
    assert (sequence.blocks, bench.scheduler.num_preemptions, bench.scheduler.has_work) == ([], 1, True)
    assert bench.step() == []
    bench.tables.pool.give_back(taken)
    assert bench.step() == ["a 32-33 ->"]


def test_a_request_that_fills_the_pool_alone_reaches_its_limit() -> None:
    bench = Bench(2)
    sequence = bench.add("a", 12, max_tokens=20)
    while bench.scheduler.has_work:
        assert len(bench.step()) == 1
    assert (sequence.num_tokens, bench.scheduler.num_preemptions) == (32, 0)
    bench.end(sequence)
    assert bench.tables.pool.books() == free(2, cached=1)


def test_a_preempted_request_may_end() -> None:
    bench = Bench(3)
    old = bench.add("a", 32)
    young = bench.add("b", 16)
    assert bench.step() == ["a 32-33 ->"]
    bench.end(young)
    bench.end(old)
    assert (bench.scheduler.has_work, bench.scheduler.num_held_back, bench.plan()) == (False, 0, [])
    assert bench.tables.pool.books().leased == 0
