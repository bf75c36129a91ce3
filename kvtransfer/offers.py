"""Which transports reach a pool, by name: a worker makes those of them that it is allowed to offer its peers."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ..core.mailbox import Mailbox
from ..core.messages import Peer
from .nccl_library import NcclLibrary, NoNccl
from .pool_bytes import PoolBytes, PoolMemory
from .shm import SharedPool, ShmTransport
from .tcp import TcpTransport
from .transport import Transport

if TYPE_CHECKING:
    from .device_pool import DevicePool

_log = logging.getLogger("crossdock.links")

Offers = Mapping[str, Callable[[], Transport]]


@dataclass(frozen=True, slots=True)
class Owner:
    """The worker whose pool it is: ``host`` is where it listens, ``key`` its cluster's, ``wake`` ends its loop's sleep.

    ``wake`` may be called from any thread.
    """

    me: Peer
    host: str
    key: bytes
    lease_seconds: float
    wake: Callable[[], None]


def offers_of_host(pool: PoolBytes, shared: SharedPool, owner: Owner) -> Offers:
    """``pool`` lies in ``shared``."""
    return {"shm": lambda: ShmTransport(pool, shared), **_offers_of_any(pool, owner)}


def offers_of_gpu(pool: "DevicePool", owner: Owner) -> Offers:
    from .cuda_ipc import CudaIpcTransport  # triton, which only machines with a GPU have

    offers = {"cuda_ipc": lambda: CudaIpcTransport(pool), **_offers_of_any(pool, owner)}
    try:
        library = NcclLibrary()
    except NoNccl as error:
        _log.info("the transport nccl is not offered: %s", error)
        return offers
    return {"nccl": lambda: _nccl(library, pool, owner), **offers}


def _offers_of_any(pool: PoolMemory, owner: Owner) -> Offers:
    offers = {"tcp": lambda: TcpTransport(pool, Mailbox(owner.host, 0, owner.me.incarnation))}
    return {"ucx": lambda: _ucx(pool, owner), **offers} if find_spec("ucxx") else offers


def _nccl(library: NcclLibrary, pool: "DevicePool", owner: Owner) -> Transport:
    from .nccl_gpu import nccl_over  # torch

    mailbox = Mailbox(owner.host, 0, owner.me.incarnation)
    return nccl_over(library, pool, mailbox, owner.key, owner.lease_seconds, owner.wake)


def _ucx(pool: PoolMemory, owner: Owner) -> Transport:
    from .ucx import UcxTransport  # an extra

    return UcxTransport(pool, owner.me, owner.key, owner.lease_seconds)
