"""Requests whose KV is on its way; blocks of 16 tokens, two layer groups, pushes over ``tcp``."""

from dataclasses import dataclass

import pytest
from msgspec.structs import replace

from crossdock.core.messages import (
    Attached,
    Cancel,
    Commit,
    LeaseId,
    Message,
    Offer,
    Peer,
    PoolBooks,
    Push,
    Rejected,
    Renew,
    Reservation,
    Revoke,
)
from crossdock.core.part import Delivery, Handover, Payload
from crossdock.core.request import Request, RequestId, TransferId
from crossdock.core.sequence import Sequence
from crossdock.decode.arrivals import TOMBSTONE_SECONDS, Arrivals
from crossdock.kvtransfer.pool_bytes import Mark, Passed
from crossdock.kvtransfer.receiver import LINGER_LEASES

from ..parts import (
    DECODE,
    LAYOUT,
    LEASE_SECONDS,
    NUM_GROUPS,
    PREFILL,
    ROUTER,
    Record,
    card,
    free,
    name_of,
    request,
    tables_of,
)

BULK = Peer("tcp://p/bulk", PREFILL.incarnation)
GROUP_BYTES = (LAYOUT.layer_bytes,) * NUM_GROUPS
FIRST = 500


@dataclass(frozen=True, slots=True)
class Landing(Passed):
    """Behind the copies of so many payloads; that somebody waits for it is noted."""

    bench: "Bench"
    count: int

    def synchronize(self) -> None:
        self.bench.waited_for.append((self.count, len(self.bench.attached), self.bench.books))


class Bench:
    def __init__(self, num_blocks: int = 8) -> None:
        self.tables = tables_of(num_blocks)
        self.outbox = Record()
        self.num_held_back = 0
        self.attached: list[Handover] = []
        self.landed: list[tuple[int, list[int]]] = []
        self.waited_for: list[tuple[int, int, PoolBooks]] = []
        """Copies, requests attached by then, and the books by then."""
        self.asked: list[str] = []
        self.arrivals = Arrivals(
            card(num_blocks),
            self.tables,
            self.outbox,
            GROUP_BYTES,
            LEASE_SECONDS,
            lambda: self.num_held_back,
            self.attached.append,
            self._land,
            self._may_run,
            lambda blocks: [sum(blocks), len(blocks)],
        )

    def _land(self, push: Push, payload: Payload) -> Mark:
        self.landed.append((push.group, push.blocks))
        return Landing(self, len(self.landed))

    def _may_run(self, sequence: Sequence) -> bool:
        self.asked.append(name_of(sequence))
        return False

    def hear(self, message: Message, now: float = 0.0, sender: Peer = PREFILL, payload: bytes = b"") -> list[Message]:
        """What the prefill worker is answered."""
        assert self.arrivals.handle(Delivery(sender, message, memoryview(payload)), now)
        return self.answers()

    def answers(self) -> list[Message]:
        sent = self.outbox.take_sent()
        assert {to for to, _ in sent} <= {PREFILL}
        return [message for _, message in sent]

    def offer(self, wanted: Request, now: float = 0.0) -> list[Message]:
        return self.hear(offer_of(wanted), now)

    def push(self, name: str, group: int, blocks: list[int], lease_id: int = 0, now: float = 0.0) -> list[Message]:
        push = Push(
            transfer_id=TransferId(f"t-{name}"),
            lease_id=LeaseId(lease_id),
            generation=0,
            group=group,
            blocks=blocks,
            transport="tcp",
        )
        return self.hear(push, now, sender=BULK, payload=bytes(len(blocks) * LAYOUT.layer_bytes))

    def arrive(self, wanted: Request, blocks: list[int], lease_id: int = 0) -> list[Message]:
        """Everything from the offer to the commit."""
        name = str(wanted.request_id)
        self.offer(wanted)
        for group in range(NUM_GROUPS):
            self.push(name, group, blocks, lease_id)
        return self.hear(commit(name, NUM_GROUPS * len(blocks), lease_id=lease_id))

    @property
    def books(self) -> PoolBooks:
        self.tables.prefixes.check()
        return self.tables.pool.books()


def offer_of(wanted: Request) -> Offer:
    return Offer(transfer_id=TransferId(f"t-{wanted.request_id}"), request=wanted, router=ROUTER)


def reservation(name: str, blocks: list[int], first_missing: int = 0, lease_id: int = 0) -> Reservation:
    return Reservation(
        transfer_id=TransferId(f"t-{name}"),
        lease_id=LeaseId(lease_id),
        generation=0,
        first_missing=first_missing,
        blocks=blocks,
        lease_seconds=LEASE_SECONDS,
    )


def commit(name: str, num_block_groups: int, *first_token_ids: int | None, lease_id: int = 0) -> Commit:
    return Commit(
        transfer_id=TransferId(f"t-{name}"),
        lease_id=LeaseId(lease_id),
        generation=0,
        num_block_groups=num_block_groups,
        first_token_ids=list(first_token_ids or [FIRST]),
    )


def cancel(name: str) -> Cancel:
    return Cancel(transfer_id=TransferId(f"t-{name}"), reason="")


def rejected(name: str, reason: str) -> Rejected:
    return Rejected(transfer_id=TransferId(f"t-{name}"), reason=reason)


def revoke(name: str, reason: str) -> Revoke:
    return Revoke(transfer_id=TransferId(f"t-{name}"), reason=reason)


def leased(num_leased: int, num_free: int, cached: int = 0, quarantined: int = 0) -> PoolBooks:
    return PoolBooks(free=num_free, cached=cached, leased=num_leased, quarantined=quarantined)


# --- from the offer to the first token ---------------------------------------------------------


def test_an_offer_gets_blocks_and_attaches_when_every_push_and_the_commit_are_here() -> None:
    bench = Bench()
    assert bench.offer(request("a", 40)) == [reservation("a", [0, 1, 2])]
    assert bench.arrivals.num_arriving == 1
    assert bench.push("a", 0, [0, 1, 2]) + bench.push("a", 1, [0, 1]) == []
    assert bench.hear(commit("a", 6)) == []  # it overtook the last push
    assert bench.attached == []
    assert bench.push("a", 1, [2]) == [Attached(transfer_id=TransferId("t-a"))]
    assert bench.landed == [(0, [0, 1, 2]), (1, [0, 1]), (1, [2])]
    (handover,) = bench.attached
    sequence = handover.sequence
    assert (handover.router, sequence.output_ids, sequence.blocks) == (ROUTER, [FIRST], [0, 1, 2])
    assert (sequence.num_computed, sequence.num_scheduled, sequence.num_unscheduled) == (40, 40, 1)
    assert (bench.arrivals.num_arriving, bench.books) == (0, leased(3, 5))


def test_blocks_change_hands_only_when_the_copies_of_all_payloads_have_run() -> None:
    bench = Bench()
    bench.offer(request("a", 16))
    bench.push("a", 0, [0])
    bench.push("a", 1, [0])
    assert bench.waited_for == []
    bench.hear(commit("a", 2))
    assert (bench.waited_for, len(bench.attached)) == ([(2, 0, leased(1, 7))], 1)
    bench = Bench()
    bench.offer(request("b", 16))
    bench.push("b", 0, [0])
    assert bench.hear(cancel("b")) == []
    assert (bench.waited_for, bench.books) == ([(1, 0, leased(1, 7))], leased(0, 8))


def test_only_missing_blocks_are_reserved() -> None:
    bench = Bench()
    bench.arrive(request("a", 40), [0, 1, 2])
    assert bench.offer(request("b", 50)) == [reservation("b", [3, 4], first_missing=2, lease_id=1)]
    assert bench.books == leased(5, 3)


def test_a_prompt_that_is_held_whole_needs_no_push() -> None:
    bench = Bench()
    bench.arrive(request("a", 32), [0, 1])
    assert bench.offer(request("b", 32)) == [reservation("b", [], first_missing=2, lease_id=1)]
    assert bench.hear(commit("b", 0, lease_id=1)) == [Attached(transfer_id=TransferId("t-b"))]
    assert [handover.sequence.blocks for handover in bench.attached] == [[0, 1], [0, 1]]


@pytest.mark.parametrize("checksums", [[3, 1], [2, 3], [3], [0]])
def test_kv_that_is_not_what_was_sent_is_never_attached(checksums: list[int]) -> None:
    bench = Bench()
    bench.offer(request("a", 40))
    bench.push("a", 0, [0, 1, 2])
    assert bench.hear(replace(commit("a", 6), checksums=checksums)) == []
    assert bench.push("a", 1, [0, 1, 2]) == [rejected("a", "the checksums differ")]
    assert (bench.attached, bench.books) == ([], leased(0, 8))
    assert bench.hear(commit("a", 6)) == [rejected("a", "no such transfer here")]


def test_kv_whose_checksums_agree_is_attached() -> None:
    bench = Bench()
    bench.offer(request("a", 40))
    bench.push("a", 0, [0, 1, 2])
    bench.push("a", 1, [0, 1, 2])
    assert bench.hear(replace(commit("a", 6), checksums=[3, 3])) == [Attached(transfer_id=TransferId("t-a"))]
    assert len(bench.attached) == 1


def test_a_repeated_offer_gets_the_same_answer_and_a_repeated_commit_attaches_once() -> None:
    bench = Bench()
    wanted = request("a", 16)
    assert [bench.offer(wanted), bench.offer(wanted)] == [[reservation("a", [0])]] * 2
    bench.push("a", 0, [0])
    bench.push("a", 1, [0])
    attached: list[Message] = [Attached(transfer_id=TransferId("t-a"))]
    assert [bench.hear(commit("a", 2)), bench.hear(commit("a", 2)), bench.offer(wanted)] == [attached, attached, []]
    assert len(bench.attached) == 1


def test_without_room_an_offer_waits_and_nobody_overtakes_it() -> None:
    bench = Bench(4)
    bench.arrive(request("a", 40), [0, 1, 2])
    assert bench.offer(request("b", 32, first_id=100)) == []
    assert bench.offer(request("c", 16, first_id=200)) == []
    assert (bench.arrivals.num_arriving, len(bench.arrivals.request_ids)) == (2, 2)
    bench.tables.release(bench.attached[0].sequence)
    bench.arrivals.sweep(0.0)
    assert bench.answers() == [reservation("b", [2, 3], lease_id=1), reservation("c", [1], lease_id=2)]


@pytest.mark.parametrize(("num_held_back", "num_answers"), [(5, 1), (6, 0)])
def test_blocks_that_running_requests_need_are_left_to_them(num_held_back: int, num_answers: int) -> None:
    bench = Bench()
    bench.num_held_back = num_held_back
    assert len(bench.offer(request("a", 40))) == num_answers


def test_a_renewed_lease_holds() -> None:
    bench = Bench()
    bench.offer(request("a", 16))
    renew = Renew(transfer_id=TransferId("t-a"), lease_id=LeaseId(0), generation=0)
    bench.hear(renew, now=LEASE_SECONDS - 1)
    bench.arrivals.sweep(LEASE_SECONDS + 1)
    assert bench.answers() == []


def test_each_arrival_has_the_deadline_of_its_own_last_renewal() -> None:
    bench = Bench()
    bench.offer(request("a", 16))
    bench.offer(request("b", 16, first_id=100), now=5.0)
    bench.hear(Renew(transfer_id=TransferId("t-a"), lease_id=LeaseId(0), generation=0), now=10.0)
    revoked = []
    for now in range(30):
        bench.arrivals.sweep(now)
        revoked += [(now, message) for message in bench.answers()]
    assert revoked == [
        (17, revoke("b", "the lease expired")),
        (21, revoke("b", "no answer yet")),
        (22, revoke("a", "the lease expired")),
        (25, revoke("b", "no answer yet")),
        (26, revoke("a", "no answer yet")),
        (29, revoke("b", "no answer yet")),
    ]


def test_what_has_attached_answers_a_repeated_commit_for_a_while_and_then_gives_its_lease_to_others() -> None:
    bench = Bench()
    bench.arrive(request("a", 16), [0])
    end = LINGER_LEASES * LEASE_SECONDS
    bench.arrivals.sweep(end - 1)
    assert bench.hear(commit("a", 2), end - 1) == [Attached(transfer_id=TransferId("t-a"))]
    bench.arrivals.sweep(end)
    assert bench.hear(commit("a", 2), end) == [rejected("a", "no such transfer here")]
    [reserved] = bench.offer(request("b", 16, first_id=100), end)
    assert reserved == replace(reservation("b", [1]), generation=1)


# --- ends --------------------------------------------------------------------------------------


def test_an_abort_revokes_and_quarantines_until_the_sender_is_quiet() -> None:
    bench = Bench()
    bench.offer(request("a", 40))
    bench.arrivals.abort(RequestId("a"), 0.0)
    assert (bench.answers(), bench.arrivals.request_ids) == ([revoke("a", "aborted by the client")], set())
    assert bench.books == leased(0, 5, quarantined=3)
    assert bench.push("a", 0, [0, 1, 2]) == []
    assert bench.landed == []
    assert (bench.hear(cancel("a")), bench.books) == ([], free(8))


def test_an_abort_gives_a_shared_prefix_back_at_once() -> None:
    bench = Bench()
    bench.arrive(request("a", 40), [0, 1, 2])
    bench.offer(request("b", 50))
    bench.arrivals.abort(RequestId("b"), 0.0)
    assert bench.books == leased(3, 3, quarantined=2)
    bench.hear(cancel("b"))
    assert bench.books == leased(3, 5)


def test_an_abort_of_a_prompt_that_is_held_whole_quarantines_nothing() -> None:
    bench = Bench()
    bench.arrive(request("a", 32), [0, 1])
    bench.offer(request("b", 32))
    bench.arrivals.abort(RequestId("b"), 0.0)
    assert bench.books == leased(2, 6)


def test_an_abort_that_overtakes_its_offer_is_remembered_for_a_while() -> None:
    bench = Bench()
    bench.arrivals.abort(RequestId("a"), 0.0)
    bench.arrivals.sweep(TOMBSTONE_SECONDS - 1)
    assert bench.offer(request("a", 16), TOMBSTONE_SECONDS - 1) == [rejected("a", "the request was aborted")]
    bench.arrivals.sweep(TOMBSTONE_SECONDS)
    assert bench.offer(request("a", 16), TOMBSTONE_SECONDS) == [reservation("a", [0])]


def test_an_abort_that_is_repeated_is_remembered_anew() -> None:
    bench = Bench()
    for name, now in (("a", 0.0), ("b", 5.0), ("a", 20.0)):
        bench.arrivals.abort(RequestId(name), now)
    bench.arrivals.sweep(TOMBSTONE_SECONDS + 5)
    assert bench.offer(request("b", 16), TOMBSTONE_SECONDS + 5) == [reservation("b", [0])]
    assert bench.offer(request("a", 16), TOMBSTONE_SECONDS + 5) == [rejected("a", "the request was aborted")]


def test_a_queued_offer_ends_by_abort_or_cancel() -> None:
    bench = Bench(4)
    bench.arrive(request("a", 60, max_tokens=4), [0, 1, 2, 3])
    bench.offer(request("b", 16, first_id=100))
    bench.offer(request("c", 16, first_id=200))
    bench.arrivals.abort(RequestId("b"), 0.0)
    assert bench.answers() == [rejected("b", "aborted by the client")]
    assert (bench.hear(cancel("c")), bench.arrivals.num_arriving) == ([], 0)


def test_a_cancel_frees_at_once_since_the_sender_is_quiet() -> None:
    bench = Bench()
    bench.offer(request("a", 40))
    assert (bench.hear(cancel("a")), bench.books) == ([], free(8))
    bench.arrivals.sweep(0.0)
    assert bench.offer(request("a", 40)) == [
        Reservation(
            transfer_id=TransferId("t-a"),
            lease_id=LeaseId(0),
            generation=1,
            first_missing=0,
            blocks=[0, 1, 2],
            lease_seconds=LEASE_SECONDS,
        )
    ]


def test_a_lease_that_nobody_renews_is_revoked_until_there_is_an_answer() -> None:
    bench = Bench()
    bench.offer(request("a", 40))
    bench.arrivals.sweep(LEASE_SECONDS)
    assert (bench.answers(), bench.books) == ([revoke("a", "the lease expired")], leased(0, 5, quarantined=3))
    bench.arrivals.sweep(LEASE_SECONDS * 4 / 3)
    assert bench.answers() == [revoke("a", "no answer yet")]
    bench.hear(cancel("a"))
    bench.arrivals.sweep(LEASE_SECONDS * 2)
    assert (bench.answers(), bench.books) == ([], free(8))


def test_what_a_dead_sender_may_still_write_is_free_a_lease_time_later() -> None:
    bench = Bench(4)
    bench.offer(request("a", 40))
    bench.offer(request("b", 32, first_id=100))
    bench.arrivals.lose(PREFILL, 0.0)
    assert (bench.answers(), bench.arrivals.num_arriving) == ([], 0)
    bench.arrivals.sweep(LEASE_SECONDS - 1)
    assert bench.books == leased(0, 1, quarantined=3)
    bench.arrivals.sweep(LEASE_SECONDS)
    assert bench.books == free(4)


def test_without_the_router_nothing_arrives() -> None:
    bench = Bench(4)
    bench.offer(request("a", 40))
    bench.offer(request("b", 32, first_id=100))
    bench.arrivals.lose(ROUTER, 0.0)
    assert bench.answers() == [revoke("a", "the router is gone"), rejected("b", "the router is gone")]
    assert (bench.arrivals.num_arriving, bench.books) == (0, leased(0, 1, quarantined=3))


def test_what_has_attached_outlives_its_sender_and_its_leftover_state() -> None:
    bench = Bench()
    bench.arrive(request("a", 40), [0, 1, 2])
    bench.arrivals.lose(PREFILL, 0.0)
    bench.hear(cancel("a"))
    bench.arrivals.sweep(1000.0)
    assert (bench.answers(), bench.books) == ([], leased(3, 5))
    assert bench.hear(commit("a", 6), now=1000.0) == [rejected("a", "no such transfer here")]


def test_a_push_of_nothing_known_is_not_answered_because_nobody_listens_where_it_comes_from() -> None:
    assert Bench().push("a", 0, [0]) == []


def test_a_wrong_count_or_a_wrong_token_attaches_nothing() -> None:
    bench = Bench()
    bench.offer(request("a", 16))
    bench.push("a", 0, [0])
    bench.push("a", 1, [0])
    assert bench.hear(commit("a", 2, 1000)) == []
    reason = "3 block groups are committed, 1 blocks reserved"
    assert bench.hear(commit("a", 3)) == [rejected("a", reason)]
    assert (bench.attached, bench.books) == ([], leased(0, 7, quarantined=1))


def test_a_first_token_that_ends_the_request_frees_its_blocks() -> None:
    bench = Bench()
    bench.arrive(request("a", 16, max_tokens=1), [0])
    assert (bench.attached, bench.books) == ([], free(8, cached=1))


def test_an_offer_that_can_never_fit_is_rejected() -> None:
    bench = Bench(2)
    reason = "prompt and max_tokens are 33 tokens, the limit is 32"
    assert bench.offer(request("a", 30, max_tokens=3)) == [rejected("a", reason)]
    assert bench.arrivals.num_arriving == 0


def test_messages_of_others_are_not_for_arrivals() -> None:
    bench = Bench()
    assert not bench.arrivals.handle(Delivery(DECODE, Attached(transfer_id=TransferId("t-a"))), 0.0)


def test_a_cancel_of_a_queued_offer_counts_only_from_its_sender() -> None:
    bench = Bench(2)
    bench.arrive(request("a", 16), [0])
    bench.num_held_back = 1
    bench.offer(request("b", 16, first_id=100, max_tokens=5))
    bench.hear(cancel("b"), sender=DECODE)
    assert bench.arrivals.num_arriving == 1


def test_a_grammar_is_asked_for_when_its_request_is_offered_and_holds_no_kv_up() -> None:
    bench = Bench()
    assert [type(message) for message in bench.offer(request("a", 16))] == [Reservation]
    assert bench.asked == ["a"]
