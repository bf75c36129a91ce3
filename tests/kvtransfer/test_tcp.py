"""Bulk over ZeroMQ: pieces, digests that stay together, and what a full queue means."""

import os
from collections.abc import Iterator

import pytest

from crossdock.core import mailbox
from crossdock.core.kv_layout import KvLayout
from crossdock.core.mailbox import Mailbox
from crossdock.core.messages import Incarnation, LeaseId, Peer, ProbeSent, Push, TransportCard
from crossdock.core.part import Delivery, Payload, TransferFailed
from crossdock.core.request import TransferId
from crossdock.kvtransfer import tcp
from crossdock.kvtransfer.pool_bytes import PoolBytes
from crossdock.kvtransfer.tcp import TcpTransport
from crossdock.kvtransfer.transport import BlockCopy

LAYOUT = KvLayout(num_layers=3, num_kv_heads=1, head_dim=2, block_size=2, dtype="bfloat16")
NUM_BLOCKS = 6
DECODE = Peer("tcp://127.0.0.1:1", Incarnation("d"))


def make_transport(incarnation: str) -> TcpTransport:
    memory = memoryview(bytearray(os.urandom(NUM_BLOCKS * LAYOUT.block_bytes)))
    pool = PoolBytes(memory, NUM_BLOCKS, LAYOUT, 2)
    return TcpTransport(pool, Mailbox("127.0.0.1", 0, Incarnation(incarnation)))


@pytest.fixture
def prefill() -> Iterator[TcpTransport]:
    transport = make_transport("p")
    yield transport
    transport.close()


@pytest.fixture
def decode() -> Iterator[TcpTransport]:
    transport = make_transport("d")
    yield transport
    transport.close()


def header(*blocks: int) -> Push:
    return Push(
        transfer_id=TransferId("t"),
        lease_id=LeaseId(0),
        generation=0,
        group=1,
        blocks=list(blocks),
        transport="tcp",
    )


def content(payload: Payload) -> bytes:
    assert isinstance(payload, memoryview)
    return payload.tobytes()


def receive(transport: TcpTransport) -> Delivery:
    while transport.inbox.poll_socket.poll(5000):
        delivery = transport.inbox.receive()
        if delivery is not None:
            return delivery
    raise AssertionError("nothing came")


def test_a_push_arrives_with_the_spans_of_its_group(prefill: TcpTransport, decode: TcpTransport) -> None:
    prefill.open(DECODE, decode.card, NUM_BLOCKS)
    layers = prefill._pool.groups[1]
    prefill.push(DECODE, header(5, 0), BlockCopy([1, 2], [5, 0], layers))
    delivery = receive(decode)
    assert delivery.sender == Peer(prefill.card.address, Incarnation("p"))
    assert delivery.message == header(5, 0)
    assert content(delivery.payload) == prefill._pool.read([1, 2], layers)
    assert len(delivery.payload) == 2 * 2 * LAYOUT.layer_bytes


def test_a_large_push_travels_in_pieces_that_are_pushes_themselves(
    prefill: TcpTransport, decode: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "PIECE_BYTES", 5 * LAYOUT.layer_bytes)
    prefill.open(DECODE, decode.card, NUM_BLOCKS)
    layers = prefill._pool.groups[1]
    prefill.push(DECODE, header(9, 8, 7, 6, 5), BlockCopy([0, 1, 2, 3, 4], [9, 8, 7, 6, 5], layers))
    pieces = [receive(decode) for _ in range(3)]
    assert [piece.message for piece in pieces] == [header(9, 8), header(7, 6), header(5)]
    assert [content(piece.payload) for piece in pieces] == [
        prefill._pool.read(blocks, layers) for blocks in ([0, 1], [2, 3], [4])
    ]


def test_the_bytes_of_a_probe_stay_in_one_message(
    prefill: TcpTransport, decode: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "PIECE_BYTES", 1)
    prefill.open(DECODE, decode.card, NUM_BLOCKS)
    sent = ProbeSent(probe_id="x", trial=0, transport="tcp", num_blocks=2, digest=b"")
    prefill.push(DECODE, sent, BlockCopy([4, 5], [0, 1], prefill._pool.all_layers))
    delivery = receive(decode)
    assert (delivery.message, len(delivery.payload)) == (sent, 2 * LAYOUT.block_bytes)


def test_a_full_queue_fails_the_transfer_and_keeps_nobody_waiting(
    prefill: TcpTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox, "HIGH_WATER_MARK", 5)
    nobody = TransportCard("tcp", "tcp://127.0.0.1:9")
    prefill.open(DECODE, nobody, NUM_BLOCKS)
    copy = BlockCopy([1], [5], prefill._pool.groups[1])
    for _ in range(5):
        prefill.push(DECODE, header(5), copy)
    with pytest.raises(TransferFailed, match="queue to the peer is full"):
        prefill.push(DECODE, header(5), copy)


def test_a_peer_that_was_not_opened_or_is_forgotten_gets_nothing(prefill: TcpTransport, decode: TcpTransport) -> None:
    copy = BlockCopy([1], [5], prefill._pool.groups[1])
    with pytest.raises(TransferFailed, match="not known"):
        prefill.push(DECODE, header(5), copy)
    prefill.open(DECODE, decode.card, NUM_BLOCKS)
    prefill.forget(DECODE)
    prefill.forget(DECODE)
    with pytest.raises(TransferFailed, match="not known"):
        prefill.push(DECODE, header(5), copy)
