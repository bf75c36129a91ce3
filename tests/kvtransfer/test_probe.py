"""Trying transports: the borrower step by step, and the lender's books."""

import pytest

from crossdock.core.block_pool import BlockPool
from crossdock.core.kv_layout import KvLayout
from crossdock.core.messages import (
    Incarnation,
    Link,
    Peer,
    PoolBooks,
    ProbeDone,
    ProbeGrant,
    ProbeRequest,
    ProbeSent,
    ProbeVerdict,
    Role,
    TriedTransport,
    WorkerCard,
)
from crossdock.kvtransfer.loans import Lender
from crossdock.kvtransfer.probe import NOTHING, NUM_ROUNDS, Probe, ProbeActions, ProbeState, Trial

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=8, block_size=16, dtype="float32")
LEASE_SECONDS = 12.0
PREFILL = Peer("tcp://127.0.0.1:1", Incarnation("p"))
DECODE = Peer("tcp://127.0.0.1:2", Incarnation("d"))
CARD = WorkerCard(
    role=Role.MIXED,
    model="m",
    layout=LAYOUT,
    num_blocks=8,
    max_model_len=64,
    max_num_seqs=64,
    vocab_size=100,
    num_layer_groups=2,
)


def make_probe(*transports: str) -> Probe:
    probe = Probe("p/d", DECODE, transports or ("shm", "tcp"), num_blocks=3, card=CARD, lease_seconds=12.0)
    assert probe.tick(0.0).messages == (ProbeRequest(probe_id="p/d/1", card=CARD, num_blocks=3),)
    return probe


def grant(attempt: int = 1, blocks: tuple[int, ...] = (7, 8, 9)) -> ProbeGrant:
    return ProbeGrant(probe_id=f"p/d/{attempt}", blocks=list(blocks))


def verdict(trial: int, is_correct: bool = True, check_seconds: float = 0.0, attempt: int = 1) -> ProbeVerdict:
    return ProbeVerdict(probe_id=f"p/d/{attempt}", trial=trial, is_correct=is_correct, check_seconds=check_seconds)


def make_trial(probe: Probe, seconds: float, now: float, check_seconds: float = 0.0) -> ProbeActions:
    """One trial that takes so long."""
    trial = probe.trial
    assert trial is not None
    probe.sent(now, now)
    return probe.judged(verdict(trial.number, check_seconds=check_seconds), now + seconds + check_seconds)


def test_a_worker_that_stood_still_makes_no_other_trial_in_blocks_lent_long_ago() -> None:
    probe = make_probe("shm", "tcp")
    probe.granted(grant(), 0.1)
    probe.sent(0.2, 0.2)
    ended = probe.tick(20.0)  # its verdict is late, and so is everything else
    assert (probe.trial, probe.state) == (None, ProbeState.WAITING)
    assert ended.messages == (ProbeDone(probe_id="p/d/1"),)
    late = TriedTransport("shm", error="no verdict in time")
    stood_still = "this worker stood still for too long"
    assert ended.link == Link(to=DECODE.incarnation, transport="", error=stood_still, tried=(late,))


def test_each_transport_is_tried_with_one_block_and_with_all() -> None:
    probe = make_probe()
    probe.granted(grant(), 0.1)
    trials = []
    while probe.trial is not None:
        trials.append(probe.trial)
        make_trial(probe, 0.001, 0.2)
    sizes = [1] * NUM_ROUNDS + [3] * NUM_ROUNDS
    assert [(trial.transport, len(trial.blocks)) for trial in trials] == [("shm", n) for n in sizes] + [
        ("tcp", n) for n in sizes
    ]
    assert trials[0] == Trial(0, "shm", [7]) and trials[-1] == Trial(4 * NUM_ROUNDS - 1, "tcp", [7, 8, 9])


def test_the_fastest_transport_becomes_the_link_with_its_best_rate_and_latency() -> None:
    probe = make_probe()
    probe.granted(grant(), 0.1)
    shm = [0.9, 0.25, 0.5, 1.0, 0.75, 0.8]
    tcp = [0.125, 0.5, 0.5, 2.0, 0.5, 0.6]
    actions = [make_trial(probe, seconds, 16.0, check_seconds=0.25) for seconds in shm + tcp]
    assert actions[:-1] == [NOTHING] * (4 * NUM_ROUNDS - 1)
    num_bytes = 3 * LAYOUT.block_bytes
    tried = TriedTransport("shm", num_bytes / 0.75, 0.25), TriedTransport("tcp", num_bytes / 0.5, 0.125)
    link = Link(
        to=DECODE.incarnation, transport="tcp", bytes_per_second=num_bytes / 0.5, latency_seconds=0.125, tried=tried
    )
    assert actions[-1] == ProbeActions((ProbeDone(probe_id="p/d/1"),), link)
    assert probe.is_linked and probe.tick(1e6) == NOTHING


def test_one_wrong_verdict_rules_a_transport_out() -> None:
    probe = make_probe()
    probe.granted(grant(), 0.1)
    for _ in range(2 * NUM_ROUNDS - 1):
        make_trial(probe, 0.001, 0.2)
    probe.sent(0.3, 0.3)
    assert probe.judged(verdict(2 * NUM_ROUNDS - 1, is_correct=False), 0.3) == NOTHING
    assert probe.trial == Trial(2 * NUM_ROUNDS, "tcp", [7])
    links = [make_trial(probe, 0.5, 0.4).link for _ in range(2 * NUM_ROUNDS)]
    assert links[-1] is not None and (links[-1].transport, links[-1].error) == ("tcp", "")
    assert links[-1].tried[0] == TriedTransport("shm", error="wrong bytes arrived")


def test_when_none_works_the_link_says_why_and_the_probe_starts_again_later_and_later() -> None:
    probe = make_probe()
    times = []
    now = 0.0
    for attempt in range(1, 9):
        probe.granted(grant(attempt), now)
        assert probe.failed("the peer is on another host", now) == NOTHING
        probe.sent(now, now)
        actions = probe.judged(verdict(2 * NUM_ROUNDS, is_correct=False, attempt=attempt), now)
        assert actions.link == Link(
            to=DECODE.incarnation,
            transport="",
            error="shm: the peer is on another host; tcp: wrong bytes arrived",
            tried=(
                TriedTransport("shm", error="the peer is on another host"),
                TriedTransport("tcp", error="wrong bytes arrived"),
            ),
        )
        assert actions.messages == (ProbeDone(probe_id=f"p/d/{attempt}"),)
        start = now
        while not probe.tick(now).messages:
            now += 0.5
        times.append(now - start)
    assert times == [1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]


def test_a_link_that_broke_is_told_and_probed_anew_after_a_while() -> None:
    probe = make_probe("shm")
    assert probe.broken("not linked yet", 0.0) == NOTHING
    probe.granted(grant(), 0.0)
    while probe.trial:
        make_trial(probe, 0.1, 0.0)
    assert probe.is_linked
    told = probe.broken("no progress for 5 s", 100.0)
    assert told.link is not None and told.link is probe.link
    assert (told.link.to, told.link.transport, told.link.error) == ("d", "", "no progress for 5 s")
    assert told.link.tried == (TriedTransport("shm", error="no progress for 5 s"),)
    assert (probe.is_linked, probe.tick(100.9)) == (False, NOTHING)
    assert probe.tick(101.0).messages == (ProbeRequest(probe_id="p/d/2", card=CARD, num_blocks=3),)


def test_no_verdict_within_a_third_of_the_lease_fails_the_transport() -> None:
    probe = make_probe()
    probe.granted(grant(), 0.0)
    probe.sent(1.0, 1.0)
    assert (probe.tick(4.9), probe.trial) == (NOTHING, None)
    assert (probe.tick(5.0), probe.trial) == (NOTHING, Trial(2 * NUM_ROUNDS, "tcp", [7]))
    assert probe.judged(verdict(0), 5.1) == NOTHING


def test_late_and_repeated_verdicts_are_not_taken_for_the_next_trial() -> None:
    probe = make_probe()
    probe.granted(grant(), 0.0)
    make_trial(probe, 0.5, 1.0)
    assert probe.judged(verdict(1), 1.6) == NOTHING
    probe.sent(2.0, 2.0)
    for stale in (verdict(0), verdict(2), verdict(1, attempt=2)):
        assert probe.judged(stale, 2.1) == NOTHING
    assert probe.state is ProbeState.AWAITING


def test_a_probe_that_finds_no_own_blocks_lets_the_lent_ones_go_before_the_lease_ends() -> None:
    probe = make_probe()
    probe.granted(grant(), 0.0)
    assert probe.tick(7.9) == NOTHING
    actions = probe.tick(8.0)
    assert actions.messages == (ProbeDone(probe_id="p/d/1"),)
    assert actions.link is not None and actions.link.error == "this worker had no free blocks"


def test_a_grant_counts_from_when_the_loop_last_came_round_because_it_may_have_waited_since() -> None:
    probe = make_probe()
    probe.granted(grant(), 7.0)
    assert probe.tick(7.9) == NOTHING
    assert probe.tick(8.0).messages == (ProbeDone(probe_id="p/d/1"),)


def test_an_unanswered_request_is_asked_anew_every_lease_time() -> None:
    """Under another id: a grant of the former one may be old, and the blocks somebody else's again."""
    probe = make_probe()
    assert probe.tick(11.9) == NOTHING
    withdrawn, request = probe.tick(12.0).messages
    assert withdrawn == ProbeDone(probe_id="p/d/1")
    assert request == ProbeRequest(probe_id="p/d/2", card=CARD, num_blocks=3)
    assert probe.granted(ProbeGrant(probe_id="p/d/1", blocks=[4, 5, 6]), 13.0).messages == (withdrawn,)
    assert probe.trial is None


def test_a_grant_for_an_ended_probe_is_handed_back() -> None:
    probe = make_probe("shm")
    probe.granted(grant(), 0.0)
    assert probe.granted(grant(), 0.1) == NOTHING
    assert probe.granted(grant(attempt=0), 0.1).messages == (ProbeDone(probe_id="p/d/0"),)
    probe.failed("why", 0.2)
    assert probe.granted(grant(), 0.3).messages == (ProbeDone(probe_id="p/d/1"),)


def request(num_blocks: int = 2, probe_id: str = "x") -> ProbeRequest:
    return ProbeRequest(probe_id=probe_id, card=CARD, num_blocks=num_blocks)


def sent(num_blocks: int = 2, probe_id: str = "x") -> ProbeSent:
    return ProbeSent(probe_id=probe_id, trial=0, transport="shm", num_blocks=num_blocks, digest=b"")


def test_blocks_are_lent_and_given_back() -> None:
    pool = BlockPool(16)
    lender = Lender(pool, LEASE_SECONDS)
    assert lender.request(request(), PREFILL) is None
    assert [loan.grant for loan in lender.sweep(0.0)] == [ProbeGrant(probe_id="x", blocks=[0, 1])]
    assert lender.request(request(), PREFILL) == ProbeGrant(probe_id="x", blocks=[0, 1])
    assert list(lender.sweep(1.0)) == []
    lender.done("x", DECODE)
    assert pool.books().leased == 2
    lender.done("x", PREFILL)
    lender.done("x", PREFILL)
    assert pool.books() == PoolBooks(free=16, cached=0, leased=0, quarantined=0)


@pytest.mark.parametrize(("wanted", "num_blocks", "num_taken", "lent"), [(5, 16, 0, 2), (5, 4, 0, 1), (5, 80, 77, 3)])
def test_no_more_is_lent_than_a_share_of_the_pool_and_what_is_free(
    wanted: int, num_blocks: int, num_taken: int, lent: int
) -> None:
    pool = BlockPool(num_blocks)
    pool.take(num_taken)
    lender = Lender(pool, LEASE_SECONDS)
    lender.request(request(wanted), PREFILL)
    assert [len(loan.blocks) for loan in lender.sweep(0.0)] == [lent]


def test_a_wish_waits_for_a_full_pool_and_is_forgotten_with_its_borrower() -> None:
    pool = BlockPool(4)
    taken = pool.take(4)
    lender = Lender(pool, LEASE_SECONDS)
    lender.request(request(), PREFILL)
    lender.request(request(probe_id="y"), DECODE)
    lender.request(request(0, "never"), PREFILL)
    assert list(lender.sweep(0.0)) == []
    lender.lose(DECODE, 0.1)
    pool.give_back(taken)
    assert [loan.probe_id for loan in lender.sweep(0.2)] == ["x"]


def test_only_the_borrower_of_an_open_loan_is_judged() -> None:
    lender = Lender(BlockPool(16), LEASE_SECONDS)
    lender.request(request(), PREFILL)
    list(lender.sweep(0.0))
    assert lender.find(sent(), DECODE.incarnation, 0.1) is None
    assert lender.find(sent(3), PREFILL.incarnation, 0.1) is None
    assert lender.find(sent(0), PREFILL.incarnation, 0.1) is None
    assert lender.find(sent(probe_id="y"), PREFILL.incarnation, 0.1) is None
    loan = lender.find(sent(), PREFILL.incarnation, 0.1)
    assert loan is not None and loan.blocks == [0, 1]


def test_a_silent_borrower_is_asked_and_its_blocks_are_quarantined_until_it_answers() -> None:
    pool = BlockPool(16)
    lender = Lender(pool, LEASE_SECONDS)
    lender.request(request(), PREFILL)
    list(lender.sweep(0.0))
    lender.find(sent(), PREFILL.incarnation, 5.0)
    assert list(lender.sweep(16.9)) == []
    assert [loan.probe_id for loan in lender.sweep(17.0)] == ["x"]
    assert pool.books().quarantined == 2
    assert list(lender.sweep(28.9)) == []
    assert [loan.probe_id for loan in lender.sweep(29.0)] == ["x"]
    assert lender.find(sent(), PREFILL.incarnation, 30.0) is None
    lender.done("x", PREFILL)
    assert pool.books().free == 16


def test_blocks_of_a_dead_borrower_are_free_after_a_lease_time_of_silence() -> None:
    pool = BlockPool(16)
    lender = Lender(pool, LEASE_SECONDS)
    lender.request(request(), PREFILL)
    list(lender.sweep(0.0))
    lender.lose(PREFILL, 1.0)
    assert lender.find(sent(), PREFILL.incarnation, 10.0) is None
    list(lender.sweep(21.9))
    assert pool.books().quarantined == 2
    list(lender.sweep(22.0))
    assert pool.books().free == 16
