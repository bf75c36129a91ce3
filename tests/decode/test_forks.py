"""A request with forks on its way to the decode part, and priorities among those that wait or run."""

from crossdock.core.messages import Attached, Cancel, Rejected, Reservation
from crossdock.core.request import Request, RequestId, TransferId

from ..parts import NUM_GROUPS, free, name_of, request
from .test_arrivals import FIRST, Bench, commit, leased, rejected, reservation, revoke

WANTED = request("a", 40, num_forks=2)


def land(bench: Bench, wanted: Request = WANTED) -> None:
    bench.offer(wanted)
    for group in range(NUM_GROUPS):
        bench.push("a", group, [0, 1, 2])


def attached(bench: Bench) -> list[tuple[str, list[int], list[int]]]:
    sequences = [handover.sequence for handover in bench.attached]
    return [(name_of(sequence), sequence.output_ids, sequence.blocks) for sequence in sequences]


def test_one_arrival_becomes_one_sequence_a_choice_over_the_same_blocks() -> None:
    bench = Bench()
    land(bench)
    assert (bench.arrivals.num_arriving, bench.arrivals.num_promised, bench.books) == (3, 2, leased(3, 5))
    assert bench.hear(commit("a", 6, FIRST, 501, 502)) == [Attached(transfer_id=TransferId("t-a"))]
    assert attached(bench) == [("a", [FIRST], [0, 1, 2]), ("a1", [501], [0, 1, 2]), ("a2", [502], [0, 1, 2])]
    assert (bench.arrivals.num_arriving, bench.arrivals.num_promised, bench.books) == (0, 0, leased(3, 5))


def test_a_choice_that_is_aborted_while_the_kv_travels_is_not_gone_on_with() -> None:
    bench = Bench()
    land(bench)
    bench.arrivals.abort(RequestId("a"), 0.0)
    assert (bench.answers(), bench.arrivals.num_arriving, bench.arrivals.num_promised) == ([], 2, 1)
    bench.hear(commit("a", 6, FIRST, 501, 502))
    assert [name for name, _, _ in attached(bench)] == ["a1", "a2"]
    assert bench.books == leased(3, 5)


def test_the_last_choice_that_is_aborted_ends_the_transfer() -> None:
    bench = Bench()
    land(bench)
    for name in ("a", "a1"):
        bench.arrivals.abort(RequestId(name), 0.0)
    assert bench.answers() == []
    bench.arrivals.abort(RequestId("a2"), 0.0)
    assert bench.answers() == [revoke("a", "aborted by the client")]
    bench.hear(Cancel(transfer_id=TransferId("t-a"), reason=""))
    assert bench.books == free(8)


def test_aborts_that_overtake_their_offer_are_remembered_choice_by_choice() -> None:
    bench = Bench()
    for name in ("a", "a2"):
        bench.arrivals.abort(RequestId(name), 0.0)
    land(bench)
    bench.hear(commit("a", 6, FIRST, 501, 502))
    assert attached(bench) == [("a1", [501], [0, 1, 2])]
    for name in ("b", "b1"):
        bench.arrivals.abort(RequestId(name), 0.0)
    assert bench.offer(request("b", 40, num_forks=1)) == [rejected("b", "the request was aborted")]


def test_choices_that_go_no_further_than_their_first_token_are_not_attached() -> None:
    bench = Bench()
    land(bench)
    bench.hear(commit("a", 6, None, 501, None))
    assert attached(bench) == [("a1", [501], [0, 1, 2])]
    assert bench.books == leased(3, 5)


def test_a_commit_with_another_number_of_tokens_than_choices_attaches_nothing() -> None:
    bench = Bench()
    land(bench)
    assert (bench.hear(commit("a", 6, FIRST, 501)), bench.attached) == ([], [])


def test_there_must_be_room_for_copies_which_is_promised_until_the_choices_run() -> None:
    bench = Bench(8)
    assert bench.offer(WANTED) == [reservation("a", [0, 1, 2])]
    bench.num_held_back = bench.arrivals.num_promised
    assert bench.offer(request("b", 50, first_id=500)) == []  # four blocks are wanted, five are free, two are promised
    assert bench.offer(request("c", 20, first_id=700)) == []  # nobody overtakes
    (refusal,) = bench.offer(request("d", 121, max_tokens=2, num_forks=1))
    assert isinstance(refusal, Rejected)
    assert refusal.reason == "2 choices over this prompt are asked for, this worker holds 1"


def test_offers_that_wait_are_served_by_priority_then_in_their_order() -> None:
    bench = Bench(4)
    bench.num_held_back = 4
    for name, priority in (("a", 1), ("b", 0), ("c", 1), ("d", -1)):
        assert bench.offer(request(name, 10, priority=priority)) == []
    bench.num_held_back = 0
    bench.arrivals.sweep(0.0)
    answers = [message for message in bench.answers() if isinstance(message, Reservation)]
    assert [str(answer.transfer_id) for answer in answers] == ["t-d", "t-b", "t-a", "t-c"]
