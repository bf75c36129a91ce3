"""The decode side of one transfer, step by step."""

import pytest
from msgspec.structs import replace

from crossdock.core.messages import (
    Attached,
    Cancel,
    Commit,
    Incarnation,
    LeaseId,
    Message,
    Peer,
    Push,
    Rejected,
    Renew,
    Reservation,
    Revoke,
)
from crossdock.core.part import Delivery
from crossdock.core.request import TransferId
from crossdock.kvtransfer.lease import Lease
from crossdock.kvtransfer.receiver import LINGER_LEASES, NOTHING, Change, Receiver, ReceiverActions, answer_unknown

T = TransferId("t1")
SENDER = Peer("tcp://127.0.0.1:2", Incarnation("p"))
ATTACHED = Attached(transfer_id=T)


def make_receiver(blocks: tuple[int, ...] = (20, 21)) -> Receiver:
    """Two layer groups, of 6 and 4 bytes a block; a lease of 12 seconds from time 0."""
    lease = Lease(LeaseId(4), 2, SENDER.incarnation, 12.0, 12.0)
    return Receiver(T, lease, first_missing=1, blocks=list(blocks), group_bytes=(6, 4))


def deliver(receiver: Receiver, message: Message, now: float, payload: bytes = b"") -> ReceiverActions:
    return receiver.handle(Delivery(SENDER, message, memoryview(payload)), now)


def push(group: int, *blocks: int, generation: int = 2, transport: str = "shm") -> Push:
    return Push(
        transfer_id=T, lease_id=LeaseId(4), generation=generation, group=group, blocks=list(blocks), transport=transport
    )


def commit(num_block_groups: int = 4, generation: int = 2) -> Commit:
    return Commit(
        transfer_id=T,
        lease_id=LeaseId(4),
        generation=generation,
        num_block_groups=num_block_groups,
        first_token_ids=[77],
    )


RENEW = Renew(transfer_id=T, lease_id=LeaseId(4), generation=2)
CANCEL = Cancel(transfer_id=T, reason="gave up")


def revoked(reason: str) -> ReceiverActions:
    return ReceiverActions((Revoke(transfer_id=T, reason=reason),), change=Change.QUARANTINE)


def test_it_attaches_when_every_group_of_every_block_has_landed_and_is_committed() -> None:
    receiver = make_receiver()
    assert receiver.offered(0.0).messages == (
        Reservation(
            transfer_id=T,
            lease_id=LeaseId(4),
            generation=2,
            first_missing=1,
            blocks=[20, 21],
            lease_seconds=12.0,
        ),
    )
    assert deliver(receiver, push(0, 20, 21), 1.0) == NOTHING
    assert deliver(receiver, push(1, 20, 21), 1.0) == NOTHING
    assert deliver(receiver, commit(), 1.1) == ReceiverActions((ATTACHED,), change=Change.ATTACH)
    assert receiver.first_token_ids == [77]


def test_a_commit_that_overtakes_pushes_waits_for_them() -> None:
    receiver = make_receiver()
    deliver(receiver, push(0, 20, 21), 1.0)
    assert deliver(receiver, commit(), 1.1) == NOTHING
    assert deliver(receiver, push(1, 21), 1.2) == NOTHING
    assert deliver(receiver, push(1, 20), 1.3) == ReceiverActions((ATTACHED,), change=Change.ATTACH)


def test_a_commit_whose_pushes_never_come_waits_no_longer_than_the_lease() -> None:
    receiver = make_receiver()
    deliver(receiver, push(0, 20, 21), 1.0)
    deliver(receiver, commit(), 2.0)
    assert deliver(receiver, commit(), 10.0) == NOTHING
    assert deliver(receiver, RENEW, 10.0) == NOTHING
    assert receiver.tick(13.9) == NOTHING
    assert receiver.tick(14.0) == revoked("the lease expired")


def test_repeated_pushes_do_not_count_twice() -> None:
    receiver = make_receiver()
    for _ in range(4):
        assert deliver(receiver, push(0, 20), 1.0) == NOTHING
    assert deliver(receiver, commit(), 1.1) == NOTHING


def test_payloads_land_once() -> None:
    receiver = make_receiver()
    message = push(0, 20, 21, transport="tcp")
    assert deliver(receiver, message, 1.0, b"x" * 12) == ReceiverActions(lands=True)
    assert deliver(receiver, message, 1.0, b"x" * 12) == NOTHING


def test_the_last_payload_lands_and_attaches_in_one() -> None:
    receiver = make_receiver((20,))
    deliver(receiver, push(0, 20, transport="tcp"), 1.0, b"x" * 6)
    deliver(receiver, commit(2), 1.0)
    actions = deliver(receiver, push(1, 20, transport="tcp"), 1.0, b"x" * 4)
    assert actions == ReceiverActions((ATTACHED,), lands=True, change=Change.ATTACH)


def test_a_push_of_several_groups_counts_for_each_of_them() -> None:
    receiver = make_receiver()
    deliver(receiver, push(1, 20, transport="tcp"), 1.0, b"x" * 4)
    both = replace(push(0, 20, 21, transport="tcp"), num_groups=2)
    assert deliver(receiver, both, 1.0, b"x" * 20) == ReceiverActions(lands=True)
    assert deliver(receiver, both, 1.0, b"x" * 20) == NOTHING
    assert deliver(receiver, commit(), 1.1).change is Change.ATTACH


def test_a_prompt_that_is_cached_whole_attaches_with_its_commit() -> None:
    receiver = make_receiver(())
    assert deliver(receiver, commit(0), 1.0).change is Change.ATTACH


@pytest.mark.parametrize(
    ("message", "payload", "reason"),
    [
        (push(2, 20), b"", "layer groups 2 to 3 do not exist"),
        (push(-1, 20), b"", "layer groups -1 to 0 do not exist"),
        (replace(push(1, 20), num_groups=2), b"", "layer groups 1 to 3 do not exist"),
        (replace(push(1, 20), num_groups=0), b"", "layer groups 1 to 1 do not exist"),
        (replace(push(0, 20, transport="tcp"), num_groups=2), b"x" * 6, "a push brought 6 bytes, not 10"),
        (push(0, 20, 22), b"", "a block was pushed that is not reserved"),
        (push(0, 20, 21, transport="tcp"), b"x" * 11, "a push brought 11 bytes, not 12"),
        (push(1, 20, 21, transport="tcp"), b"", "a push brought 0 bytes, not 8"),
        (push(0, 20), b"x" * 6, "a push brought 6 bytes, not 0"),
    ],
)
def test_a_push_that_is_not_as_agreed_ends_the_transfer(message: Push, payload: bytes, reason: str) -> None:
    receiver = make_receiver()
    assert deliver(receiver, message, 1.0, payload) == revoked(reason)
    assert deliver(receiver, commit(), 1.1).change is None
    assert not receiver.is_open


def test_a_commit_with_the_wrong_count_is_rejected_and_the_blocks_are_quarantined() -> None:
    receiver = make_receiver()
    reason = "3 block groups are committed, 2 blocks reserved"
    rejected = Rejected(transfer_id=T, reason=reason)
    assert deliver(receiver, commit(3), 1.0) == ReceiverActions((rejected,), change=Change.QUARANTINE)
    assert deliver(receiver, CANCEL, 1.1) == ReceiverActions(change=Change.END_QUARANTINE)


def test_messages_of_another_generation_or_sender_change_nothing() -> None:
    receiver = make_receiver((20,))
    stranger = Peer(SENDER.address, Incarnation("p after a restart"))
    for message in (push(0, 20, generation=1), push(1, 20, generation=3), push(9, 20, generation=1)):
        assert deliver(receiver, message, 1.0) == NOTHING
    assert receiver.handle(Delivery(stranger, push(0, 20)), 1.0) == NOTHING
    assert receiver.handle(Delivery(stranger, CANCEL), 1.0) == NOTHING
    stale = deliver(receiver, commit(2, generation=1), 1.0)
    assert stale == ReceiverActions((Rejected(transfer_id=T, reason="the lease is another one"),))
    deliver(receiver, push(0, 20), 1.0)
    assert deliver(receiver, commit(2), 1.0) == NOTHING
    assert receiver.is_open


def test_a_silent_sender_is_asked_until_it_promises_to_write_no_more() -> None:
    receiver = make_receiver()
    deliver(receiver, RENEW, 6.0)
    assert receiver.tick(17.9) == NOTHING
    assert receiver.tick(18.0) == revoked("the lease expired")
    assert receiver.tick(21.9) == NOTHING
    assert receiver.tick(22.0).messages == (Revoke(transfer_id=T, reason="no answer yet"),)
    assert deliver(receiver, CANCEL, 23.0) == ReceiverActions(change=Change.END_QUARANTINE)
    assert receiver.is_ended


def test_a_push_on_an_expired_lease_is_refused_even_before_the_sweep() -> None:
    receiver = make_receiver()
    assert deliver(receiver, push(0, 20, 21), 12.0) == revoked("the lease expired")


def test_cancel_frees_the_blocks_at_once() -> None:
    receiver = make_receiver()
    deliver(receiver, push(0, 20), 1.0)
    assert deliver(receiver, CANCEL, 1.1) == ReceiverActions(change=Change.GIVE_BACK)
    assert receiver.is_ended
    assert deliver(receiver, commit(), 1.2).change is None


def test_a_local_end_waits_for_the_senders_promise() -> None:
    receiver = make_receiver()
    assert receiver.revoke("the client left", 1.0) == revoked("the client left")
    assert receiver.revoke("again", 1.1) == NOTHING
    assert deliver(receiver, CANCEL, 1.2) == ReceiverActions(change=Change.END_QUARANTINE)


def test_blocks_of_a_dead_sender_are_free_after_a_lease_time_of_silence() -> None:
    receiver = make_receiver()
    assert receiver.lose(3.0) == ReceiverActions(change=Change.QUARANTINE)
    assert receiver.tick(14.9) == NOTHING
    assert receiver.tick(15.0) == ReceiverActions(change=Change.END_QUARANTINE)
    assert receiver.is_ended


def test_who_was_declared_dead_but_still_writes_is_told_and_waited_for() -> None:
    receiver = make_receiver()
    receiver.lose(3.0)
    assert deliver(receiver, push(0, 20), 14.0).messages == (Revoke(transfer_id=T, reason="you were declared dead"),)
    assert receiver.tick(25.9) == NOTHING
    assert deliver(receiver, CANCEL, 25.9) == ReceiverActions(change=Change.END_QUARANTINE)


def test_death_after_a_revoke_does_not_quarantine_twice() -> None:
    receiver = make_receiver()
    receiver.revoke("the client left", 1.0)
    assert receiver.lose(2.0) == NOTHING
    assert receiver.tick(14.0) == ReceiverActions(change=Change.END_QUARANTINE)


def test_attached_is_final_and_repeated_commits_are_answered_for_a_while() -> None:
    receiver = make_receiver(())
    deliver(receiver, commit(0), 1.0)
    for ignored in (CANCEL, RENEW, push(0)):
        assert deliver(receiver, ignored, 2.0) == NOTHING
    assert receiver.lose(2.0) == receiver.revoke("why", 2.0) == receiver.offered(2.0) == NOTHING
    assert deliver(receiver, commit(0), 9.0) == ReceiverActions((ATTACHED,))
    assert receiver.tick(1.0 + 12.0 * LINGER_LEASES) == NOTHING
    assert receiver.is_ended


def test_a_repeated_offer_gets_the_same_reservation() -> None:
    receiver = make_receiver()
    assert receiver.offered(1.0) == receiver.offered(11.9) != NOTHING
    assert receiver.offered(12.0) == NOTHING


def test_an_unknown_transfer_is_rejected_where_a_sender_waits() -> None:
    rejected = Rejected(transfer_id=T, reason="no such transfer here")
    assert [answer_unknown(message) for message in (push(0), RENEW, commit())] == [rejected] * 3
    assert answer_unknown(CANCEL) is None
