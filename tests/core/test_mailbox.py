"""Messages between real sockets on loopback: in order, never waited for, and never able to kill the receiver."""

import asyncio
import os
import random
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import closing

import msgspec
import pytest
import zmq

from crossdock.core import mailbox as mailbox_module
from crossdock.core.mailbox import HIGH_WATER_MARK, AsyncMailbox, Mailbox
from crossdock.core.messages import Abort, Envelope, Incarnation, Message, Peer, Refused
from crossdock.core.part import Delivery
from crossdock.core.request import RequestId
from crossdock.core.wire_format import decode, encode

HOST = "127.0.0.1"
NOBODY = Peer("tcp://127.0.0.1:9", Incarnation("nobody"))


def content(delivery: Delivery) -> bytes:
    assert isinstance(delivery.payload, memoryview)
    return delivery.payload.tobytes()


def abort(name: str) -> Abort:
    return Abort(request_id=RequestId(name))


def opened(name: str, port: int = 0) -> Mailbox:
    return Mailbox(HOST, port, Incarnation(name))


def port_of(peer: Peer) -> int:
    return int(peer.address.rpartition(":")[2])


def next_delivery(mailbox: Mailbox) -> Delivery:
    """The next message, waited for."""
    while (delivery := mailbox.receive()) is None:
        assert mailbox.poll_socket.poll(5000), "no message within 5 s"
    return delivery


@pytest.fixture
def alice() -> Iterator[Mailbox]:
    with closing(opened("alice")) as mailbox:
        yield mailbox


@pytest.fixture
def bob() -> Iterator[Mailbox]:
    with closing(opened("bob")) as mailbox:
        yield mailbox


def test_a_message_arrives_with_its_sender(alice: Mailbox, bob: Mailbox) -> None:
    alice.send(bob.peer, abort("r1"))
    assert next_delivery(bob) == Delivery(alice.peer, abort("r1"))
    assert bob.receive() is None


def test_the_answer_goes_to_the_address_in_the_envelope(alice: Mailbox, bob: Mailbox) -> None:
    alice.send(bob.peer, abort("question"))
    bob.send(next_delivery(bob).sender, abort("answer"))
    assert next_delivery(alice).message == abort("answer")


def test_messages_to_one_peer_keep_their_order(alice: Mailbox, bob: Mailbox) -> None:
    for number in range(500):
        alice.send(bob.peer, abort(str(number)))
    assert [next_delivery(bob).message for _ in range(500)] == [abort(str(number)) for number in range(500)]


@pytest.mark.parametrize("num_bytes", [0, 1, 100_000, 3_000_000])
def test_bulk_bytes_travel_beside_their_message(alice: Mailbox, bob: Mailbox, num_bytes: int) -> None:
    payload = os.urandom(num_bytes)
    alice.send(bob.peer, abort("r1"), payload)
    alice.send(bob.peer, abort("r2"))
    first, second = next_delivery(bob), next_delivery(bob)
    assert (first.message, content(first)) == (abort("r1"), payload)
    assert (second.message, content(second)) == (abort("r2"), b"")


def test_a_payload_in_pool_memory_may_be_overwritten_right_after_send(alice: Mailbox, bob: Mailbox) -> None:
    pool = bytearray(b"a" * 1_000_000)
    alice.send(bob.peer, abort("r1"), memoryview(pool)[:500_000])
    pool[:] = b"b" * 1_000_000
    assert content(next_delivery(bob)) == b"a" * 500_000


def test_sending_to_where_nobody_listens_neither_blocks_nor_grows_beyond_the_high_water_mark(alice: Mailbox) -> None:
    for number in range(HIGH_WATER_MARK + 5):
        alice.send(NOBODY, abort(str(number)))
    assert alice.num_dropped == 5


def test_a_forgotten_peer_loses_its_queue_and_may_come_back(alice: Mailbox) -> None:
    with socket.socket() as reserved:
        reserved.bind((HOST, 0))
        port = reserved.getsockname()[1]
    later = Peer(f"tcp://{HOST}:{port}", Incarnation("bob"))
    alice.send(later, abort("before"))
    alice.forget(later)
    alice.forget(later)
    with closing(opened("bob", port)) as bob:
        alice.send(bob.peer, abort("after"))
        assert next_delivery(bob).message == abort("after")


def test_a_message_sent_before_the_peer_listens_waits_for_it(alice: Mailbox) -> None:
    with closing(opened("bob")) as gone:
        peer = gone.peer
    alice.send(peer, abort("early"))
    with closing(opened("bob", port_of(peer))) as bob:
        assert next_delivery(bob).message == abort("early")


def test_a_peer_restarted_at_its_old_address_gets_only_what_is_meant_for_its_new_life(alice: Mailbox) -> None:
    with closing(opened("first life")) as first:
        alice.send(first.peer, abort("r1"))
        assert next_delivery(first).message == abort("r1")
        former = first.peer
    with closing(opened("second life", port_of(former))) as second:
        assert second.peer.address == former.address
        alice.send(former, abort("late"))
        assert second.poll_socket.poll(5000)
        assert (second.receive(), second.num_rejected) == (None, 1)
        alice.send(second.peer, abort("r2"))
        second.send(alice.peer, abort("r3"))
        assert next_delivery(second).message == abort("r2")
        assert next_delivery(alice) == Delivery(second.peer, abort("r3"))


def test_who_does_not_know_the_receivers_incarnation_yet_is_heard(alice: Mailbox, bob: Mailbox) -> None:
    alice.send(Peer(bob.peer.address, Incarnation("")), abort("r1"))
    assert next_delivery(bob).message == abort("r1")


@pytest.mark.parametrize(
    "address", ["", "nonsense", "tcp://", "tcp://x:y", "ipc:///tmp/x", "inproc://x", "tcp://a\0b:1"]
)
def test_an_address_that_is_none_costs_the_message_and_nothing_else(alice: Mailbox, address: str) -> None:
    alice.send(Peer(address, Incarnation("x")), abort("r1"))
    assert alice.num_dropped == 1


def test_ports_in_use_are_named(alice: Mailbox) -> None:
    port = port_of(alice.peer)
    with pytest.raises(OSError, match=f"can't listen on 127.0.0.1:{port}: Address already in use"):
        opened("bob", port)


@pytest.mark.parametrize(("host", "port"), [("host.invalid", 0), ("127.0.0.1", 65536), ("127.0.0.1", -1)])
def test_places_where_nobody_can_listen_are_named(host: str, port: int) -> None:
    with pytest.raises(OSError, match=f"can't listen on {host}:{port}: "):
        Mailbox(host, port, Incarnation("x"))


@pytest.mark.parametrize(("host", "start"), [("localhost", "tcp://127.0.0.1:"), ("127.0.0.1", "tcp://127.0.0.1:")])
def test_the_address_is_numeric_and_its_port_the_systems_choice(host: str, start: str) -> None:
    with closing(Mailbox(host, 0, Incarnation("x"))) as mailbox:
        assert mailbox.peer.address.startswith(start)
        assert port_of(mailbox.peer) > 0


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_hosts_may_be_ipv6(alice: Mailbox, host: str) -> None:
    with closing(Mailbox(host, 0, Incarnation("bob"))) as bob:
        assert bob.peer.address.startswith("tcp://[::1]:")
        alice.send(bob.peer, abort("r1"))
        bob.send(alice.peer, abort("r2"))
        assert (next_delivery(bob).message, next_delivery(alice).message) == (abort("r1"), abort("r2"))


def test_more_peers_than_a_process_has_sockets_for_push_out_the_oldest(
    alice: Mailbox, bob: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_module, "MAX_PEERS", 3)
    for number in range(10):
        alice.send(bob.peer, abort(str(number)))
        alice.send(Peer(f"tcp://127.0.0.1:{number + 1}", Incarnation("nobody")), abort("x"))
        assert next_delivery(bob).message == abort(str(number))
    assert len(alice._lines) == 3


def test_last_words_leave_when_the_mailbox_is_given_time(bob: Mailbox) -> None:
    with closing(opened("alice")) as alice:
        alice.send(bob.peer, abort("last words"))
        alice.close(linger_seconds=5)
    assert next_delivery(bob).message == abort("last words")


# --- garbage ---------------------------------------------------------------------------------------


def valid_envelope(to: str = "bob") -> bytes:
    return encode(Envelope(NOBODY, to))


def packed(**fields: object) -> bytes:
    return msgspec.msgpack.encode(fields)


NOISE = random.Random(0).randbytes(10_000)
GARBAGE: dict[str, list[bytes]] = {
    "one empty frame": [b""],
    "one frame": [encode(abort("r1"))],
    "four frames": [valid_envelope(), encode(abort("r1")), b"", b""],
    "very many frames": [valid_envelope(), *[b"x"] * 1000],
    "random bytes": [NOISE[:50], NOISE[50:100]],
    "no envelope": [b"", encode(abort("r1"))],
    "a message as envelope": [encode(abort("r1")), encode(abort("r1"))],
    "another protocol version": [encode(Envelope(NOBODY, "bob", protocol=999)), encode(abort("r1"))],
    "another incarnation": [valid_envelope("bob's former life"), encode(abort("r1"))],
    "an empty message": [valid_envelope(), b""],
    "an unknown type": [valid_envelope(), packed(type="launch_missiles")],
    "no type": [valid_envelope(), packed(request_id="r1")],
    "a field of the wrong type": [valid_envelope(), packed(type="abort", request_id=7)],
    "a missing field": [valid_envelope(), packed(type="abort")],
    "an unknown field": [valid_envelope(), packed(type="abort", request_id="r1", extra=1)],
    "bytes after the end": [valid_envelope(), encode(abort("r1")) + b"x"],
    "a cut message": [valid_envelope(), encode(abort("r1"))[:-1]],
    "endless nesting": [valid_envelope(), b"\x82\xaarequest_id" + b"\x91" * 100_000],
    "a length that lies": [valid_envelope(), b"\xdf\xff\xff\xff\xff"],
    "a pickle": [valid_envelope(), b"cos\nsystem\n(S'false'\ntR."],
}


@pytest.mark.parametrize("frames", GARBAGE.values(), ids=GARBAGE.keys())
def test_what_is_no_message_is_counted_and_skipped(alice: Mailbox, bob: Mailbox, frames: list[bytes]) -> None:
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(bob.peer.address)
        stranger.send_multipart(frames)
        assert bob.poll_socket.poll(5000)
        assert (bob.receive(), bob.num_rejected) == (None, 1)
    alice.send(bob.peer, abort("r1"))
    assert next_delivery(bob).message == abort("r1")
    assert bob.num_rejected == 1


def spoken_by(stranger: Mailbox, bob: Mailbox, to: str) -> None:
    """The stranger says something in version 999."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.connect(bob.peer.address)
        dealer.send_multipart([encode(Envelope(stranger.peer, to, protocol=999)), b"of a later age"])
        assert bob.poll_socket.poll(5000)
        assert bob.receive() is None


def test_who_speaks_another_version_is_told_so_in_its_own(alice: Mailbox, bob: Mailbox) -> None:
    for to in ("", "bob"):
        spoken_by(alice, bob, to)
        assert bob.take_strangers() == {alice.peer: 999}
        assert bob.take_strangers() == {}
    bob.refuse(alice.peer, 999, "too late")
    assert alice.poll_socket.poll(5000)
    envelope, message = alice._read_frames()
    assert msgspec.msgpack.decode(envelope.bytes, type=Envelope) == Envelope(bob.peer, "alice", 999)
    assert decode(message.bytes) == Refused(reason="too late")


def test_strangers_that_mean_somebody_else_or_are_too_many_are_only_counted(
    alice: Mailbox, bob: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoken_by(alice, bob, "bob's former life")
    assert (bob.take_strangers(), bob.num_rejected) == ({}, 1)
    monkeypatch.setattr(mailbox_module, "MAX_STRANGERS", 0)
    spoken_by(alice, bob, "bob")
    assert (bob.take_strangers(), bob.num_rejected) == ({}, 2)


GREETING = b"\xff" + b"\0" * 8 + b"\x7f\x03\x00NULL" + b"\0" * 48
READY = b"\x04\x1c\x05READY\x0bSocket-Type\0\0\0\x06DEALER"
RAW = {
    "noise": NOISE,
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "nothing": b"",
    "a zmq greeting and then noise": GREETING + NOISE,
    "a zmq handshake and then noise": GREETING + READY + NOISE,
    "a zmq handshake and then a frame of 2^63 bytes": GREETING + READY + b"\x02\x7f" + b"\xff" * 7,
}


@pytest.mark.parametrize("noise", RAW.values(), ids=RAW.keys())
def test_a_stranger_on_the_port_disturbs_nobody(alice: Mailbox, bob: Mailbox, noise: bytes) -> None:
    with socket.create_connection((HOST, port_of(bob.peer)), timeout=5) as stranger:
        stranger.sendall(noise)
        alice.send(bob.peer, abort("r1"))
        assert next_delivery(bob).message == abort("r1")
    alice.send(bob.peer, abort("r2"))
    assert next_delivery(bob).message == abort("r2")


def test_a_frame_beyond_the_limit_costs_its_connection_which_is_made_again(
    alice: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mailbox_module, "MAX_FRAME_BYTES", 1000)
    with closing(opened("bob")) as bob:
        alice.send(bob.peer, abort("too long"), bytes(2000))
        for _ in range(50):
            alice.send(bob.peer, abort("r1"))
            if bob.poll_socket.poll(100):
                break
        assert next_delivery(bob).message == abort("r1")


# --- in an event loop ------------------------------------------------------------------------------


@pytest.fixture
async def router() -> AsyncIterator[AsyncMailbox]:
    with closing(AsyncMailbox(HOST, 0, Incarnation("router"))) as mailbox:
        yield mailbox


async def test_the_router_awaits_what_workers_send(alice: Mailbox, router: AsyncMailbox) -> None:
    waiting = asyncio.create_task(router.receive())
    await asyncio.sleep(0.01)
    assert not waiting.done()
    alice.send(router.peer, abort("r1"))
    first = await asyncio.wait_for(waiting, 5)
    assert first == Delivery(alice.peer, abort("r1"))
    router.send(first.sender, abort("answer"))
    assert next_delivery(alice) == Delivery(router.peer, abort("answer"))
    alice.send(router.peer, abort("r2"), b"bulk")
    second = await asyncio.wait_for(router.receive(), 5)
    assert (second.message, content(second)) == (abort("r2"), b"bulk")


async def test_a_wait_that_is_cancelled_loses_no_message(alice: Mailbox, router: AsyncMailbox) -> None:
    seen: list[Message] = []
    for number in range(20):
        waiting = asyncio.create_task(router.receive())
        await asyncio.sleep(0)
        alice.send(router.peer, abort(str(number)))
        waiting.cancel()
        await asyncio.wait([waiting])
        if not waiting.cancelled():
            seen.append(waiting.result().message)
    while len(seen) < 20:
        seen.append((await asyncio.wait_for(router.receive(), 5)).message)
    assert seen == [abort(str(number)) for number in range(20)]


async def test_a_flood_of_messages_leaves_the_event_loop_its_turns(alice: Mailbox, router: AsyncMailbox) -> None:
    turns = 0

    async def count_turns() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    for _ in range(1000):
        alice.send(router.peer, abort("r"))
    await asyncio.sleep(0.2)
    counting = asyncio.create_task(count_turns())
    for _ in range(1000):
        await router.receive()
    counting.cancel()
    assert turns >= 1000 // (mailbox_module.MAX_DELIVERIES_A_TURN + 1)  # the turn itself brings one more


async def test_the_awaiting_router_skips_what_is_not_for_it(router: AsyncMailbox) -> None:
    waiting = asyncio.create_task(router.receive())
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(router.peer.address)
        for to in ("another", "router"):
            stranger.send_multipart([valid_envelope(to), encode(abort(to))])
        assert await asyncio.wait_for(waiting, 5) == Delivery(NOBODY, abort("router"))
    assert router.num_rejected == 1
