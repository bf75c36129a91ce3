"""Transport between GPUs of one host: listed blocks are copied straight into the decode pool, which is mapped here.

Nothing is staged, and nothing runs on the other GPU. The copy engines do it, or, with an older driver, a kernel.
"""

import logging
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.messages import Peer, ProbeSent, Push, TransportCard
from ..core.part import TransferFailed
from ..kernels.kv_copy import LINK, BlockSpan, CopyShape, copy_blocks, layer_span
from .cuda_memory import (
    HANDLE_BYTES,
    CudaError,
    copy_pieces,
    export_memory,
    has_batch_copies,
    map_memory,
    unmap_memory,
)
from .device_pool import DevicePool
from .pool_bytes import Mark
from .shm import host_identity
from .transport import BlockCopy, NotReachable

_log = logging.getLogger("crossdock.links")


class IpcAddress(msgspec.Struct, frozen=True):
    """Where a pool lies: ``offset`` bytes into the allocation of ``handle``; travels as JSON."""

    host: str
    handle: bytes
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Mapped:
    """A peer's pool, ``offset`` bytes behind ``base`` as this device addresses it."""

    base: int
    offset: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class CopyingBlocks:
    """`Copying`, done when the device has passed ``end``."""

    end: Mark
    wakes = False

    @property
    def is_done(self) -> bool:
        return self.end.is_passed

    def wait(self) -> None:
        self.end.synchronize()


class CudaIpcTransport:
    """Copies on the pool's stream: by the copy engines if ``shape`` is ``None``, else by a kernel spread like that."""

    inbox = None
    is_moving = False
    """Its copies tell by themselves whether one must look for their end."""

    def __init__(self, pool: DevicePool) -> None:
        self.shape: CopyShape | None = None if has_batch_copies() else LINK
        own = export_memory(pool.tensor)
        address = IpcAddress(host_identity(), own.handle, own.offset, pool.tensor.numel())
        self.card = TransportCard("cuda_ipc", msgspec.json.encode(address).decode())
        self._pool = pool
        self._peers: dict[Peer, Mapped] = {}

    def open(self, peer: Peer, card: TransportCard, num_blocks: int) -> None:
        if peer in self._peers:
            return
        there = _decode(card.address)
        if there.num_bytes < num_blocks * self._pool.layout.block_bytes:
            raise NotReachable("the peer's memory is smaller than its pool")
        try:
            base = map_memory(there.handle, self._pool.stream.device)
        except CudaError as error:
            raise NotReachable(f"the peer's GPU memory can't be mapped: {error}") from None
        self._peers[peer] = Mapped(base, there.offset, num_blocks)

    def push(self, to: Peer, header: Push | ProbeSent, copy: BlockCopy) -> CopyingBlocks:
        target = self._peers.get(to)
        if target is None:
            raise TransferFailed("the peer's memory is not mapped")
        destinations = np.array(copy.destinations, np.int64)
        if not 0 <= destinations.min() <= destinations.max() < target.num_blocks:
            raise TransferFailed("a destination lies outside the peer's pool")
        self._copy(target.base + target.offset, copy, destinations)
        return CopyingBlocks(self._pool.stream.mark())

    def _copy(self, there: int, copy: BlockCopy, destinations: NDArray[np.int64]) -> None:
        """``destinations`` are those of ``copy``."""
        pool, here = self._pool, self._pool.tensor.data_ptr()
        span = layer_span(pool.tensor, range(copy.layers.first, copy.layers.end))
        if self.shape is None:
            places = _places(here, np.array(copy.sources, np.int64), span), _places(there, destinations, span)
            copy_pieces(*places, span.size, pool.stream.handle)
            return
        with pool.stream.launching():
            of_sources, of_destinations = pool.block_lists(copy.sources, copy.destinations)
            copy_blocks(here, there, of_sources, of_destinations, span, self.shape)

    def detail(self, peer: Peer) -> str:
        return ""

    def forget(self, peer: Peer) -> None:
        if (target := self._peers.pop(peer, None)) is not None:
            self._pool.stream.mark().synchronize()
            try:
                unmap_memory(target.base, self._pool.stream.device)
            except CudaError as error:  # its owner may be gone; an address too many harms nobody
                _log.warning("the memory of %s stays mapped: %s", peer.address, error)

    def close(self) -> None:
        for peer in list(self._peers):
            self.forget(peer)


def _places(pool_start: int, blocks: NDArray[np.int64], span: BlockSpan) -> NDArray[np.int64]:
    """The address of the span of each block."""
    return blocks * span.stride + (pool_start + span.offset)


def _decode(address: str) -> IpcAddress:
    """Raises `NotReachable`."""
    try:
        there = msgspec.json.decode(address, type=IpcAddress)
    except msgspec.MsgspecError as error:
        raise NotReachable(f"no address of GPU memory: {error}") from None
    if len(there.handle) != HANDLE_BYTES:
        raise NotReachable("no handle of GPU memory")
    if there.host != host_identity():
        raise NotReachable("the peer is on another host or in another pid namespace")
    return there
