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


@dataclass(slots=True, eq=False)
class _Sent:
    """A piece on its way: its header and its bytes."""

    to: Peer
    buffer: Payload
    pendings: tuple[Pending, Pending]

    @property
    def is_done(self) -> bool:
        return all(pending.is_done for pending in self.pendings)


class UcxTransport:
    """``me`` is this worker, ``key`` the cluster's. The bytes of a header are waited for ``receive_seconds``."""

    def __init__(
        self,
        pool: PoolMemory,
        me: Peer,
        key: bytes,
        receive_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port = Port(key)
        self.card = TransportCard("ucx", str(StagedAddress(pool.staging_bytes, self._port.address)))
        self.inbox = UcxInbox(self._port, pool, me, receive_seconds, self._pump, clock)
        self._pool = pool
        self._me = me
        self._endpoints: dict[Peer, Endpoint] = {}
        self._addresses: dict[Peer, StagedAddress] = {}
        self._ring = StagingRing(pool, NUM_BUFFERS)
        self._packing: deque[PackingPieces] = deque()
        self._warnings: dict[Peer, str] = {}
        self._sent: list[_Sent] = []
        self._next_tag = secrets.randbits(TAG_BITS)

    def open(self, peer: Peer, card: TransportCard, num_blocks: int) -> None:
        if peer in self._endpoints:
            return
        address = StagedAddress.parse(card.address, self._pool.layout.block_bytes)
        try:
            self._endpoints[peer] = self._port.connect(address.address)
        except UcxFailed as error:
            raise NotReachable(f"UCX: {error}") from None
        self._addresses[peer] = address

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
        endpoint = self._endpoints.get(to)
        if endpoint is None or endpoint.is_alive:
            return endpoint is not None
        endpoint.close()
        try:
            self._endpoints[to] = self._port.connect(self._addresses[to].address)
        except UcxFailed:
            return False
        return True

    def detail(self, peer: Peer) -> str:
        """What UCX has chosen, and what is wrong with it."""
        lanes = ", ".join(self._endpoints[peer].lanes())
        return "; ".join(filter(None, (lanes, self._warnings.get(peer))))

    def _note_lanes(self, peer: Peer) -> None:
        """Something has gone there, for the first time: UCX has made its choice."""
        lanes = self._endpoints[peer].lanes()
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
        endpoint = self._endpoints.pop(peer, None)
        self._addresses.pop(peer, None)
        self._warnings.pop(peer, None)
        if endpoint is not None:
            endpoint.close()
        self.inbox.forget(peer)
        self._pump()

    def close(self) -> None:
        for peer in list(self._endpoints):
            self.forget(peer)
        self.inbox.close()

    def _progress(self) -> None:
        self._port.progress()
        self._pump()

    def _pump(self) -> None:
        """Take back the buffers of pieces that have arrived, and pack into them what waits."""
        for sent in [sent for sent in self._sent if sent.is_done]:
            self._sent.remove(sent)
            self._ring.give_back(sent.buffer)
            if sent.to not in self._warnings and sent.to in self._endpoints and self._endpoints[sent.to].is_alive:
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
        header = Header(self._me, to.incarnation, self._port.address, tag, num_bytes, encode(message))
        announced = np.frombuffer(msgspec.msgpack.encode(header), np.uint8)
        endpoint = self._endpoints[to]
        try:
            pendings = endpoint.send(announced, HEADER_TAG), endpoint.send(buffer[:num_bytes], tag)
        except UcxFailed:
            self._ring.give_back(buffer)
            return
        self._sent.append(_Sent(to, buffer, pendings))


def _host(peer: Peer) -> str:
    """Where it listens: equal for two processes of one host, or at least of one network namespace."""
    return peer.address.rpartition(":")[0]
