"""Transport between any two hosts by UCX: RDMA, NVLink, shared memory or TCP, whatever UCX finds.

A push is packed piece by piece into a ring of staging buffers, which UCX registers once. Each piece goes out as two
tagged messages: a header and the bytes (ucx_inbox.py). The header leaves while the device packs the bytes, and they
follow when it has: nothing here waits for the device, so that pieces are packed while others travel.
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from ..core.messages import Peer, ProbeSent, Push, TransportCard
from ..core.part import Payload, TransferFailed
from ..core.wire_format import encode
from .pieces import PackingPieces, StagedAddress
from .pool_bytes import PASSED, Mark, PoolBytes, PoolMemory
from .staging_ring import StagingRing
from .transport import BlockCopy, NotReachable
from .ucx_inbox import DATA_TAG, HEADER_TAG, KIND_BITS, Header, UcxInbox
from .ucx_lanes import Surroundings, active_rdma_ports, advice
from .ucx_port import Endpoint, Pending, Port, UcxFailed

_log = logging.getLogger("crossdock.ucx")

TAG_BITS = 64 - KIND_BITS
IDLE_SECONDS = 0.0002
"""So long, less than it takes to launch the next one, the first piece on an idle link is waited for."""


@dataclass(frozen=True, slots=True)
class _Connection:
    """To one peer; a later one has a higher number, by which the peer knows that this one is over."""

    number: int
    endpoint: Endpoint


@dataclass(slots=True, eq=False)
class _Sent:
    """A piece on its way over ``connection``, its header and its bytes, that is to be gone by ``deadline``.

    ``bytes_tag`` is that of the bytes until they have been given to UCX, which they are once ``packed`` is passed.
    """

    to: Peer
    connection: _Connection
    deadline: float
    buffer: Payload
    num_bytes: int
    bytes_tag: int | None
    packed: Mark = PASSED
    pendings: list[Pending] = field(default_factory=list)

    @property
    def is_done(self) -> bool:
        return self.bytes_tag is None and self.packed.is_passed and all(pending.is_done for pending in self.pendings)


class UcxTransport:
    """``me`` is this worker, ``key`` the cluster's.

    ``patience_seconds`` is how long the bytes of a header are waited for, and how long a peer may take to fetch them:
    UCX does not tell that the peer has closed its end of a connection.
    """

    def __init__(
        self,
        pool: PoolMemory,
        me: Peer,
        key: bytes,
        patience_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port = Port(key)
        self.card = TransportCard("ucx", str(StagedAddress(pool.staging_bytes, self._port.address)))
        self.inbox = UcxInbox(self._port, pool, me, patience_seconds, self._pump, clock)
        self._pool = pool
        self._me = me
        self._patience_seconds = patience_seconds
        self._clock = clock
        self._connections: dict[Peer, _Connection] = {}
        self._num_connections = 0
        self._addresses: dict[Peer, StagedAddress] = {}
        self._ring = StagingRing(pool)
        self._packing: deque[PackingPieces] = deque()
        self._warnings: dict[Peer, str] = {}
        self._sent: list[_Sent] = []
        self._next_tag = secrets.randbits(TAG_BITS)

    def open(self, peer: Peer, card: TransportCard, num_blocks: int) -> None:
        if peer in self._connections:
            return
        address = StagedAddress.parse(card.address, self._pool.layout.block_bytes)
        try:
            self._connect(peer, address.address)
        except UcxFailed as error:
            raise NotReachable(f"UCX: {error}") from None
        self._addresses[peer] = address

    def _connect(self, peer: Peer, address: str) -> None:
        """Raises `UcxFailed`."""
        self._num_connections += 1
        self._connections[peer] = _Connection(self._num_connections, self._port.connect(address))

    @property
    def is_moving(self) -> bool:
        return self.inbox.is_moving or any(sent.bytes_tag is not None for sent in self._sent)

    def push(self, to: Peer, header: Push | ProbeSent, copy: BlockCopy) -> PackingPieces:
        if not self._is_open(to):
            raise TransferFailed("UCX has no way to the peer")
        max_blocks = self._pool.staging_blocks(copy.layers, self._addresses[to].staging_bytes)
        span_bytes, is_end = self._pool.span_bytes(copy.layers), copy.layers.end == self._pool.all_layers.end
        packing = PackingPieces(to, header, copy, max_blocks, span_bytes, is_end, self._progress)
        self._packing.append(packing)
        self._progress()
        return packing

    def _is_open(self, to: Peer) -> bool:
        """An endpoint that has failed, its host having been unreachable for a while, is made anew."""
        connection = self._connections.get(to)
        if connection is None or connection.endpoint.is_alive:
            return connection is not None
        return self._reconnect(to, connection)

    def _reconnect(self, to: Peer, connection: _Connection) -> bool:
        """What was under way over the former connection ends without result."""
        connection.endpoint.close()
        try:
            self._connect(to, self._addresses[to].address)
        except UcxFailed:
            return False
        return True

    def detail(self, peer: Peer) -> str:
        """What UCX has chosen, and what is wrong with it."""
        lanes = ", ".join(self._connections[peer].endpoint.lanes())
        return "; ".join(filter(None, (lanes, self._warnings.get(peer))))

    def _note_lanes(self, peer: Peer) -> None:
        """Something has gone there, for the first time: UCX has made its choice."""
        lanes = self._connections[peer].endpoint.lanes()
        _log.info("UCX reaches %s over %s", peer.address, ", ".join(lanes))
        around = Surroundings(
            available=self._port.available_lanes,
            rdma_ports=active_rdma_ports(),
            is_one_host=_host(peer) == _host(self._me),
            is_gpu_memory=not isinstance(self._pool, PoolBytes),
        )
        self._warnings[peer] = advice(lanes, around)
        if self._warnings[peer]:
            _log.warning("%s: %s", peer.address, self._warnings[peer])

    def forget(self, peer: Peer) -> None:
        for packing in [packing for packing in self._packing if packing.to == peer]:
            packing.drop()
        self._pool.mark().synchronize()
        connection = self._connections.pop(peer, None)
        self._addresses.pop(peer, None)
        self._warnings.pop(peer, None)
        if connection is not None:
            connection.endpoint.close()
        self.inbox.forget(peer)
        self._pump()

    def close(self) -> None:
        for peer in list(self._connections):
            self.forget(peer)
        self.inbox.close()

    def _progress(self) -> None:
        self._port.progress()
        self._pump()

    def _pump(self) -> None:
        """Take back the buffers of pieces that have arrived or are given up, and pack into them what waits."""
        for sent in self._sent:
            if self._clock() > sent.deadline and self._connections.get(sent.to) is sent.connection:
                self._reconnect(sent.to, sent.connection)
        self._send_packed()
        for sent in [sent for sent in self._sent if sent.is_done]:
            self._sent.remove(sent)
            self._ring.give_back(sent.buffer)
            if self._is_usable(sent) and sent.to not in self._warnings:
                self._note_lanes(sent.to)
        while self._packing and self._ring.num_free:
            packing = self._packing[0]
            if packing.num_left and self._is_open(packing.to):
                self._pack(packing)
                self._send_packed()
            else:
                packing.drop()
                self._packing.popleft()

    def _is_usable(self, sent: _Sent) -> bool:
        """Its connection is still the one to that peer."""
        return self._connections.get(sent.to) is sent.connection and sent.connection.endpoint.is_alive

    def _pack(self, packing: PackingPieces) -> None:
        """Launch the copy of the next piece into a buffer, and announce it meanwhile: the peer begins to receive."""
        on_their_way = sum(sent.num_bytes for sent in self._sent)
        message, copy = packing.take(on_their_way, others_wait=len(self._packing) > 1)
        self._next_tag = (self._next_tag + 1) % (1 << TAG_BITS)
        sent = _Sent(
            to=packing.to,
            connection=self._connections[packing.to],
            deadline=self._clock() + self._patience_seconds,
            buffer=self._ring.take(),
            num_bytes=len(copy.sources) * packing.span_bytes,
            bytes_tag=self._next_tag << KIND_BITS | DATA_TAG,
        )
        self._pool.is_beside_link = on_their_way > 0
        self._pool.pack(copy.sources, copy.layers, sent.buffer)
        packing.packed = sent.packed = self._pool.mark()
        self._send_packed()
        self._announce(sent, message)
        self._sent.append(sent)
        if not on_their_way:
            end = time.monotonic() + IDLE_SECONDS
            while not sent.packed.is_passed and time.monotonic() < end:
                pass

    def _announce(self, sent: _Sent, message: Push | ProbeSent) -> None:
        assert sent.bytes_tag is not None, "the bytes come later"
        header = Header(
            sender=self._me,
            to=sent.to.incarnation,
            reply=self._port.address,
            connection=sent.connection.number,
            tag=sent.bytes_tag,
            num_bytes=sent.num_bytes,
            message=encode(message),
        )
        self._give(sent, np.frombuffer(msgspec.msgpack.encode(header), np.uint8), HEADER_TAG)

    def _send_packed(self) -> None:
        """The bytes of announced pieces, as soon as they are in their buffers."""
        for sent in self._sent:
            if sent.bytes_tag is not None and sent.packed.is_passed:
                tag, sent.bytes_tag = sent.bytes_tag, None
                self._give(sent, sent.buffer[: sent.num_bytes], tag)

    def _give(self, sent: _Sent, data: object, tag: int) -> None:
        """Pieces of which one is lost never become a whole transfer, which its lease then ends."""
        try:
            if self._is_usable(sent):
                sent.pendings.append(sent.connection.endpoint.send(data, tag))
        except UcxFailed:
            sent.bytes_tag = None


def _host(peer: Peer) -> str:
    """Where it listens: equal for two processes of one host, or at least of one network namespace."""
    return peer.address.rpartition(":")[0]
