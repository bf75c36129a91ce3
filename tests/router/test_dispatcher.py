"""The control plane of the router, message by message, with a clock and a mailbox in the test's hand."""

import pytest

from crossdock.core.block_hash import BlockHasher, model_root
from crossdock.core.messages import (
    PROTOCOL_VERSION,
    Abort,
    CacheEvents,
    CacheSnapshot,
    Heartbeat,
    Hello,
    Incarnation,
    Inquiry,
    Link,
    Message,
    NotHeld,
    Peer,
    PeerInfo,
    Peers,
    PoolBooks,
    PrefillTask,
    PromptLogprobs,
    Refused,
    Role,
    SnapshotRequest,
    TokenDelta,
    Tokens,
    WhoAreYou,
    WorkerLoad,
)
from crossdock.core.request import Request, RequestId, SamplingParams, TokenLogprobs, pack_ids
from crossdock.core.sequence import FinishReason
from crossdock.router.ledger import Entry, Failure
from crossdock.router.metrics import EndReason
from crossdock.router.placement import NoCapacity

from .stage import D1, D2, LAYOUT, P1, P2, Client, M, Sent, Stage, card, failure_of, legs, token

# --- joining ---------------------------------------------------------------------------------------


def test_everybody_hears_of_a_worker_that_joins_and_it_alone_when_it_repeats_itself() -> None:
    stage = Stage()
    stage.join((P1, Role.PREFILL))
    stage.hear(D1, Hello(card=card(Role.DECODE)))
    peers = Peers(workers=[PeerInfo(P1, card(Role.PREFILL)), PeerInfo(D1, card(Role.DECODE))])
    stage.hear(D1, Hello(card=card(Role.DECODE)))
    assert stage.mailbox.sent == [Sent(D1, SnapshotRequest()), Sent(P1, peers), Sent(D1, peers), Sent(D1, peers)]


def test_an_unknown_worker_that_sends_a_heartbeat_is_asked_who_it_is() -> None:
    stage = Stage()
    stage.hear(P1, Heartbeat(load=WorkerLoad(books=PoolBooks(64, 0, 0, 0))))
    assert stage.mailbox.sent == [Sent(P1, WhoAreYou())]


def test_a_worker_of_another_model_is_refused_and_nobody_else_disturbed(caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage()
    stage.join((P1, Role.PREFILL))
    reason = "model differs: m in the fleet, other at the worker"
    for _ in range(2):
        stage.hear(D1, Hello(card=card(Role.DECODE, model="other")))
    assert stage.mailbox.sent == [Sent(D1, Refused(reason=reason))] * 2
    assert [record.message for record in caplog.records] == [f"refused tcp://d1:1: {reason}"]
    assert len(stage.dispatcher.fleet) == 1
    assert stage.metric("crossdock:workers_refused_total") == 1


def test_who_speaks_another_version_is_refused_by_name_once_a_second_and_the_log_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stage = Stage()
    reason = f"protocol version differs: {PROTOCOL_VERSION} at the router, 999 at the worker"
    for _ in range(2):
        stage.mailbox.strangers[D1] = 999
        stage.pass_time(1)
    assert stage.mailbox.refused == [(D1, 999, reason)] * 2
    assert [record.message for record in caplog.records] == [f"refused tcp://d1:1: {reason}"]
    assert [refusal.reason for refusal in stage.dispatcher.fleet.refusals] == [reason]


def test_workers_hear_from_an_idle_router_before_they_give_it_up() -> None:
    stage = Stage()
    stage.join((M, Role.MIXED))
    stage.pass_time(9, M)
    assert [to for to, _ in stage.mailbox.take(Peers)] == [M, M, M]


def test_missed_cache_events_are_asked_for_and_the_snapshot_is_used() -> None:
    stage = Stage()
    stage.join_two_pairs()
    root = model_root(b"crossdock", "m", LAYOUT)
    hashes = BlockHasher(b"crossdock", root, 16).hashes(pack_ids(list(range(64))))
    stage.hear(P2, CacheSnapshot(number=0, hashes=[]))
    stage.now += 2
    stage.hear(P2, CacheEvents(number=2, stored=hashes[2:]))
    assert stage.mailbox.take(SnapshotRequest) == [(P2, SnapshotRequest())]
    stage.hear(P2, CacheSnapshot(number=2, hashes=hashes))
    for _ in range(3):
        [entry] = stage.open(Client(), num_prompt=64)
        assert legs(entry)[0] == P2
        stage.dispatcher.release(entry, EndReason.ABORT)


# --- the life of a request -------------------------------------------------------------------------


def test_a_request_travels_through_both_legs_and_leaves_nothing() -> None:
    stage, client = Stage(), Client()
    stage.join_two_pairs()
    [entry] = stage.open(client)
    prefill, decode = legs(entry)
    [(to, task)] = stage.mailbox.take(PrefillTask)
    assert (to, task.decode, task.request.request_id, task.transfer_id) == (prefill, decode, "r-0.1", "r-0.1")
    stage.hear(prefill, token(entry, 0))
    stage.hear(decode, token(entry, 1), token(entry, 2), token(entry, 3, FinishReason.LENGTH))
    assert client == Client(tokens=[50, 51, 52, 53])
    assert len(stage.dispatcher.ledger) == 0
    assert stage.mailbox.sent == []
    assert stage.metric('vllm:request_success_total{finished_reason="length"') == 1


def test_tokens_of_both_legs_are_put_in_order() -> None:
    stage, client = Stage(), Client()
    stage.join_two_pairs()
    [entry] = stage.open(client)
    prefill, decode = legs(entry)
    stage.hear(decode, token(entry, 1), token(entry, 2))
    assert client.tokens == []
    stage.hear(prefill, token(entry, 0), token(entry, 0))
    stage.hear(decode, token(entry, 2), token(entry, 3, FinishReason.LENGTH))
    assert client.tokens == [50, 51, 52, 53]


def test_log_probabilities_of_the_prompt_reach_the_client() -> None:
    stage, client = Stage(), Client()
    stage.join((M, Role.MIXED))
    [entry] = stage.open(client)
    part = PromptLogprobs(request_id=entry.attempt.request_id, start=1, logprobs=[TokenLogprobs(-0.5)])
    stage.hear(M, part)
    stage.hear(D1, part)
    assert client.prompt_parts == [1]


def test_all_choices_of_a_prompt_go_to_one_pair_in_one_task() -> None:
    stage = Stage()
    stage.join_two_pairs()
    entries = stage.open(Client(), num_choices=4)
    assert len({legs(entry) for entry in entries}) == 1
    [(to, task)] = stage.mailbox.take(PrefillTask)
    assert (to, [choice.request_id for choice in task.request.choices]) == (
        legs(entries[0])[0],
        ["r-0.1", "r-1.1", "r-2.1", "r-3.1"],
    )


def test_without_workers_nothing_is_opened() -> None:
    stage = Stage()
    request = Request(request_id=RequestId("r"), prompt=b"1234", params=SamplingParams(max_tokens=1, seed=0))
    outcome = stage.dispatcher.open([Entry(request, 0, Client(), stage.now)])
    assert outcome == NoCapacity("no pair of workers is ready")
    assert len(stage.dispatcher.ledger) == 0
    assert stage.metric("crossdock:requests_refused_total") == 1


def test_requests_that_cannot_all_be_placed_are_not_placed_at_all() -> None:
    stage = Stage()
    stage.join((M, Role.MIXED))
    params = SamplingParams(max_tokens=1, seed=0)
    prompts = [pack_ids([1]), pack_ids([1] * 300)]
    entries = [
        Entry(Request(request_id=RequestId(f"r-{n}"), prompt=prompt, params=params), n, Client(), stage.now)
        for n, prompt in enumerate(prompts)
    ]
    outcome = stage.dispatcher.open(entries)
    assert outcome == NoCapacity("no worker holds so long a request")
    assert stage.mailbox.take(PrefillTask) == []


def test_a_client_that_leaves_frees_both_legs_at_once() -> None:
    stage, client = Stage(), Client()
    stage.join_two_pairs()
    [entry] = stage.open(client)
    stage.mailbox.sent.clear()
    stage.dispatcher.release(entry, EndReason.ABORT)
    stage.dispatcher.release(entry, EndReason.ABORT)
    assert stage.mailbox.sent == [Sent(leg, Abort(request_id=RequestId("r-0.1"))) for leg in legs(entry)]
    assert len(stage.dispatcher.ledger) == 0
    assert stage.metric('vllm:request_success_total{finished_reason="abort"') == 1


def test_late_tokens_of_a_released_request_are_dropped_and_the_abort_repeated() -> None:
    stage, client = Stage(), Client()
    stage.join((M, Role.MIXED))
    [entry] = stage.open(client)
    stage.dispatcher.release(entry, EndReason.STOP)
    assert stage.mailbox.take(Abort) == [(M, Abort(request_id=RequestId("r-0.1")))]
    stage.hear(M, token(entry, 0))
    assert client.tokens == []
    assert stage.mailbox.take(Abort) == [(M, Abort(request_id=RequestId("r-0.1")))]


# --- failures --------------------------------------------------------------------------------------


def test_a_retryable_failure_starts_again_on_another_pair_and_ends_the_first_one() -> None:
    stage, client = Stage(), Client()
    stage.join_two_pairs()
    [entry] = stage.open(client)
    first = entry.attempt
    old_prefill, old_decode = legs(entry)
    stage.mailbox.sent.clear()
    failed = failure_of(entry, "link down", is_retryable=True)
    stage.hear(old_prefill, failed, failed)
    new_prefill, new_decode = legs(entry)
    assert (new_prefill, new_decode) != (old_prefill, old_decode)
    sent = stage.mailbox.sent
    assert sent[:2] == [Sent(leg, Abort(request_id=first.request_id)) for leg in (old_prefill, old_decode)]
    assert isinstance(sent[2].message, PrefillTask)
    assert (sent[2].to, sent[2].message.request.request_id, len(sent)) == (new_prefill, "r-0.2", 3)
    assert client == Client(num_restarts=1)
    stage.hear(old_prefill, Tokens(deltas=[TokenDelta(request_id=first.request_id, index=0, token_id=99)]))
    stage.hear(new_prefill, token(entry, 0))
    assert client.tokens == [50]


def test_a_failure_after_the_first_token_of_a_stream_is_the_client_s_to_know() -> None:
    stage, client = Stage(), Client()
    stage.join_two_pairs()
    [entry] = stage.open(client)
    prefill, decode = legs(entry)
    stage.hear(prefill, token(entry, 0))
    stage.mailbox.sent.clear()
    failed = failure_of(entry, "lease ended", is_retryable=True)
    stage.hear(decode, failed)
    assert client == Client(tokens=[50], failures=[Failure("lease ended", is_retryable=True)])
    assert stage.mailbox.take(PrefillTask) == []
    assert len(stage.dispatcher.ledger) == 0


def test_without_streaming_even_a_half_done_request_starts_again() -> None:
    stage, client = Stage(), Client()
    stage.join_two_pairs()
    [entry] = stage.open(client, may_restart=True)
    prefill, decode = legs(entry)
    stage.hear(prefill, token(entry, 0))
    stage.hear(decode, token(entry, 1))
    stage.pass_time(4, P1, P2, D1 if decode == D2 else D2, running=1)
    assert client == Client(num_restarts=1)
    prefill, decode = legs(entry)
    stage.hear(prefill, token(entry, 0), token(entry, 1))
    assert client.tokens == [50, 51]


def test_the_request_s_own_fault_is_never_tried_again() -> None:
    stage, client = Stage(), Client()
    stage.join_two_pairs()
    [entry] = stage.open(client)
    refused = failure_of(entry, "too long", is_retryable=False)
    stage.hear(legs(entry)[0], refused)
    assert client.failures == [Failure("too long", is_retryable=False)]
    assert len(entry.attempts) == 1


def test_attempts_are_limited() -> None:
    stage, client = Stage(max_attempts=2), Client()
    stage.join_two_pairs()
    [entry] = stage.open(client)
    for _ in range(2):
        attempt = entry.attempt
        failed = failure_of(entry, "busy", is_retryable=True)
        stage.hear(attempt.pair.decode.peer, failed)
    assert (len(entry.attempts), client.failures) == (2, [Failure("busy", is_retryable=True)])
    assert stage.metric('vllm:request_success_total{finished_reason="error"') == 1
    assert stage.metric("crossdock:request_retries_total") == 1


def test_a_dead_prefill_worker_s_requests_start_elsewhere_and_its_decode_worker_lets_go() -> None:
    stage, client = Stage(), Client()
    stage.join_two_pairs()
    [entry] = stage.open(client)
    prefill, decode = legs(entry)
    survivors = [peer for peer in (P1, P2, D1, D2) if peer != prefill]
    stage.pass_time(3, *survivors, running=1)
    stage.mailbox.sent.clear()
    stage.pass_time(1, *survivors, running=1)
    assert stage.mailbox.forgotten == [prefill]
    assert legs(entry)[0] != prefill
    sent = stage.mailbox.sent
    assert [item.to for item in sent if isinstance(item.message, Peers)] == survivors
    assert Sent(decode, Abort(request_id=RequestId("r-0.1"))) in sent
    assert [item.to for item in sent if isinstance(item.message, PrefillTask)] == [legs(entry)[0]]
    assert all(item.to != prefill for item in sent)


def test_a_decode_worker_that_dies_in_mid_stream_ends_the_request_with_an_error() -> None:
    stage, client = Stage(), Client()
    stage.join_two_pairs()
    [entry] = stage.open(client)
    prefill, decode = legs(entry)
    stage.hear(prefill, token(entry, 0))
    stage.hear(decode, token(entry, 1))
    stage.pass_time(4, *(peer for peer in (P1, P2, D1, D2) if peer != decode), running=1)
    assert client.failures == [Failure(f"worker {decode.address} died", is_retryable=True)]
    assert stage.mailbox.take(Abort) == [(prefill, Abort(request_id=RequestId("r-0.1")))]
    assert stage.dispatcher.ledger.on_worker(entry.attempt.pair.decode) == []


def test_a_request_that_decodes_outlives_its_prefill_worker() -> None:
    stage, client = Stage(), Client()
    stage.join_two_pairs()
    [entry] = stage.open(client)
    prefill, decode = legs(entry)
    stage.hear(prefill, token(entry, 0))
    stage.hear(decode, token(entry, 1))
    stage.hear(prefill, failure_of(entry, "no answer to the commit", is_retryable=True))
    stage.pass_time(9, *(peer for peer in (P1, P2, D1, D2) if peer != prefill), running=1)
    assert stage.metric("crossdock:worker_deaths_total") == 1
    stage.hear(decode, token(entry, 2), token(entry, 3, FinishReason.LENGTH))
    assert client == Client(tokens=[50, 51, 52, 53])
    assert len(stage.dispatcher.ledger) == 0


def test_a_request_whose_prefill_worker_died_is_lost_when_its_decode_worker_knows_of_none() -> None:
    stage, client = Stage(), Client()
    stage.join_two_pairs()
    [entry] = stage.open(client)
    prefill, decode = legs(entry)
    stage.hear(prefill, token(entry, 0))
    stage.hear(decode, token(entry, 1))
    stage.pass_time(4, *(peer for peer in (P1, P2, D1, D2) if peer != prefill))
    assert stage.mailbox.take(Inquiry) == [(decode, Inquiry(request_ids=[entry.attempt.request_id]))]
    stage.hear(decode, NotHeld(request_ids=[entry.attempt.request_id]))
    assert client.failures == [Failure("a message between router and workers was lost", is_retryable=True)]


def test_with_the_last_worker_gone_every_request_ends_with_an_error() -> None:
    stage, client = Stage(), Client()
    stage.join((M, Role.MIXED))
    stage.open(client, num_choices=2)
    stage.pass_time(4)
    assert client.failures == [Failure("worker tcp://m:1 died", is_retryable=True)] * 2
    assert (len(stage.dispatcher.ledger), len(stage.dispatcher.fleet)) == (0, 0)


def test_a_restarted_worker_voids_its_former_life_at_once() -> None:
    stage, client = Stage(), Client()
    stage.join((M, Role.MIXED))
    [entry] = stage.open(client)
    stage.mailbox.sent.clear()
    reborn = Peer(M.address, Incarnation("m2"))
    stage.hear(reborn, Hello(card=card(Role.MIXED)))
    assert stage.mailbox.forgotten == [M]
    [task] = stage.mailbox.take(PrefillTask)
    assert (task[0], task[1].request.request_id) == (reborn, "r-0.2")
    stage.hear(M, Tokens(deltas=[TokenDelta(request_id=RequestId("r-0.1"), index=0, token_id=7)]))
    stage.hear(M, token(entry, 0))
    assert client.tokens == []
    stage.hear(reborn, token(entry, 0))
    assert client.tokens == [50]


def test_a_paused_router_does_not_take_everybody_for_dead() -> None:
    stage = Stage()
    stage.join((M, Role.MIXED))
    stage.now += 60
    stage.dispatcher.tick()
    assert len(stage.dispatcher.fleet) == 1
    stage.pass_time(1)
    assert len(stage.dispatcher.fleet) == 0


def test_a_lost_task_is_noticed_when_both_legs_say_that_they_do_not_hold_it() -> None:
    stage, client = Stage(max_attempts=1), Client()
    stage.join_two_pairs()
    [entry] = stage.open(client)
    prefill, decode = legs(entry)
    stage.pass_time(3, P1, P2, D1, D2, running=1)
    assert stage.mailbox.take(Inquiry) == []
    stage.pass_time(1, P1, P2, D1, D2, running=1)
    request_ids = [entry.attempt.request_id]
    assert stage.mailbox.take(Inquiry) == [(leg, Inquiry(request_ids=request_ids)) for leg in (prefill, decode)]
    stage.hear(decode, NotHeld(request_ids=request_ids))
    stage.hear(decode, NotHeld(request_ids=request_ids))
    assert client.failures == []
    stage.hear(prefill, NotHeld(request_ids=request_ids))
    assert client.failures == [Failure("a message between router and workers was lost", is_retryable=True)]


def test_a_request_that_went_from_one_leg_to_the_other_while_both_were_asked_is_not_lost() -> None:
    stage, client = Stage(), Client()
    stage.join_two_pairs()
    [entry] = stage.open(client)
    prefill, decode = legs(entry)
    stage.pass_time(4, P1, P2, D1, D2)
    stage.hear(decode, NotHeld(request_ids=[entry.attempt.request_id]))
    stage.now += 0.5
    stage.hear(prefill, token(entry, 0), NotHeld(request_ids=[entry.attempt.request_id]))
    assert (client, len(entry.attempts)) == (Client(tokens=[50]), 1)
    stage.pass_time(4, P1, P2, D1, D2)
    stage.hear(prefill, NotHeld(request_ids=[entry.attempt.request_id]))
    assert (client, len(entry.attempts)) == (Client(tokens=[50]), 1)


def test_a_request_that_only_waits_is_not_taken_for_lost() -> None:
    stage, client = Stage(), Client()
    stage.join_two_pairs()
    [entry] = stage.open(client)
    stage.pass_time(60, P1, P2, D1, D2, waiting=1)
    assert (client, len(entry.attempts)) == (Client(), 1)


def test_a_token_that_never_comes_ends_the_stream_instead_of_leaving_a_hole() -> None:
    stage, client = Stage(), Client()
    stage.join_two_pairs()
    [entry] = stage.open(client)
    prefill, decode = legs(entry)
    stage.hear(prefill, token(entry, 0))
    stage.hear(decode, token(entry, 2))
    stage.pass_time(4, P1, P2, D1, D2, running=1)
    assert client.tokens == [50]
    assert client.failures == [Failure("a message between router and workers was lost", is_retryable=True)]


@pytest.mark.parametrize("noise", [Peers(workers=[]), WhoAreYou(), SnapshotRequest()])
def test_a_message_that_is_not_for_routers_changes_nothing(noise: Message) -> None:
    stage = Stage()
    stage.join((M, Role.MIXED))
    stage.hear(M, noise)
    assert (stage.mailbox.sent, len(stage.dispatcher.fleet)) == ([], 1)


def test_tokens_and_failures_of_strangers_are_ignored() -> None:
    stage, client = Stage(), Client()
    stage.join((M, Role.MIXED))
    [entry] = stage.open(client)
    stage.mailbox.sent.clear()
    failed = failure_of(entry, "boo", is_retryable=False)
    stage.hear(D1, token(entry, 0), failed, Link(to=M.incarnation, transport="tcp"), CacheEvents(number=1))
    assert (client, stage.mailbox.sent) == (Client(), [])
