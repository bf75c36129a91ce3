"""Leases: durations, generations, and who may use them."""

from crossdock.core.messages import Incarnation, LeaseId, Renew
from crossdock.core.request import TransferId
from crossdock.kvtransfer.lease import LeaseBook

HOLDER = Incarnation("p1")


def renew(lease_id: int, generation: int) -> Renew:
    return Renew(transfer_id=TransferId("t"), lease_id=LeaseId(lease_id), generation=generation)


def test_a_lease_expires_its_seconds_after_the_last_renewal() -> None:
    lease = LeaseBook().grant(HOLDER, seconds=10.0, now=100.0)
    assert (lease.is_expired(109.9), lease.is_expired(110.0)) == (False, True)
    lease.renew(105.0)
    assert (lease.is_expired(114.9), lease.is_expired(115.0)) == (False, True)


def test_a_slot_that_is_used_again_has_the_next_generation() -> None:
    book = LeaseBook()
    first, second = book.grant(HOLDER, 10.0, 0.0), book.grant(HOLDER, 10.0, 0.0)
    book.end(first)
    third = book.grant(HOLDER, 10.0, 0.0)
    leases = [(lease.id, lease.generation) for lease in (first, second, third)]
    assert leases == [(0, 0), (1, 0), (0, 1)]


def test_ending_a_lease_twice_does_not_free_its_slot_twice() -> None:
    book = LeaseBook()
    first = book.grant(HOLDER, 10.0, 0.0)
    book.end(first)
    book.end(first)
    again, other = book.grant(HOLDER, 10.0, 0.0), book.grant(HOLDER, 10.0, 0.0)
    assert again.id != other.id
    book.end(first)
    assert book.grant(HOLDER, 10.0, 0.0).id == 2


def test_only_the_holder_and_only_this_generation_is_covered() -> None:
    book = LeaseBook()
    book.end(book.grant(HOLDER, 10.0, 0.0))
    lease = book.grant(HOLDER, 10.0, 0.0)
    assert lease.covers(renew(0, 1), HOLDER)
    assert not lease.covers(renew(0, 0), HOLDER)
    assert not lease.covers(renew(1, 1), HOLDER)
    assert not lease.covers(renew(0, 1), Incarnation("p1 after a restart"))
