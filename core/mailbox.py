"""How messages cross a process border: ZeroMQ over TCP, frames ``[Envelope][message]``, and ``[payload]`` if any.

A mailbox receives on one ROUTER socket, which it binds and shows as ``peer``, and sends through one DEALER
socket a peer. Nothing waits: a message that can't be queued is dropped and counted, as if the network had
lost it. Per peer the order is kept. A mailbox belongs to one thread.

Up to `HIGH_WATER_MARK` messages queue for a peer that does not read, until it is forgotten; payloads among
them are bounded by the sender's pool, whose blocks stay pinned until the receiver has confirmed. A peer
that restarts at the same address is another `Peer` with a fresh DEALER; what was under way to its former
incarnation is refused because of the envelope.
"""

import asyncio
import errno
import socket
from dataclasses import dataclass

import zmq

from .messages import PROTOCOL_VERSION, Envelope, Incarnation, MalformedMessage, Message, OtherProtocol, Peer, Refused
from .part import Delivery
from .wire_format import decode, decode_envelope, encode

HIGH_WATER_MARK = 10_000
MAX_FRAME_BYTES = 1 << 30
"""ZeroMQ closes a connection that announces a longer frame."""
MAX_PEERS = 1000
"""Beyond, the DEALER opened first is closed (a context has 1023 sockets); a later message opens it again."""
MAX_STRANGERS = 64
"""So many that speak other versions of the protocol are remembered until somebody asks for them."""
MAX_DELIVERIES_A_TURN = 8
"""So many may be received before other tasks of the event loop get their turn."""

# plain ints: arithmetic on zmq's flag enums costs as much as the sending itself
_NOW, _NOW_AND_MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK) | int(zmq.SNDMORE)
_MAX_FRAMES = 4


@dataclass(frozen=True, slots=True)
class _Line:
    """The way to one peer; all messages on it carry the same envelope."""

    dealer: zmq.Socket[bytes]
    envelope: bytes


class _Endpoint:
    """What both mailboxes share: all but the way of waiting."""

    def __init__(self, host: str, port: int, incarnation: Incarnation) -> None:
        self._context = zmq.Context()
        self.poll_socket = _bound_router(self._context, host, port)
        """Readable when a message may be waiting."""
        address = self.poll_socket.getsockopt_string(zmq.LAST_ENDPOINT)
        self.peer = Peer(address, incarnation)
        self.num_rejected = 0
        """Messages that were malformed or meant for another incarnation."""
        self.num_dropped = 0
        """Messages that could not be sent: the peer's queue was full or its address is none."""
        self._lines: dict[Peer, _Line] = {}
        self._strangers: dict[Peer, int] = {}

    def send(self, to: Peer, message: Message, payload: bytes | bytearray | memoryview | None = None) -> None:
        """Queue one message, or drop it; never blocks.

        ``payload`` may be reused at once: it is copied, unless it is ``bytes``, which nobody can change.
        """
        self._send(self._lines.get(to) or self._open(to, PROTOCOL_VERSION), message, payload)

    def take_strangers(self) -> dict[Peer, int]:
        """Who has spoken to this incarnation in another version of the protocol since the last call, and in which."""
        strangers, self._strangers = self._strangers, {}
        return strangers

    def refuse(self, to: Peer, protocol: int, reason: str) -> None:
        """Tell one of `take_strangers`, in its version, that it will not be heard."""
        self._send(self._lines.get(to) or self._open(to, protocol), Refused(reason=reason), None)

    def _send(self, line: _Line | None, message: Message, payload: bytes | bytearray | memoryview | None) -> None:
        if line is None:
            self.num_dropped += 1
            return
        dealer = line.dealer
        try:
            # only the first frame can find the queue full; the message then counts as a whole
            dealer.send(line.envelope, _NOW_AND_MORE)
        except zmq.Again:
            self.num_dropped += 1
            return
        if payload is None:
            dealer.send(encode(message), _NOW)
        else:
            dealer.send(encode(message), _NOW_AND_MORE)
            dealer.send(payload, _NOW, copy=not isinstance(payload, bytes))

    def forget(self, peer: Peer) -> None:
        """Close the line to a peer and drop what is queued on it. Unknown peers are fine."""
        line = self._lines.pop(peer, None)
        if line is not None:
            line.dealer.close(linger=0)

    def close(self, linger_seconds: float = 0.0) -> None:
        """Close all sockets; queued messages have ``linger_seconds`` to leave."""
        self._context.destroy(linger=round(linger_seconds * 1000))

    def _open(self, to: Peer, protocol: int) -> _Line | None:
        """A line to a new peer; ``None`` if its address, which may come from the network, is none."""
        if len(self._lines) == MAX_PEERS:
            self.forget(next(iter(self._lines)))
        dealer = self._context.socket(zmq.DEALER)
        _set_options(dealer, is_ipv6="[" in to.address)
        try:
            dealer.connect(to.address if to.address.startswith("tcp://") else "")
        except zmq.ZMQError:
            dealer.close()
            return None
        line = _Line(dealer, encode(Envelope(self.peer, to.incarnation, protocol)))
        self._lines[to] = line
        return line

    def _receive_now(self) -> Delivery | None:
        """The next message for this incarnation; ``None`` if none waits."""
        while True:
            try:
                frames = self._read_frames()
            except zmq.Again:
                return None
            try:
                return self._opened(frames)
            except OtherProtocol as error:
                self.num_rejected += 1
                self._note_stranger(error.envelope)
            except MalformedMessage:
                self.num_rejected += 1

    def _read_frames(self) -> list[zmq.Frame]:
        """The frames of one message after the sender's routing id; raises `zmq.Again` when none waits."""
        router = self.poll_socket
        frame = router.recv(_NOW, copy=False)
        frames: list[zmq.Frame] = []
        while frame.more:
            frame = router.recv(_NOW, copy=False)
            if len(frames) < _MAX_FRAMES:
                frames.append(frame)
        return frames

    def _note_stranger(self, envelope: Envelope) -> None:
        if envelope.to in ("", self.peer.incarnation) and len(self._strangers) < MAX_STRANGERS:
            self._strangers[envelope.sender] = envelope.protocol

    def _opened(self, frames: list[zmq.Frame]) -> Delivery:
        if not 2 <= len(frames) <= 3:
            raise MalformedMessage(f"{len(frames)} frames")
        envelope = decode_envelope(frames[0].bytes)
        if envelope.to not in ("", self.peer.incarnation):
            raise MalformedMessage(f"for incarnation {envelope.to}, this is {self.peer.incarnation}")
        payload = frames[2].buffer if len(frames) == 3 else memoryview(b"")
        return Delivery(envelope.sender, decode(frames[1].bytes), payload)


class Mailbox(_Endpoint):
    """For a loop of its own, which polls ``poll_socket``.

    ``host`` is a name or an IPv4 or IPv6 address of this machine, ``port`` 0 lets the system choose.
    Raises ``OSError`` naming both when they can't be bound.
    """

    def receive(self) -> Delivery | None:
        """The next message, ``None`` if none waits. Malformed and misdirected ones are counted and skipped."""
        return self._receive_now()


class AsyncMailbox(_Endpoint):
    """The same for an event loop; sending stays synchronous.

    It waits on the ROUTER's file descriptor itself: unlike a socket of ``zmq.asyncio``, a cancelled
    `receive` can't lose a message, and messages that already wait cost no future.
    """

    _num_this_turn = 0

    async def receive(self) -> Delivery:
        """The next message. One task at a time; cancel it before `close`."""
        self._num_this_turn += 1
        if self._num_this_turn > MAX_DELIVERIES_A_TURN:
            self._num_this_turn = 0
            await asyncio.sleep(0)
        while (delivery := self._receive_now()) is None:
            self._num_this_turn = 0
            await self._readable()
        return delivery

    async def _readable(self) -> None:
        """Returns when the descriptor is readable; the caller must have seen that no message waits."""
        loop = asyncio.get_running_loop()
        ready: asyncio.Future[None] = loop.create_future()
        descriptor = self.poll_socket.fileno()
        loop.add_reader(descriptor, _settle, ready)
        try:
            await ready
        finally:
            loop.remove_reader(descriptor)


def _settle(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


def _bound_router(context: zmq.Context[zmq.Socket[bytes]], host: str, port: int) -> zmq.Socket[bytes]:
    router = context.socket(zmq.ROUTER)
    try:
        numeric = _numeric(host)
        _set_options(router, is_ipv6=":" in numeric)
        if port >> 16:
            raise zmq.ZMQError(errno.EINVAL, "ports end at 65535")
        router.bind(f"tcp://[{numeric}]:{port}" if ":" in numeric else f"tcp://{numeric}:{port}")
    except (zmq.ZMQError, socket.gaierror) as error:
        context.destroy(linger=0)
        raise OSError(error.errno or 0, f"can't listen on {host}:{port}: {error.strerror}") from None
    return router


def _numeric(host: str) -> str:
    """An address of ``host``, IPv4 if it has one; ZeroMQ binds to no names."""
    found = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)
    return str(min(found, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def _set_options(target: zmq.Socket[bytes], is_ipv6: bool) -> None:
    options = {
        zmq.LINGER: 0,
        zmq.SNDHWM: HIGH_WATER_MARK,
        zmq.RCVHWM: HIGH_WATER_MARK,
        zmq.MAXMSGSIZE: MAX_FRAME_BYTES,
        zmq.IPV6: int(is_ipv6),
        zmq.RECONNECT_IVL: 20,
        zmq.RECONNECT_IVL_MAX: 1000,
        zmq.CONNECT_TIMEOUT: 3000,
        # a peer whose host vanished without a word is noticed, and the connection made anew
        zmq.HEARTBEAT_IVL: 2000,
        zmq.HEARTBEAT_TIMEOUT: 6000,
    }
    for option, value in options.items():
        target.setsockopt(option, value)
