"""Transport between processes of one host: the decode pool is shared memory, and prefill copies into it.

The memory has no name in any file system (``memfd_create(2)``), so nothing is left behind however a process ends.
A peer opens it as ``/proc/<pid>/fd/<fd>``. Process ids are reused, so a random token is part of the memory's
name, which Linux shows as the target of that link, and the host is told apart by its boot id and the pid namespace.
"""

import mmap
import os
import secrets
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import msgspec

from ..core.messages import Peer, ProbeSent, Push, TransportCard
from ..core.part import TransferFailed
from .plan import merge_runs
from .pool_bytes import Bytes, PoolBytes, view_pool
from .transport import BlockCopy, NotReachable


class ShmAddress(msgspec.Struct, frozen=True):
    """Where a pool lies; travels as JSON."""

    host: str
    pid: int
    fd: int
    num_bytes: int
    token: str

    @property
    def memory_name(self) -> str:
        return f"crossdock-{self.token}"


@cache
def host_identity() -> str:
    """Equal for two processes exactly if a pid means the same process to both."""
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id}/{os.stat('/proc/self/ns/pid').st_ino}"


@dataclass(slots=True)
class SharedPool:
    """Memory that other processes of this host can map by ``address``; zero at first, pages come when touched."""

    memory: memoryview
    address: str
    _map: mmap.mmap
    _fd: int

    def close(self) -> None:
        """Give the memory back. Whoever uses it here must have let go of it before; peers keep what they mapped."""
        self.memory.release()
        self._map.close()
        os.close(self._fd)


def allocate_shared(num_bytes: int) -> SharedPool:
    token = secrets.token_hex(16)
    fd = os.memfd_create(f"crossdock-{token}")
    os.ftruncate(fd, num_bytes)
    mapped = mmap.mmap(fd, num_bytes)
    address = ShmAddress(host_identity(), os.getpid(), fd, num_bytes, token)
    return SharedPool(memoryview(mapped), msgspec.json.encode(address).decode(), mapped, fd)


def map_shared(address: str) -> mmap.mmap:
    """The memory of another process, or of this one. Raises `NotReachable`."""
    try:
        there = msgspec.json.decode(address, type=ShmAddress)
    except msgspec.MsgspecError as error:
        raise NotReachable(f"no shared memory address: {error}") from None
    if there.host != host_identity():
        raise NotReachable("the peer is on another host or in another pid namespace")
    try:
        fd = os.open(f"/proc/{there.pid}/fd/{there.fd}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise NotReachable(f"the peer's memory can't be opened: {error}") from None
    try:
        return _map_checked(fd, there)
    finally:
        os.close(fd)


def _map_checked(fd: int, there: ShmAddress) -> mmap.mmap:
    if not os.readlink(f"/proc/self/fd/{fd}").startswith(f"/memfd:{there.memory_name} "):
        raise NotReachable("another process has the peer's pid now")
    if os.fstat(fd).st_size != there.num_bytes:
        raise NotReachable("the peer's memory has another size than it says")
    return mmap.mmap(fd, there.num_bytes)


class ShmTransport:
    """Copies on the calling thread."""

    inbox = None
    is_moving = False

    def __init__(self, pool: PoolBytes, shared: SharedPool) -> None:
        self.card = TransportCard("shm", shared.address)
        self._pool = pool
        self._peers: dict[Peer, Bytes] = {}

    def open(self, peer: Peer, card: TransportCard, num_blocks: int) -> None:
        if peer in self._peers:
            return
        memory = map_shared(card.address)
        if len(memory) < num_blocks * self._pool.layout.block_bytes:
            raise NotReachable("the peer's memory is smaller than its pool")
        self._peers[peer] = view_pool(memoryview(memory), num_blocks, self._pool.layout)

    def push(self, to: Peer, header: Push | ProbeSent, copy: BlockCopy) -> None:
        target = self._peers.get(to)
        if target is None:
            raise TransferFailed("the peer's memory is not mapped")
        if not all(0 <= block < len(target) for block in copy.destinations):
            raise TransferFailed("a destination lies outside the peer's pool")
        layers = slice(copy.layers.first, copy.layers.end)
        for run in merge_runs(copy.sources, copy.destinations):
            source = self._pool.array[run.source : run.source + run.num_blocks, layers]
            target[run.destination : run.destination + run.num_blocks, layers] = source

    def detail(self, peer: Peer) -> str:
        return ""

    def forget(self, peer: Peer) -> None:
        self._peers.pop(peer, None)

    def close(self) -> None:
        self._peers.clear()
