"""The ledger: each token once and in order, whatever the legs send."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.core.kv_layout import KvLayout
from crossdock.core.messages import (
    Incarnation,
    Peer,
    PoolBooks,
    PrefillTask,
    PromptLogprobs,
    Role,
    TokenDelta,
    WorkerCard,
    WorkerLoad,
)
from crossdock.core.request import Request, RequestId, SamplingParams, TransferId, pack_ids
from crossdock.core.sequence import FinishReason
from crossdock.router.fleet import Pair, Worker
from crossdock.router.ledger import Entry, Failure, Ledger

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")


class Nowhere:
    """A sink for entries whose output the test takes from `Entry.accept` itself."""

    def emit(self, entry: Entry, delta: TokenDelta) -> None: ...
    def emit_prompt(self, entry: Entry, part: PromptLogprobs) -> None: ...
    def restart(self, entry: Entry) -> None: ...
    def fail(self, entry: Entry, failure: Failure) -> None: ...


def worker(name: str) -> Worker:
    card = WorkerCard(
        role=Role.MIXED,
        model="m",
        layout=LAYOUT,
        num_blocks=8,
        max_model_len=99,
        max_num_seqs=64,
        vocab_size=9,
        num_layer_groups=1,
    )
    load = WorkerLoad(books=PoolBooks(free=8, cached=0, leased=0, quarantined=0))
    return Worker(Peer(f"tcp://{name}:1", Incarnation(name)), card, 0.0, load)


def entry(max_tokens: int = 5, may_restart: bool = False) -> Entry:
    params = SamplingParams(max_tokens=max_tokens, seed=0)
    request = Request(request_id=RequestId("cmpl-1-0"), prompt=pack_ids([1, 2, 3]), params=params)
    return Entry(request, 0, Nowhere(), opened_at=0.0, may_restart=may_restart)


def delta(index: int, max_tokens: int = 5) -> TokenDelta:
    finish = FinishReason.LENGTH if index == max_tokens - 1 else None
    return TokenDelta(request_id=RequestId("cmpl-1-0.1"), index=index, token_id=10 + index, finish=finish)


def indices(deltas: list[TokenDelta]) -> list[int]:
    return [found.index for found in deltas]


def test_tokens_in_order_pass_at_once() -> None:
    open_entry = entry()
    assert [indices(open_entry.accept(delta(n), now=n)) for n in range(5)] == [[0], [1], [2], [3], [4]]
    assert open_entry.is_finished
    assert open_entry.output_ids.tolist() == [10, 11, 12, 13, 14]


def test_a_decode_token_that_overtakes_the_first_one_waits_for_it() -> None:
    open_entry = entry()
    assert open_entry.accept(delta(2), now=1) == []
    assert open_entry.accept(delta(1), now=2) == []
    assert open_entry.gap_since == 1
    assert indices(open_entry.accept(delta(0), now=3)) == [0, 1, 2]
    assert open_entry.gap_since is None


def test_a_gap_that_half_closes_counts_anew() -> None:
    open_entry = entry()
    open_entry.accept(delta(1), now=1)
    open_entry.accept(delta(3), now=2)
    assert indices(open_entry.accept(delta(0), now=4)) == [0, 1]
    assert open_entry.gap_since == 4


def test_repeated_tokens_are_dropped() -> None:
    open_entry = entry()
    assert indices(open_entry.accept(delta(0), now=0)) == [0]
    assert open_entry.accept(delta(0), now=0) == []
    open_entry.accept(delta(2), now=0)
    assert open_entry.accept(delta(2), now=0) == []
    assert indices(open_entry.accept(delta(1), now=0)) == [1, 2]
    assert open_entry.accept(delta(2), now=0) == []


def test_nothing_follows_the_last_token() -> None:
    open_entry = entry(max_tokens=1)
    assert indices(open_entry.accept(delta(0, max_tokens=1), now=0)) == [0]
    assert open_entry.accept(delta(1), now=0) == []
    assert open_entry.output_ids.tolist() == [10]


def test_a_request_for_no_tokens_ends_with_an_empty_delta() -> None:
    open_entry = entry(max_tokens=0)
    last = TokenDelta(request_id=RequestId("cmpl-1-0.1"), index=0, finish=FinishReason.LENGTH)
    assert open_entry.accept(last, now=0) == [last]
    assert open_entry.accept(last, now=0) == []
    assert open_entry.output_ids.tolist() == []


def test_an_index_beyond_max_tokens_is_not_kept() -> None:
    open_entry = entry()
    assert open_entry.accept(delta(6), now=0) == []
    assert open_entry.ahead == {}


@given(st.integers(1, 12), st.randoms(use_true_random=False))
def test_any_order_with_any_repetition_yields_each_token_once(num_tokens: int, order: random.Random) -> None:
    arrivals = [n for n in range(num_tokens) for _ in range(order.randint(1, 3))]
    order.shuffle(arrivals)
    open_entry = entry(max_tokens=num_tokens)
    emitted = [found for n in arrivals for found in indices(open_entry.accept(delta(n, num_tokens), now=0))]
    assert emitted == list(range(num_tokens))
    assert open_entry.is_finished
    assert open_entry.ahead == {}


def test_each_attempt_has_an_id_of_its_own_and_the_same_request() -> None:
    ledger, open_entry, (a, b) = Ledger(), entry(), (worker("a"), worker("b"))
    first = ledger.begin([open_entry], Pair(a, b), now=0)
    assert first == PrefillTask(
        request=Request(
            request_id=RequestId("cmpl-1-0.1"), prompt=open_entry.request.prompt, params=open_entry.request.params
        ),
        transfer_id=TransferId("cmpl-1-0.1"),
        decode=b.peer,
    )
    assert ledger.end(open_entry)
    second = ledger.begin([open_entry], Pair(b, b), now=1)
    assert (second.request.request_id, second.transfer_id, second.decode) == ("cmpl-1-0.2", "cmpl-1-0.2", b.peer)


def test_only_the_legs_of_the_current_attempt_are_heard() -> None:
    ledger, open_entry, (a, b, c) = Ledger(), entry(), (worker("a"), worker("b"), worker("c"))
    ledger.begin([open_entry], Pair(a, b), now=0)
    first_id = open_entry.attempt.request_id
    assert ledger.find(first_id, a.peer) is open_entry
    assert ledger.find(first_id, b.peer) is open_entry
    assert ledger.find(first_id, c.peer) is None
    assert ledger.find(first_id, Peer(a.peer.address, Incarnation("a2"))) is None
    ledger.end(open_entry)
    ledger.begin([open_entry], Pair(a, c), now=1)
    assert ledger.find(first_id, a.peer) is None
    assert ledger.find(open_entry.attempt.request_id, b.peer) is None
    assert ledger.find(open_entry.attempt.request_id, c.peer) is open_entry


def test_a_worker_s_entries_are_those_of_both_kinds_of_leg() -> None:
    ledger, (a, b) = Ledger(), (worker("a"), worker("b"))
    one, two, three = entry(), entry(), entry()
    for open_entry, pair, name in ((one, Pair(a, b), "1"), (two, Pair(b, b), "2"), (three, Pair(a, a), "3")):
        request = Request(request_id=RequestId(name), prompt=b"1234", params=open_entry.request.params)
        open_entry.request = request
        ledger.begin([open_entry], pair, now=0)
    assert ledger.on_worker(a) == [one, three]
    assert ledger.on_worker(b) == [one, two]
    assert len(ledger) == 3


def test_ended_entries_leave_nothing_behind() -> None:
    ledger, open_entry, (a, b) = Ledger(), entry(), (worker("a"), worker("b"))
    ledger.begin([open_entry], Pair(a, b), now=0)
    assert ledger.end(open_entry)
    assert not ledger.end(open_entry)
    assert len(ledger) == 0
    assert ledger.on_worker(a) == ledger.on_worker(b) == []
    assert ledger._by_worker == {}


@pytest.mark.parametrize(("may_restart", "can_restart"), [(False, False), (True, True)])
def test_an_attempt_may_be_repeated_while_the_client_has_seen_nothing(may_restart: bool, can_restart: bool) -> None:
    open_entry = entry(may_restart=may_restart)
    assert open_entry.can_restart
    open_entry.accept(delta(0), now=0)
    assert open_entry.can_restart is can_restart
    open_entry.forget_output()
    assert open_entry.can_restart
    assert indices(open_entry.accept(delta(0), now=0)) == [0]
