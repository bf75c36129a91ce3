"""Stands between all processes of a fleet and does to their messages what networks do, and worse.

Every process knows the others by the addresses of this proxy alone: each worker reports to an address of the router
that is its own, and there the worker's `Hello` tells where it really listens; what others hear instead is the address
of its place here, which a worker that is started again in the same place keeps. So nothing in the processes is made for
tests. What travels beside ZeroMQ (KV over ``shm`` and ``ucx``) does not pass here, the messages about it do.
"""

import heapq
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random

import zmq
from msgspec.structs import replace

from crossdock.core.messages import (
    CacheEvents,
    Heartbeat,
    Hello,
    Incarnation,
    Message,
    Offer,
    Peer,
    Peers,
    Tokens,
    TransportCard,
    WorkerCard,
)
from crossdock.core.wire_format import decode, decode_envelope, encode

ROUTER = "router"
POLL_MILLISECONDS = 20
OFTEN = (Tokens, Heartbeat, CacheEvents)
"""Come many times a request or a second: a tenth of the chances is enough for them."""


@dataclass(frozen=True, slots=True)
class Weather:
    """The chance of each message to meet a fate; ``flipped`` and ``resized`` are for those that bring KV."""

    lost: float = 0.0
    late: float = 0.0
    swapped: float = 0.0
    twice: float = 0.0
    garbled: float = 0.0
    flipped: float = 0.0
    resized: float = 0.0
    latest_seconds: float = 3.0


CALM = Weather()


@dataclass(slots=True, eq=False)
class _Front:
    """An address for others, and what lies behind it; ``place`` is the worker's whose messages come or go there."""

    place: str
    socket: zmq.Socket[bytes]
    address: str
    is_router: bool = False
    back: zmq.Socket[bytes] | None = None
    real: str = ""


@dataclass(slots=True, eq=False)
class _Place:
    """A worker's: how it sees the router, and how others see its two mailboxes."""

    router: _Front
    control: _Front
    bulk: _Front


@dataclass(order=True, slots=True)
class _Due:
    """A message that leaves later."""

    at: float
    number: int
    front: _Front = field(compare=False)
    frames: list[bytes] = field(compare=False)


class Meddler:
    """A thread that serves ``places`` for workers of the router at ``router_address`` until `stop`.

    ``weather`` and ``cuts`` may be changed at any time. A cut ``(a, b)`` of places, one of which may be `ROUTER`, loses
    all that goes from a to b. ``fates`` counts what befell which message.
    """

    def __init__(self, router_address: str, places: Iterable[str], seed: int) -> None:
        self.weather = CALM
        self.cuts: frozenset[tuple[str, str]] = frozenset()
        self.fates: Counter[tuple[str, str]] = Counter()
        self._random = Random(seed)
        self._context = zmq.Context()
        self._poller = zmq.Poller()
        self._fronts: dict[zmq.Socket[bytes], _Front] = {}
        self._places = {name: self._new_place(name, router_address) for name in places}
        self._place_of: dict[Incarnation, str] = {}
        self._due: list[_Due] = []
        self._num_put_off = 0
        self._is_over = False
        self._thread = ThreadPoolExecutor(1)
        self._running = self._thread.submit(self._run)

    def router_address(self, place: str) -> str:
        """What the worker of this place is told to report to."""
        return self._places[place].router.address

    def stop(self) -> None:
        """Raises what ended the thread before."""
        self._is_over = True
        self._thread.shutdown()
        self._context.destroy(linger=0)
        self._running.result()

    # --- sockets -------------------------------------------------------------------------------

    def _new_place(self, name: str, router_address: str) -> _Place:
        router, control, bulk = (self._new_front(name) for _ in range(3))
        router.is_router = True
        self._connect(router, router_address)
        return _Place(router, control, bulk)

    def _new_front(self, place: str) -> _Front:
        socket = self._context.socket(zmq.ROUTER)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.bind("tcp://127.0.0.1:0")
        self._poller.register(socket, zmq.POLLIN)
        front = self._fronts[socket] = _Front(place, socket, socket.getsockopt_string(zmq.LAST_ENDPOINT))
        return front

    def _connect(self, front: _Front, real: str) -> None:
        """What comes to the front goes on to this address; what waited for another is lost."""
        if front.real == real:
            return
        if front.back is not None:
            front.back.close(linger=0)
        front.real = real
        front.back = self._context.socket(zmq.DEALER)
        front.back.setsockopt(zmq.RECONNECT_IVL, 20)
        front.back.setsockopt(zmq.RECONNECT_IVL_MAX, 200)
        front.back.connect(real)

    def _run(self) -> None:
        while not self._is_over:
            for socket, _ in self._poller.poll(1 if self._due else POLL_MILLISECONDS):
                self._drain(self._fronts[socket])
            now = time.monotonic()
            while self._due and self._due[0].at <= now:
                due = heapq.heappop(self._due)
                self._send(due.front, due.frames)

    def _drain(self, front: _Front) -> None:
        for _ in range(100):
            try:
                _, *frames = front.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._pass_on(front, frames)

    def _send(self, front: _Front, frames: list[bytes]) -> None:
        if front.back is not None:
            try:
                front.back.send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                self.fates["dropped", "any"] += 1

    # --- messages ------------------------------------------------------------------------------

    def _pass_on(self, front: _Front, frames: list[bytes]) -> None:
        envelope, message = decode_envelope(frames[0]), decode(frames[1])
        if front.is_router and isinstance(message, Hello):
            self._place_of[envelope.sender.incarnation] = front.place
            message = replace(message, card=self._met(front.place, envelope.sender, message.card))
        source = self._place_of.get(envelope.sender.incarnation, ROUTER)
        target = ROUTER if front.is_router else front.place
        shown = self._as_seen(envelope.sender, source, target)
        rewritten = [encode(replace(envelope, sender=shown)), encode(self._rewritten(message, target)), *frames[2:]]
        if (source, target) in self.cuts:
            self.fates["cut", type(message).__name__] += 1
        else:
            self._meddle(front, message, rewritten)

    def _met(self, place: str, real: Peer, card: WorkerCard) -> WorkerCard:
        """A worker introduces itself, maybe again: whoever was in its place before is gone."""
        own = self._places[place]
        self._connect(own.control, real.address)
        for transport in card.transports:
            if transport.name == "tcp":
                self._connect(own.bulk, transport.address)
        shown = TransportCard("tcp", own.bulk.address)
        return replace(card, transports=tuple(shown if each.name == "tcp" else each for each in card.transports))

    def _as_seen(self, peer: Peer, source: str, target: str) -> Peer:
        if source == ROUTER:
            return Peer(self._places[target].router.address, peer.incarnation)
        return Peer(self._places[source].control.address, peer.incarnation)

    def _rewritten(self, message: Message, target: str) -> Message:
        """Peers inside messages, as the receiver knows them: itself by its own address, the router by that for it."""
        if isinstance(message, Offer):
            return replace(message, router=self._as_seen(message.router, ROUTER, target))
        if isinstance(message, Peers):
            own = self._places[target].control
            workers = [
                replace(info, peer=Peer(own.real, info.peer.incarnation)) if info.peer.address == own.address else info
                for info in message.workers
            ]
            return replace(message, workers=workers)
        return message

    def _meddle(self, front: _Front, message: Message, frames: list[bytes]) -> None:
        """At most one fate a message."""
        weather, random, name = self.weather, self._random, type(message).__name__
        scale = 0.1 if isinstance(message, OFTEN) else 1.0
        fate = next((fate for fate in _FATES if random.random() < scale * getattr(weather, fate)), None)
        has_kv = len(frames) > 2
        if fate is None or (fate in ("flipped", "resized") and not has_kv):
            self._send(front, frames)
            return
        self.fates[fate, name] += 1
        match fate:
            case "late":
                self._put_off(front, frames, weather.latest_seconds)
            case "swapped":
                self._put_off(front, frames, 0.05)
            case "twice":
                self._send(front, frames)
                self._put_off(front, frames, weather.latest_seconds)
            case "garbled":
                self._send(front, [frames[0], _garbled(frames[1], random), *frames[2:]])
            case "flipped":
                self._send(front, [*frames[:2], _flipped(frames[2], random)])
            case "resized":
                self._send(front, [*frames[:2], _resized(frames[2], random)])

    def _put_off(self, front: _Front, frames: list[bytes], at_most: float) -> None:
        self._num_put_off += 1
        at = time.monotonic() + self._random.uniform(0, at_most)
        heapq.heappush(self._due, _Due(at, self._num_put_off, front, frames))


_FATES = ("lost", "late", "swapped", "twice", "garbled", "flipped", "resized")


def _garbled(message: bytes, random: Random) -> bytes:
    """Noise, or what is left when the end is missing; never a message."""
    return random.randbytes(len(message)) if random.random() < 0.5 else message[: random.randrange(len(message))]


def _flipped(payload: bytes, random: Random) -> bytes:
    """One bit is another."""
    changed = bytearray(payload)
    changed[random.randrange(len(changed))] ^= 1 << random.randrange(8)
    return bytes(changed)


def _resized(payload: bytes, random: Random) -> bytes:
    """Some bytes fewer or more."""
    num_bytes = random.randint(1, len(payload))
    return payload[:-num_bytes] if random.random() < 0.5 else payload + random.randbytes(num_bytes)
