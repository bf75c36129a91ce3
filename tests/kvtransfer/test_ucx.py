"""Pieces over UCX: rings of buffers, headers that lie, and peers that are gone."""

import logging
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest

from crossdock.core.kv_layout import KvLayout
from crossdock.core.messages import Abort, Incarnation, LeaseId, Message, Peer, Push, TransportCard
from crossdock.core.part import Delivery, TransferFailed
from crossdock.core.request import RequestId, TransferId
from crossdock.core.wire_format import encode
from crossdock.kvtransfer.pool_bytes import NUM_STAGING, PoolBytes
from crossdock.kvtransfer.transport import BlockCopy, NotReachable
from crossdock.kvtransfer.ucx import UcxTransport
from crossdock.kvtransfer.ucx_inbox import DATA_TAG, HEADER_TAG, KIND_BITS, Header
from crossdock.kvtransfer.ucx_port import Endpoint, Port

from ..parts import Clock, turn_until

LAYOUT = KvLayout(num_layers=2, num_kv_heads=4, head_dim=128, block_size=64, dtype="float32")
NUM_BLOCKS = 80
RECEIVE_SECONDS = 5.0
SEND_SECONDS = 50.0
KEY = b"key"


class Side:
    """A pool of numbered elements with its transport."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.me = Peer(f"control of {name}", Incarnation(name))
        memory = bytearray(NUM_BLOCKS * LAYOUT.block_bytes)
        self.memory = np.frombuffer(memory, np.float32)
        if name == "p":
            self.memory[:] = np.arange(self.memory.size)
        self.pool = PoolBytes(memoryview(memory), NUM_BLOCKS, LAYOUT, 1)
        self.transport = UcxTransport(self.pool, self.me, KEY, SEND_SECONDS if name == "p" else RECEIVE_SECONDS, clock)
        self.arrived: list[Delivery] = []

    def turn(self) -> None:
        while (delivery := self.transport.inbox.receive()) is not None:
            if isinstance(delivery.message, Push):
                self.pool.land(delivery.message, delivery.payload)
            self.arrived.append(delivery)


class Pair:
    def __init__(self) -> None:
        self.clock = Clock()
        self.prefill, self.decode = Side("p", self.clock), Side("d", self.clock)
        self.prefill.transport.open(self.decode.me, self.decode.transport.card, NUM_BLOCKS)

    def run_until(self, is_done: Callable[[], object]) -> None:
        turn_until(is_done, self.prefill.turn, self.decode.turn)


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.prefill.transport.close()
    made.decode.transport.close()


def header(blocks: list[int]) -> Push:
    return Push(transfer_id=TransferId("t"), lease_id=LeaseId(0), generation=0, group=0, blocks=blocks, transport="ucx")


def push(pair: Pair, sources: list[int], destinations: list[int]) -> bool:
    copy = BlockCopy(sources, destinations, pair.prefill.pool.all_layers)
    return pair.prefill.transport.push(pair.decode.me, header(destinations), copy).is_done


def test_a_push_of_more_bytes_than_all_buffers_hold_arrives_piece_by_piece(pair: Pair) -> None:
    blocks = list(range(NUM_BLOCKS))
    assert NUM_BLOCKS * LAYOUT.block_bytes > 2 * NUM_STAGING * pair.prefill.pool.staging_bytes
    assert not push(pair, blocks, blocks[::-1])  # the sources are not free yet
    num_pieces = -(-NUM_BLOCKS // pair.prefill.pool.staging_blocks(pair.prefill.pool.all_layers))
    pair.run_until(lambda: len(pair.decode.arrived) == num_pieces)
    assert np.array_equal(pair.decode.pool.array, pair.prefill.pool.array[::-1])
    landed = [block for delivery in pair.decode.arrived for block in delivery.message.blocks]  # type: ignore[attr-defined]
    assert sorted(landed) == blocks


def test_what_fits_the_buffers_is_packed_at_once(pair: Pair) -> None:
    assert push(pair, [3, 5], [0, 1])
    pair.prefill.memory[:] = -1.0
    pair.run_until(lambda: pair.decode.arrived)
    first = LAYOUT.block_bytes // 4
    assert (pair.decode.memory[0], pair.decode.memory[first]) == (3.0 * first, 5.0 * first)


def test_what_ucx_has_chosen_can_be_told(pair: Pair) -> None:
    push(pair, [0], [0])
    pair.run_until(lambda: pair.decode.arrived)
    lanes = pair.prefill.transport.detail(pair.decode.me)
    assert lanes.split("/")[0] in ("sysv", "posix", "self"), "not TCP: both sides share memory"


def test_what_ucx_has_chosen_is_told_once_when_something_has_gone_there(
    pair: Pair, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    for _ in range(2):
        push(pair, [0], [0])
    pair.run_until(lambda: len(pair.decode.arrived) == 2 and not pair.prefill.transport._sent)
    lanes = pair.prefill.transport.detail(pair.decode.me)
    assert [record.message for record in caplog.records] == [f"UCX reaches control of d over {lanes}"]


def test_tcp_alone_between_processes_that_share_memory_is_warned_of(
    pair: Pair, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Endpoint, "lanes", lambda endpoint: ["tcp/lo"])
    push(pair, [0], [0])
    pair.run_until(lambda: pair.decode.arrived and not pair.prefill.transport._sent)
    (record,) = (record for record in caplog.records if record.levelname == "WARNING")
    assert record.message.startswith("control of d: UCX took TCP though both processes are on one host and ")
    assert pair.prefill.transport.detail(pair.decode.me) == record.message.replace("control of d: ", "tcp/lo; ")


def test_a_peer_that_is_not_open_gets_nothing(pair: Pair) -> None:
    pair.prefill.transport.forget(pair.decode.me)
    with pytest.raises(TransferFailed, match="no way"):
        push(pair, [0], [0])


ADDRESSES = ["", "no address", "AAAA", "9@AAAA", "99999999@AAAA", "²@AAAA", f"99999999@{Port(b'other').address}"]


@pytest.mark.parametrize("address", ADDRESSES)
def test_what_is_no_address_is_not_reachable(pair: Pair, address: str) -> None:
    with pytest.raises(NotReachable):
        pair.prefill.transport.open(Peer("x", Incarnation("x")), TransportCard("ucx", address), NUM_BLOCKS)


# --- headers that lie --------------------------------------------------------------------------------


class Rogue:
    """Somebody who speaks UCX."""

    def __init__(self, pair: Pair) -> None:
        self.port = Port(KEY)
        self.pair = pair
        self.me = Peer("tcp://127.0.0.1:9", Incarnation("rogue"))
        self.endpoint = self.port.connect(pair.decode.transport._port.address)

    def announce(self, **changed: object) -> None:
        fields: dict[str, object] = {
            "sender": self.me,
            "to": "d",
            "reply": self.port.address,
            "connection": 1,
            "tag": 7 << KIND_BITS | DATA_TAG,
            "num_bytes": LAYOUT.block_bytes,
            "message": encode(header([0])),
        }
        self.say(msgspec.msgpack.encode(Header(**{**fields, **changed})))  # type: ignore[arg-type]

    def say(self, data: bytes) -> None:
        pending = self.endpoint.send(np.frombuffer(data, np.uint8), HEADER_TAG)
        self.run_until(lambda: pending.is_done)

    def run_until(self, is_done: Callable[[], object]) -> None:
        def turn() -> bool:
            self.port.progress()
            return bool(is_done())

        self.pair.run_until(turn)


@pytest.fixture
def rogue(pair: Pair) -> Iterator[Rogue]:
    made = Rogue(pair)
    yield made
    made.endpoint.close()


def other(message: Message) -> bytes:
    return encode(message)


@pytest.mark.parametrize(
    "changed",
    [
        {"to": "a former life"},
        {"num_bytes": 0},
        {"num_bytes": -1},
        {"num_bytes": 1 << 40},
        {"message": b"nonsense"},
        {"message": other(Abort(request_id=RequestId("r")))},
        {"tag": 7 << KIND_BITS | HEADER_TAG},
        {"reply": "nowhere"},
        {"reply": Port(b"of another cluster").address},
    ],
    ids=str,
)
def test_a_header_that_makes_no_sense_is_counted_and_holds_nothing(
    pair: Pair, rogue: Rogue, changed: dict[str, object]
) -> None:
    rogue.announce(**changed)
    rogue.run_until(lambda: pair.decode.transport.inbox.num_rejected == 1)
    push(pair, [1], [2])
    pair.run_until(lambda: pair.decode.arrived)
    assert [delivery.sender for delivery in pair.decode.arrived] == [pair.prefill.me]


@pytest.mark.parametrize("data", [b"x", b"\xc1" * 100, msgspec.msgpack.encode({"sender": 1})])
def test_a_header_that_is_none_is_counted(pair: Pair, rogue: Rogue, data: bytes) -> None:
    rogue.say(data)
    rogue.run_until(lambda: pair.decode.transport.inbox.num_rejected == 1)


def test_announced_bytes_that_never_come_give_their_buffers_back_in_time(pair: Pair, rogue: Rogue) -> None:
    for number in range(2 * NUM_STAGING):
        rogue.announce(tag=number << KIND_BITS | DATA_TAG)
    push(pair, [1], [2])
    for _ in range(20):
        pair.prefill.turn()
        pair.decode.turn()
    assert pair.decode.arrived == []  # all buffers wait for the rogue's bytes
    pair.clock.now += RECEIVE_SECONDS + 0.1
    pair.run_until(lambda: pair.decode.arrived)
    assert [delivery.sender for delivery in pair.decode.arrived] == [pair.prefill.me]


def test_bytes_that_came_in_time_end_with_the_sender_whose_other_bytes_did_not(pair: Pair, rogue: Rogue) -> None:
    inbox = pair.decode.transport.inbox
    for tag in (1 << KIND_BITS | DATA_TAG, 2 << KIND_BITS | DATA_TAG):
        rogue.announce(tag=tag)
    pair.run_until(lambda: sum(piece.pending is not None for piece in inbox._pieces) == 2)
    rogue.endpoint.send(np.zeros(LAYOUT.block_bytes, np.uint8), tag)
    while not (inbox._pieces[1].pending and inbox._pieces[1].pending.is_done):
        rogue.port.progress()
        inbox._port.progress()
    pair.clock.now += RECEIVE_SECONDS + 0.1
    assert inbox.receive() is None
    assert (len(inbox._pieces), inbox._ring.num_free) == (0, NUM_STAGING)


def test_whoever_waits_for_buffers_that_never_come_back_does_not_wait_for_ever(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossdock.kvtransfer.pieces.WAIT_SECONDS", 0.05)
    transport = pair.prefill.transport
    held = [transport._ring.take() for _ in range(NUM_STAGING)]
    copying = transport.push(pair.decode.me, header([0]), BlockCopy([0], [0], pair.prefill.pool.all_layers))
    with pytest.raises(TransferFailed, match="no free buffer"):
        copying.wait()
    for buffer in held:
        transport._ring.give_back(buffer)
    assert push(pair, [1], [2])
    pair.run_until(lambda: pair.decode.arrived)
    assert [delivery.message for delivery in pair.decode.arrived] == [header([2])]


def test_a_peer_that_was_forgotten_while_its_bytes_were_on_their_way_may_come_again(pair: Pair) -> None:
    blocks = list(range(NUM_BLOCKS))
    push(pair, blocks, blocks)
    pair.run_until(lambda: pair.decode.arrived)
    pair.decode.transport.forget(pair.prefill.me)
    pair.prefill.transport.forget(pair.decode.me)
    pair.prefill.transport.open(pair.decode.me, pair.decode.transport.card, NUM_BLOCKS)
    pair.decode.arrived.clear()
    push(pair, [1], [39])
    pair.run_until(lambda: any(d.message == header([39]) for d in pair.decode.arrived))
    first = LAYOUT.block_bytes // 4
    assert pair.decode.memory[39 * first] == 1.0 * first


def test_pieces_fit_the_buffers_of_a_peer_whose_memory_is_of_another_kind(pair: Pair) -> None:
    block_bytes = LAYOUT.block_bytes
    small = PoolBytes(memoryview(bytearray(8 * block_bytes)), 8, LAYOUT, 1, staging_bytes=2 * block_bytes)
    there = UcxTransport(small, Peer("small", Incarnation("s")), KEY, RECEIVE_SECONDS)
    to = Peer("small", Incarnation("s"))
    pair.prefill.transport.open(to, there.card, 8)
    pair.prefill.transport.push(
        to, header(list(range(5))), BlockCopy([9, 8, 7, 6, 5], list(range(5)), small.all_layers)
    )
    landed: list[list[int]] = []
    while len(landed) < 3:
        pair.prefill.turn()
        if (delivery := there.inbox.receive()) is not None and isinstance(delivery.message, Push):
            small.land(delivery.message, delivery.payload)
            landed.append(delivery.message.blocks)
    assert landed == [[0, 1], [2, 3], [4]]
    assert np.array_equal(small.array[:5], pair.prefill.pool.array[[9, 8, 7, 6, 5]])
    there.close()


def test_bytes_that_their_sender_gave_up_hold_no_buffer_once_it_has_connected_anew(pair: Pair, rogue: Rogue) -> None:
    for number in range(2 * NUM_STAGING):
        rogue.announce(tag=number << KIND_BITS | DATA_TAG)
    rogue.announce(connection=2, tag=99 << KIND_BITS | DATA_TAG)
    sent = rogue.endpoint.send(np.ones(LAYOUT.block_bytes, np.uint8), 99 << KIND_BITS | DATA_TAG)
    rogue.run_until(lambda: sent.is_done and pair.decode.arrived)
    rogue.announce(connection=1)
    rogue.run_until(lambda: pair.decode.transport.inbox.num_rejected == 1)
    assert len(pair.decode.arrived) == 1
    assert set(pair.decode.pool.array[0].ravel()) == {1}
    inbox = pair.decode.transport.inbox
    assert (len(inbox._pieces), inbox._ring.num_free) == (0, NUM_STAGING)


def test_a_peer_that_closed_its_end_gets_another_connection_when_it_takes_nothing_for_long(pair: Pair) -> None:
    push(pair, [0], [0])
    pair.run_until(lambda: pair.decode.arrived)
    pair.decode.transport.forget(pair.prefill.me)
    for number in range(NUM_STAGING):
        push(pair, [number], [number])
    for _ in range(20):
        pair.prefill.turn()
        pair.decode.turn()
    assert (len(pair.decode.arrived), pair.prefill.transport._ring.num_free) == (1, 0)
    pair.clock.now += SEND_SECONDS + 0.1
    push(pair, [1], [2])
    pair.run_until(lambda: len(pair.decode.arrived) == 2)
    assert pair.decode.memory[2 * LAYOUT.block_bytes // 4] == LAYOUT.block_bytes // 4
    pair.run_until(lambda: pair.prefill.transport._ring.num_free == NUM_STAGING)
