"""Whose delivery is handled next."""

from crossdock.core.messages import Heartbeat, Incarnation, Message, Peer, PoolBooks, TokenDelta, Tokens, WorkerLoad
from crossdock.core.part import Delivery
from crossdock.core.request import RequestId
from crossdock.router.turns import LONG_QUEUE, MAX_TOKENS_A_TURN, Turns

HEARTBEAT = Heartbeat(load=WorkerLoad(books=PoolBooks(free=1, cached=0, leased=0, quarantined=0), is_accepting=True))


def of(worker: str, message: Message) -> Delivery:
    return Delivery(Peer("tcp://127.0.0.1:1", Incarnation(worker)), message)


def step(first: int, num: int, index: int = 1) -> Tokens:
    """A token of each of ``num`` requests."""
    return Tokens(
        deltas=[TokenDelta(request_id=RequestId(str(first + n)), index=index, token_id=0) for n in range(num)]
    )


def names(delivery: Delivery | None) -> list[str]:
    assert delivery is not None
    assert isinstance(delivery.message, Tokens)
    return [delta.request_id for delta in delivery.message.deltas]


def test_what_is_short_comes_back_at_once() -> None:
    turns = Turns()
    for message in (HEARTBEAT, step(0, MAX_TOKENS_A_TURN)):
        delivery = of("a", message)
        assert turns.add(delivery) is delivery
    assert len(turns) == 0


def test_a_long_step_is_handled_in_pieces_that_hold_each_token_once() -> None:
    turns = Turns()
    told = names(turns.add(of("a", step(0, 3 * MAX_TOKENS_A_TURN + 1))))
    assert len(turns) == 3
    while turns:
        [piece] = turns.take()
        assert len(names(piece)) <= MAX_TOKENS_A_TURN
        told += names(piece)
    assert told == [str(n) for n in range(3 * MAX_TOKENS_A_TURN + 1)]


def test_first_tokens_are_in_the_first_piece() -> None:
    turns = Turns()
    deltas = [*step(0, 2 * MAX_TOKENS_A_TURN).deltas, *step(900, 2, index=0).deltas]
    assert names(turns.add(of("a", Tokens(deltas=deltas))))[:3] == ["900", "901", "0"]


def test_a_worker_with_one_token_does_not_wait_for_those_with_many() -> None:
    turns = Turns()
    for worker, first in (("a", 0), ("b", 1000)):
        turns.add(of(worker, step(first, 100)))
    assert names(turns.add(of("c", step(7, 1, index=0)))) == ["7"]
    assert [names(piece)[0] for _ in range(3) for piece in turns.take()] == [
        str(MAX_TOKENS_A_TURN),
        str(1000 + MAX_TOKENS_A_TURN),
        str(2 * MAX_TOKENS_A_TURN),
    ]


def test_what_a_worker_says_after_a_long_step_stays_behind_it() -> None:
    turns = Turns()
    turns.add(of("a", step(0, 2 * MAX_TOKENS_A_TURN)))
    last = of("a", HEARTBEAT)
    assert turns.add(last) is None
    assert [names(piece)[0] for piece in turns.take()] == [str(MAX_TOKENS_A_TURN)]
    assert turns.take() == [last]
    assert (len(turns), turns.take()) == (0, [])


def test_a_router_that_has_fallen_behind_takes_longer_turns() -> None:
    turns = Turns()
    turns.add(of("a", step(0, 1 + 2 * LONG_QUEUE * MAX_TOKENS_A_TURN)))
    assert len(turns) == 2 * LONG_QUEUE
    assert [len(turns.take()) for _ in range(3)] == [3, 2, 2]
