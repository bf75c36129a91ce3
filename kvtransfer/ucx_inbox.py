"""Where UCX brings pieces of KV: a header that nobody waits for, then its bytes into a buffer of a ring.

Header and bytes are handed on together, so that the lease is checked when the bytes are there, and only then are they
brought to their blocks.

The two endpoints of a connection live and die together, and UCX does not tell one that the other was closed. So a
connection that was ended here is refused from then on, and its sender, whose bytes nobody fetches, makes another. What
ends it is a header whose bytes do not come, a failure, a sender said to be dead, and its next connection.
"""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.messages import MalformedMessage, Message, Peer, ProbeSent, Push
from ..core.part import Delivery, Payload
from ..core.wire_format import decode
from .pool_bytes import Mark, PoolBytes, PoolMemory
from .staging_ring import StagingRing
from .ucx_port import Endpoint, Pending, Port, UcxFailed

HEADER_TAG = 1
DATA_TAG = 2
KIND_BITS = 16
"""The low bits of a tag say what it is; the others of a data tag are its piece's own."""
AWAKE_SECONDS = 0.002
"""After a move of UCX the next one is looked for; the largest piece takes a third of this over NVLink."""
HEADER_MASK = (1 << KIND_BITS) - 1


class Header(msgspec.Struct, frozen=True):
    """What goes before the bytes of one piece. ``reply`` is the sender's UCX address, ``message`` as on a mailbox.

    ``connection`` counts the sender's: with a higher number all earlier ones are over.
    """

    sender: Peer
    to: str
    reply: str
    connection: int
    tag: int
    num_bytes: int
    message: bytes


@dataclass(slots=True, eq=False)
class _Piece:
    """Announced; ``pending`` once its bytes are being received, by ``deadline``, into the beginning of ``buffer``."""

    header: Header
    message: Message
    buffer: Payload | None = None
    pending: Pending | None = None
    deadline: float = inf


class UcxInbox:
    """``on_progress`` is called whenever UCX may have moved something; ``me`` is this worker's incarnation.

    ``is_moving`` says, after `receive`, that the loop must look here again soon: the port is not armed while landed
    bytes are being copied out of buffers, which UCX knows nothing of, nor when bytes of a GPU have just moved. To arm
    UCX then puts a callback into each stream on which it copies, and the next copy waits for that.
    """

    def __init__(
        self,
        port: Port,
        pool: PoolMemory,
        me: Peer,
        receive_seconds: float,
        on_progress: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.poll_socket = port.poll_socket
        self.num_rejected = 0
        """Headers that were malformed or meant for another incarnation."""
        self._port = port
        self._pool = pool
        self._me = me
        self._receive_seconds = receive_seconds
        self._on_progress = on_progress
        self._clock = clock
        self._endpoints: dict[Peer, Endpoint] = {}
        self._ring = StagingRing(pool)
        self._welcome: dict[Peer, int] = {}
        self._headers: list[tuple[Pending, NDArray[np.uint8]]] = []
        self._pieces: deque[_Piece] = deque()
        self._cancelled: list[_Piece] = []
        self._lent: Payload | None = None
        self.is_moving = False
        self._awake_seconds = 0.0 if isinstance(pool, PoolBytes) else AWAKE_SECONDS
        self._landing: deque[tuple[Mark, Payload]] = deque()

    def receive(self) -> Delivery | None:
        """The next piece. ``None``: none is whole, and the port is armed, unless ``is_moving``.

        Its payload is good for what is launched on the pool until the next call: only when the pool's copies until then
        have run is the buffer used again.
        """
        if self._lent is not None:
            self._landing.append((self._pool.mark(), self._lent))
            self._lent = None
        self._port.progress()
        self._on_progress()
        self._take_back()
        self._take_headers()
        self._begin_receiving()
        delivery = self._next_whole()
        if delivery is None:
            has_just_moved = time.monotonic() < self._port.moved_at + self._awake_seconds
            self.is_moving = has_just_moved or bool(self._landing)
            if not self.is_moving:
                self._port.arm()
        return delivery

    def forget(self, peer: Peer) -> None:
        """What is under way from it ends without result, and its connection is refused; a later one is welcome."""
        if peer in self._welcome:
            self._welcome[peer] += 1
        endpoint = self._endpoints.pop(peer, None)
        if endpoint is not None:
            endpoint.close()
        for piece in [piece for piece in self._pieces if piece.header.sender == peer]:
            self._end(piece)

    def close(self) -> None:
        for peer in list(self._endpoints):
            self.forget(peer)

    def _take_headers(self) -> None:
        while (found := self._port.next_message(HEADER_TAG, HEADER_MASK)) is not None:
            self._headers.append(found)
        headers, self._headers = self._headers, []
        for pending, data in headers:
            if not pending.is_done:  # that of a dead peer may never be
                self._headers.append((pending, data))
                continue
            try:
                pending.check()
                self._announced(msgspec.msgpack.decode(data.data, type=Header))
            except (UcxFailed, msgspec.MsgspecError, MalformedMessage):
                self.num_rejected += 1

    def _announced(self, header: Header) -> None:
        """Raises `MalformedMessage`."""
        message = decode(header.message)
        if not isinstance(message, Push | ProbeSent):
            raise MalformedMessage(f"{type(message).__name__} comes with no bytes")
        if header.to != self._me.incarnation:
            raise MalformedMessage(f"for incarnation {header.to}, this is {self._me.incarnation}")
        if not 0 < header.num_bytes <= self._pool.staging_bytes or header.tag & HEADER_MASK != DATA_TAG:
            raise MalformedMessage(f"a piece of {header.num_bytes} bytes, the most is {self._pool.staging_bytes}")
        welcome = self._welcome.get(header.sender, header.connection)
        if header.connection < welcome:
            raise MalformedMessage("this connection has ended")
        if header.connection > welcome:
            self.forget(header.sender)
        self._welcome[header.sender] = header.connection
        self._pieces.append(_Piece(header, message))

    def _begin_receiving(self) -> None:
        """Give announced pieces buffers, first come, first served; the others' bytes wait at their sender."""
        for sender in [sender for sender, endpoint in self._endpoints.items() if not endpoint.is_alive]:
            self.forget(sender)
        for piece in [piece for piece in self._pieces if piece.pending is None]:
            if not self._ring.num_free:
                return
            piece.buffer = self._ring.take()
            piece.deadline = self._clock() + self._receive_seconds
            try:
                endpoint = self._endpoint_to(piece.header)
                piece.pending = endpoint.receive(piece.buffer[: piece.header.num_bytes], piece.header.tag)
            except UcxFailed:
                self.num_rejected += 1
                self._end(piece)

    def _endpoint_to(self, header: Header) -> Endpoint:
        """Raises `UcxFailed`."""
        endpoint = self._endpoints.get(header.sender)
        if endpoint is None:
            endpoint = self._endpoints[header.sender] = self._port.connect(header.reply)
        return endpoint

    def _next_whole(self) -> Delivery | None:
        for piece in list(self._pieces):
            if piece not in self._pieces:
                continue  # it has ended with one before it
            if piece.pending is not None and piece.pending.is_done:
                try:
                    piece.pending.check()
                except UcxFailed:
                    self._end(piece)
                    continue
                self._pieces.remove(piece)
                assert piece.buffer is not None, "what is received has a buffer"
                self._lent = piece.buffer
                self._pool.is_beside_link = bool(self._pieces)
                return Delivery(piece.header.sender, piece.message, piece.buffer[: piece.header.num_bytes])
            if self._clock() > piece.deadline:
                self.forget(piece.header.sender)
        return None

    def _end(self, piece: _Piece) -> None:
        if piece in self._pieces:
            self._pieces.remove(piece)
            self._cancelled.append(piece)
            self._take_back()

    def _take_back(self) -> None:
        """Buffers whose bytes have landed, and those of ended pieces once UCX can write nothing to them any more."""
        while self._landing and self._landing[0][0].is_passed:
            self._ring.give_back(self._landing.popleft()[1])
        cancelled, self._cancelled = self._cancelled, []
        for piece in cancelled:
            if piece.pending is not None and not piece.pending.is_done:
                self._cancelled.append(piece)
            elif piece.buffer is not None:
                self._ring.give_back(piece.buffer)
