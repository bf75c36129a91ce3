"""Transport between any two hosts by UCX: RDMA, NVLink, shared memory or TCP, whatever UCX finds.

A push is packed piece by piece into a ring of staging buffers, which UCX registers once. Each piece goes out as two
tagged messages: a header and the bytes (ucx_inbox.py).
"""

import logging
import secrets
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
import numpy as np

from ..core.messages import Peer, ProbeSent, Push, TransportCard
from ..core.part import Payload, TransferFailed
from ..core.wire_format import encode
from .pieces import PackingPieces, StagedAddress, split_push
from .pool_bytes import PoolBytes, PoolMemory
from .staging_ring import StagingRing
from .transport import BlockCopy, NotReachable
from .ucx_inbox import DATA_TAG, HEADER_TAG, KIND_BITS, NUM_BUFFERS, Header, UcxInbox
from .ucx_lanes import Surroundings, active_rdma_ports, advice
from .ucx_port import Endpoint, Pending, Port, UcxFailed

_log = logging.getLogger("crossdock.ucx")

TAG_BITS = 64 - KIND_BITS


@dataclass(frozen=True, slots=True)
class _Connection:
    """To one peer; a later one has a higher number, by which the peer knows that this one is over."""

    number: int
    endpoint: Endpoint


@dataclass(slots=True, eq=False)
class _Sent:
    """A piece on its way over ``connection``, its header and its bytes, that is to be gone by ``deadline``."""

    to: Peer
    connection: _Connection
    deadline: float
    buffer: Payload
    pendings: tuple[Pending, Pending]

    @property
    def is_done(self) -> bool:
        return all(pending.is_done for pending in self.pendings)


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
        self._ring = StagingRing(pool, NUM_BUFFERS)
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

    def push(self, to: Peer, header: Push | ProbeSent, copy: BlockCopy) -> PackingPieces:
        if not self._is_open(to):
            raise TransferFailed("UCX has no way to the peer")
        max_blocks = self._pool.staging_blocks(copy.layers, self._addresses[to].staging_bytes)
        packing = PackingPieces(to, split_push(header, copy, max_blocks), self._progress)
        self._packing.append(packing)
        self._pump()
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
            packing.pieces.clear()
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
        for sent in [sent for sent in self._sent if sent.is_done]:
            self._sent.remove(sent)
            self._ring.give_back(sent.buffer)
            is_open = self._connections.get(sent.to) is sent.connection and sent.connection.endpoint.is_alive
            if is_open and sent.to not in self._warnings:
                self._note_lanes(sent.to)
        while self._packing and self._ring.num_free:
            packing = self._packing[0]
            if packing.pieces and self._is_open(packing.to):
                self._send(packing.to, *packing.pieces.popleft())
            else:
                packing.pieces.clear()
                self._packing.popleft()

    def _send(self, to: Peer, message: Push | ProbeSent, copy: BlockCopy) -> None:
        """Pieces of which one is lost never become a whole transfer, which its lease then ends."""
        buffer = self._ring.take()
        num_bytes = self._pool.pack(copy.sources, copy.layers, buffer)
        self._next_tag = (self._next_tag + 1) % (1 << TAG_BITS)
        tag = self._next_tag << KIND_BITS | DATA_TAG
        connection = self._connections[to]
        header = Header(
            sender=self._me,
            to=to.incarnation,
            reply=self._port.address,
            connection=connection.number,
            tag=tag,
            num_bytes=num_bytes,
            message=encode(message),
        )
        announced = np.frombuffer(msgspec.msgpack.encode(header), np.uint8)
        endpoint = connection.endpoint
        try:
            pendings = endpoint.send(announced, HEADER_TAG), endpoint.send(buffer[:num_bytes], tag)
        except UcxFailed:
            self._ring.give_back(buffer)
            return
        self._sent.append(_Sent(to, connection, self._clock() + self._patience_seconds, buffer, pendings))


def _host(peer: Peer) -> str:
    """Where it listens: equal for two processes of one host, or at least of one network namespace."""
    return peer.address.rpartition(":")[0]
