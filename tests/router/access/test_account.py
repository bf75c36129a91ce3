"""What one key has used of its limits."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from crossdock.router.access.account import Account, Limit, OverLimit, Standing
from crossdock.router.access.caller import KeyLimits


def test_without_limits_nothing_is_refused() -> None:
    account = Account(KeyLimits(), now=0.0)
    assert [account.enter(0.0) for _ in range(1000)] == [None] * 1000
    assert account.reserve(10**9, 0.0) == 0
    account.settle(0, 10**9, 0.0)
    assert account.standings(0.0) == []


def test_requests_a_minute_are_counted_whether_they_have_ended_or_not() -> None:
    account = Account(KeyLimits(requests_per_minute=2), now=0.0)
    for _ in range(2):
        assert account.enter(0.0) is None
        account.leave()
    assert account.enter(15.0) == OverLimit(Limit.REQUESTS, 2, seconds=15.0)
    assert account.enter(30.0) is None


def test_requests_at_a_time_are_counted_until_they_leave_and_a_refused_one_costs_nothing() -> None:
    account = Account(KeyLimits(requests_per_minute=60, max_concurrent=1), now=0.0)
    assert account.enter(0.0) is None
    assert account.enter(0.0) == OverLimit(Limit.CONCURRENCY, 1, seconds=1.0)
    account.leave()
    assert account.num_open == 0
    assert account.standings(0.0) == [Standing(Limit.REQUESTS, 60, remaining=59, seconds=1.0)]


def test_reserved_tokens_that_were_not_used_come_back_at_the_end() -> None:
    account = Account(KeyLimits(tokens_per_minute=600), now=0.0)
    assert account.reserve(500, 0.0) == 500
    assert account.reserve(200, 0.0) == OverLimit(Limit.TOKENS, 600, seconds=10.0)
    account.settle(500, 40, 1.0)
    assert account.standings(1.0) == [Standing(Limit.TOKENS, 600, remaining=570, seconds=3.0)]


def test_a_request_that_may_use_more_than_a_minute_s_worth_needs_all_of_it_and_the_rest_is_waited_for() -> None:
    account = Account(KeyLimits(tokens_per_minute=600), now=0.0)
    assert account.reserve(1, 0.0) == 1
    assert account.reserve(5000, 0.0) == OverLimit(Limit.TOKENS, 600, seconds=0.1)
    assert account.reserve(5000, 60.0) == 600
    account.settle(600, 900, 60.0)
    assert account.reserve(1, 60.0) == OverLimit(Limit.TOKENS, 600, seconds=30.1)
    assert account.reserve(1, 90.1) == 1


def test_other_limits_keep_what_was_used_and_what_is_open() -> None:
    account = Account(KeyLimits(requests_per_minute=10), now=0.0)
    for _ in range(8):
        account.enter(0.0)
    account.change(KeyLimits(requests_per_minute=9, tokens_per_minute=50, max_concurrent=8), now=0.0)
    assert account.enter(0.0) == OverLimit(Limit.CONCURRENCY, 8, seconds=1.0)
    account.leave()
    assert account.enter(0.0) is None
    account.leave()
    assert account.enter(0.0) == OverLimit(Limit.REQUESTS, 9, seconds=60 / 9)
    assert account.reserve(50, 0.0) == 50
    account.change(KeyLimits(), now=0.0)
    account.settle(50, 10, 0.0)
    assert account.standings(0.0) == []


class Life(RuleBasedStateMachine):
    """Requests of one key in any order, against the plainest bookkeeping there is."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.account = Account(KeyLimits(requests_per_minute=30, tokens_per_minute=300, max_concurrent=3), 0.0)
        self.open: list[int] = []
        self.num_entered = self.num_used = 0

    @rule(pause=st.floats(0, 20))
    def wait(self, pause: float) -> None:
        self.now += pause

    @rule(most=st.integers(1, 500))
    def arrive(self, most: int) -> None:
        refused = self.account.enter(self.now)
        if refused is not None:
            assert refused.seconds > 0
            return
        self.num_entered += 1
        reserved = self.account.reserve(most, self.now)
        if isinstance(reserved, OverLimit):
            self.account.leave()
        else:
            assert reserved == min(most, 300)
            self.open.append(reserved)

    @precondition(lambda self: self.open)
    @rule(share=st.floats(0, 1))
    def depart(self, share: float) -> None:
        reserved = self.open.pop()
        used = int(reserved * share)
        self.num_used += used
        self.account.settle(reserved, used, self.now)
        self.account.leave()

    @invariant()
    def nobody_gets_more_than_the_limits_allow(self) -> None:
        assert self.account.num_open == len(self.open) <= 3
        assert self.num_entered <= 30 + self.now * 30 / 60 + 1e-6
        assert self.num_used + sum(self.open) <= 300 + self.now * 300 / 60 + 1e-6


TestLife = Life.TestCase
