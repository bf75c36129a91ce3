"""Which blocks travel together, and how far a prompt is written and pushed."""

from hypothesis import given
from hypothesis import strategies as st

from crossdock.kvtransfer.plan import GroupBlocks, PushPlan, Run, merge_runs


def test_blocks_that_are_adjacent_on_both_sides_become_one_run() -> None:
    runs = merge_runs([4, 5, 6, 9, 10, 2], [7, 8, 9, 10, 20, 21])
    assert runs == [Run(4, 7, 3), Run(9, 10, 1), Run(10, 20, 1), Run(2, 21, 1)]


def test_nothing_to_copy_is_no_run() -> None:
    assert merge_runs([], []) == []


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))))
def test_runs_say_the_same_as_the_pairs_and_no_two_could_be_one(pairs: list[tuple[int, int]]) -> None:
    runs = merge_runs([source for source, _ in pairs], [destination for _, destination in pairs])
    unrolled = [(run.source + i, run.destination + i) for run in runs for i in range(run.num_blocks)]
    assert unrolled == pairs
    ends = [(run.source + run.num_blocks, run.destination + run.num_blocks) for run in runs]
    starts = [(run.source, run.destination) for run in runs]
    assert all(end != start for end, start in zip(ends, starts[1:], strict=False))


def test_a_late_reservation_gets_the_backlog_of_each_group_at_once() -> None:
    plan = PushPlan(num_blocks=5, num_groups=2)
    plan.write(0, 4)
    plan.write(1, 3)
    plan.assign(2, [70, 71, 80])
    assert plan.take() == [GroupBlocks(0, range(2, 4), [70, 71]), GroupBlocks(1, range(2, 3), [70])]
    assert plan.take() == []
    plan.write_all()
    assert plan.take() == [GroupBlocks(0, range(4, 5), [80]), GroupBlocks(1, range(3, 5), [71, 80])]
    assert (plan.is_complete, plan.num_block_groups) == (True, 6)


def test_groups_of_the_same_blocks_travel_together() -> None:
    plan = PushPlan(num_blocks=5, num_groups=4)
    plan.assign(1, [70, 71, 80, 81])
    for group, num_blocks in enumerate((3, 3, 2, 3)):
        plan.write(group, num_blocks)
    assert plan.take() == [
        GroupBlocks(0, range(1, 3), [70, 71], num_groups=2),
        GroupBlocks(2, range(1, 2), [70]),
        GroupBlocks(3, range(1, 3), [70, 71]),
    ]


def test_what_is_too_little_for_a_push_waits_for_more_and_for_nothing_else() -> None:
    plan = PushPlan(num_blocks=3, num_groups=4, min_pairs=5)
    plan.assign(1, [70, 71])
    plan.write(0, 3)
    plan.write(1, 3)
    assert plan.take() == []
    plan.write(2, 3)
    assert plan.take() == [GroupBlocks(0, range(1, 3), [70, 71], num_groups=3)]
    plan.write(3, 2)
    assert plan.take() == []
    plan.write(3, 3)
    assert plan.take() == [GroupBlocks(3, range(1, 3), [70, 71])]


def test_what_was_written_is_not_taken_back() -> None:
    plan = PushPlan(num_blocks=4, num_groups=1)
    plan.assign(0, [1, 2, 3, 4])
    plan.write(0, 3)
    plan.write(0, 1)
    assert plan.take() == [GroupBlocks(0, range(3), [1, 2, 3])]


def test_blocks_before_the_first_missing_one_do_not_travel() -> None:
    plan = PushPlan(num_blocks=4, num_groups=1)
    plan.write(0, 2)
    plan.assign(3, [9])
    assert plan.take() == []
    plan.write(0, 4)
    assert plan.take() == [GroupBlocks(0, range(3, 4), [9])]


def test_a_prompt_that_the_decode_worker_holds_whole_is_complete_at_once() -> None:
    plan = PushPlan(num_blocks=2, num_groups=3)
    assert not plan.is_complete
    plan.assign(2, [])
    assert (plan.take(), plan.is_complete, plan.num_block_groups) == ([], True, 0)


def test_a_reservation_fits_only_if_it_completes_the_prompt_with_distinct_blocks() -> None:
    plan = PushPlan(num_blocks=3, num_groups=1)
    fitting = [(0, [5, 6, 7]), (1, [6, 7]), (3, [])]
    wrong = [(0, [5, 6]), (1, [5, 6, 7]), (0, [5, 5, 6]), (-1, [1, 2, 3, 4]), (4, [])]
    assert [plan.fits(first, blocks) for first, blocks in fitting] == [True] * 3
    assert [plan.fits(first, blocks) for first, blocks in wrong] == [False] * 5
