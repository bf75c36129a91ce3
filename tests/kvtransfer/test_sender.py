"""The prefill side of one transfer, step by step."""

from crossdock.core.messages import (
    Attached,
    Cancel,
    Commit,
    Incarnation,
    LeaseId,
    Offer,
    Peer,
    Push,
    Rejected,
    Renew,
    Reservation,
    Revoke,
)
from crossdock.core.request import Request, RequestId, SamplingParams, TransferId, pack_ids
from crossdock.kvtransfer.sender import (
    COMMIT_LEASES,
    MAX_OFFERS,
    NOTHING,
    Failed,
    PushBlocks,
    Sender,
    SenderActions,
    answer_unknown,
)

T = TransferId("t1")
ROUTER = Peer("tcp://127.0.0.1:1", Incarnation("r"))
REQUEST = Request(
    request_id=RequestId("q"), prompt=pack_ids(list(range(40))), params=SamplingParams(max_tokens=8, seed=1)
)
OFFER = Offer(transfer_id=T, request=REQUEST, router=ROUTER)


def make_sender(num_blocks: int = 3, num_groups: int = 2) -> Sender:
    sender = Sender(OFFER, num_blocks, num_groups, Incarnation("p"), lease_seconds=10.0)
    assert sender.start(0.0).messages == (OFFER,)
    return sender


def reserved_sender() -> Sender:
    """Its lease of 12 seconds began at 1.0."""
    sender = make_sender()
    sender.tick(1.0)
    assert sender.handle(reservation(), 1.0) == NOTHING
    return sender


def reservation(first_missing: int = 0, blocks: tuple[int, ...] = (20, 21, 30), lease: int = 4) -> Reservation:
    return Reservation(
        transfer_id=T,
        lease_id=LeaseId(lease),
        generation=2,
        first_missing=first_missing,
        blocks=list(blocks),
        lease_seconds=12.0,
    )


def push(group: int, source: range, blocks: list[int], num_groups: int = 1) -> PushBlocks:
    header = Push(
        transfer_id=T,
        lease_id=LeaseId(4),
        generation=2,
        group=group,
        blocks=blocks,
        transport="",
        num_groups=num_groups,
    )
    return PushBlocks(header, source)


def commit(num_block_groups: int, exposed_seconds: float = 0.0) -> Commit:
    return Commit(
        transfer_id=T,
        lease_id=LeaseId(4),
        generation=2,
        num_block_groups=num_block_groups,
        first_token_ids=[77],
        exposed_seconds=exposed_seconds,
    )


RENEW = Renew(transfer_id=T, lease_id=LeaseId(4), generation=2)


def cancelled(reason: str) -> SenderActions:
    return SenderActions(messages=(Cancel(transfer_id=T, reason=reason),), outcome=Failed(reason))


def test_each_layer_group_is_pushed_as_soon_as_it_is_written() -> None:
    sender = make_sender()
    assert sender.handle(reservation(), 1.0) == NOTHING
    assert sender.written(range(1), 2, 1.1).pushes == (push(0, range(2), [20, 21]),)
    assert sender.written(range(1, 2), 2, 1.2).pushes == (push(1, range(2), [20, 21]),)
    assert sender.written(range(1), 2, 1.2) == NOTHING
    assert sender.written(range(1), 3, 1.3).pushes == (push(0, range(2, 3), [30]),)
    assert sender.written(range(1, 2), 3, 1.4).pushes == (push(1, range(2, 3), [30]),)
    assert sender.finish([77], 1.5) == SenderActions(messages=(commit(6),))
    assert sender.handle(Attached(transfer_id=T), 1.6) == SenderActions(outcome=Attached(transfer_id=T))
    assert sender.is_ended


def test_a_reservation_after_the_end_of_prefill_gets_all_pushes_and_the_commit() -> None:
    sender = make_sender()
    assert sender.written(range(1), 3, 0.5) == NOTHING
    assert sender.finish([77], 0.6) == NOTHING
    actions = sender.handle(reservation(first_missing=1, blocks=(20, 21)), 1.0)
    assert actions.pushes == (push(0, range(1, 3), [20, 21], num_groups=2),)
    assert actions.messages == (commit(4, exposed_seconds=1.0 - 0.6),)


def test_finish_alone_pushes_everything() -> None:
    sender = reserved_sender()
    actions = sender.finish([77], 2.0)
    assert actions.pushes == (push(0, range(3), [20, 21, 30], num_groups=2),)
    assert actions.messages == (commit(6),)


def test_a_prompt_that_is_cached_whole_at_the_decode_worker_is_only_committed() -> None:
    sender = make_sender()
    assert sender.handle(reservation(3, ()), 1.0) == NOTHING
    assert sender.finish([77], 1.1) == SenderActions(messages=(commit(0),))


def test_the_offer_is_repeated_every_third_of_a_lease_time_until_hopeless() -> None:
    sender = make_sender()
    assert sender.tick(3.3) == NOTHING
    for number in range(1, MAX_OFFERS):
        assert sender.tick(4.0 * number).messages == (OFFER,)
        assert sender.tick(4.0 * number + 3.3) == NOTHING
    assert sender.tick(4.0 * MAX_OFFERS) == cancelled(f"no room within {MAX_OFFERS} offers")


def test_a_lease_is_renewed_every_third_of_its_time_and_by_every_push() -> None:
    sender = reserved_sender()
    assert sender.tick(4.9) == NOTHING
    assert sender.tick(5.0).messages == (RENEW,)
    assert sender.written(range(1), 1, 7.0).pushes == (push(0, range(1), [20]),)
    assert sender.tick(10.9) == NOTHING
    assert sender.tick(11.0).messages == (RENEW,)


def test_a_worker_that_stood_still_past_its_share_of_the_lease_writes_no_more() -> None:
    sender = reserved_sender()
    assert sender.written(range(1), 3, 10.0) == cancelled("the lease expired unused")
    assert sender.written(range(1, 2), 3, 10.0) == NOTHING

    sender = reserved_sender()
    assert sender.tick(10.0).outcome == Failed("the lease expired: this worker stood still for too long")


def test_a_reservation_counts_from_when_the_loop_last_came_round_because_it_may_have_waited_since() -> None:
    sender = make_sender()
    sender.finish([77], 0.1)
    assert sender.handle(reservation(), 9.0) == cancelled("the lease expired unused")
    sender = make_sender()
    sender.finish([77], 0.1)
    assert len(sender.handle(reservation(), 8.9).pushes) == 1


def test_the_commit_is_repeated_and_given_up() -> None:
    sender = reserved_sender()
    sender.finish([77], 2.0)
    assert sender.tick(5.9) == NOTHING
    repeated = [sender.tick(2.0 + 4.0 * i).messages for i in range(1, 6)]
    assert repeated == [(commit(6, exposed_seconds=4.0 * i),) for i in range(1, 6)]
    assert sender.tick(2.0 + 12.0 * COMMIT_LEASES) == cancelled("no answer to the commit")


def test_rejected_and_revoked_transfers_end_with_a_promise_to_write_no_more() -> None:
    for message in (Rejected(transfer_id=T, reason="why"), Revoke(transfer_id=T, reason="why")):
        sender = reserved_sender()
        assert sender.handle(message, 1.1) == cancelled("why")
        assert sender.written(range(1), 3, 1.2) == NOTHING


def test_the_outcome_comes_once_and_late_messages_get_the_promise_again() -> None:
    sender = make_sender()
    assert sender.cancel("the client left") == cancelled("the client left")
    assert sender.cancel("again") == NOTHING
    again = (Cancel(transfer_id=T, reason="no such transfer here"),)
    assert sender.handle(reservation(), 1.0) == SenderActions(messages=again)
    assert sender.handle(Revoke(transfer_id=T, reason="why"), 1.0) == SenderActions(messages=again)
    assert sender.handle(Attached(transfer_id=T), 1.0) == NOTHING
    assert sender.tick(1e9) == NOTHING


def test_attached_before_the_commit_is_not_believed() -> None:
    sender = reserved_sender()
    assert sender.handle(Attached(transfer_id=T), 1.1) == NOTHING
    assert not sender.is_ended


def test_a_second_reservation_changes_nothing() -> None:
    sender = reserved_sender()
    assert sender.handle(reservation(), 1.1) == NOTHING
    assert sender.handle(reservation(blocks=(1, 2, 3), lease=9), 1.1) == NOTHING
    assert sender.written(range(1), 3, 1.2).pushes == (push(0, range(3), [20, 21, 30]),)


def test_a_reservation_that_does_not_complete_the_prompt_ends_the_transfer() -> None:
    for wrong in (reservation(1), reservation(0, (1, 2)), reservation(0, (1, 1, 2)), reservation(-1, (1, 2, 3, 4))):
        assert make_sender().handle(wrong, 1.0) == cancelled("the reservation does not complete the prompt")


def test_an_unknown_transfer_is_answered_only_where_blocks_wait_for_it() -> None:
    promise = Cancel(transfer_id=T, reason="no such transfer here")
    assert answer_unknown(reservation()) == promise
    assert answer_unknown(Revoke(transfer_id=T, reason="why")) == promise
    assert answer_unknown(Attached(transfer_id=T)) is None
    assert answer_unknown(Rejected(transfer_id=T, reason="why")) is None
