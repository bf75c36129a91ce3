"""A budget a minute, with time as an argument."""

from hypothesis import given
from hypothesis import strategies as st

from crossdock.router.access.bucket import Bucket


def test_a_minute_s_worth_is_there_at_once_and_then_comes_back_steadily() -> None:
    bucket = Bucket.full(60, now=100.0)
    for _ in range(60):
        assert bucket.seconds_until(1, 100.0) == 0
        bucket.take(1, 100.0)
    assert bucket.seconds_until(1, 100.0) == 1.0
    assert bucket.seconds_until(5, 102.5) == 2.5
    assert bucket.seconds_until(2, 102.5) == 0
    assert bucket.level_at(130.0) == 30
    assert bucket.level_at(1000.0) == 60


def test_what_is_used_beyond_the_level_is_waited_for() -> None:
    bucket = Bucket.full(120, now=0.0)
    bucket.take(300, 0.0)
    assert bucket.level_at(0.0) == -180
    assert bucket.seconds_until(1, 0.0) == 90.5
    assert bucket.seconds_until(1, 90.5) == 0


def test_what_is_given_back_never_overflows() -> None:
    bucket = Bucket.full(60, now=0.0)
    bucket.take(10, 0.0)
    bucket.take(-10, 5.0)
    assert bucket.level_at(5.0) == 60


def test_another_rate_keeps_what_was_used() -> None:
    bucket = Bucket.full(60, now=0.0)
    bucket.take(50, 0.0)
    bucket.change(100, 0.0)
    assert bucket.level_at(0.0) == 50
    bucket.change(40, 0.0)
    assert bucket.level_at(0.0) == -10


@given(st.integers(1, 1000), st.lists(st.tuples(st.floats(0, 30), st.integers(1, 50)), max_size=60))
def test_over_any_time_no_more_is_let_through_than_a_minute_s_worth_and_the_rate(
    per_minute: int, visits: list[tuple[float, int]]
) -> None:
    bucket, now, taken = Bucket.full(per_minute, 0.0), 0.0, 0
    for pause, num in visits:
        now += pause
        if bucket.seconds_until(num, now) == 0:
            bucket.take(num, now)
            taken += num
        assert taken <= per_minute + now * per_minute / 60 + 1e-6


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_whoever_waits_as_long_as_told_is_let_in(per_minute: int, num: int) -> None:
    num = min(num, per_minute)
    bucket = Bucket.full(per_minute, 7.0)
    bucket.take(per_minute, 7.0)
    assert bucket.seconds_until(num, 7.0 + bucket.seconds_until(num, 7.0)) == 0
