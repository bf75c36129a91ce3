"""NCCL by its C interface, as far as channels need it: the copy that torch has loaded, or another one.

``nccl.h`` and https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/api.html. Communicators are non-blocking: a
call may return ``ncclInProgress``, and until ``ncclCommGetAsyncError`` says something else no other call but the abort
may follow, nor is anything on the stream that the call will bring there.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from ctypes import (
    CDLL,
    POINTER,
    Structure,
    byref,
    c_char_p,
    c_int,
    c_size_t,
    c_ubyte,
    c_uint,
    c_void_p,
    sizeof,
)
from dataclasses import dataclass
from typing import Protocol

from ..core.part import Payload
from .nccl_channel import CommunicatorFailed, Rank, Work
from .pool_bytes import Mark as CopyMark

LIBRARY = "libnccl.so.2"
OLDEST = 21900
"""Before 2.19 an abort could hang."""
UNIQUE_ID_BYTES = 128
NUM_CTAS = 32
"""Thread blocks of a communicator; a GPU has room for 132 or so. Between H200s 16 carried 225 GB/s, these 290."""

SUCCESS, IN_PROGRESS = 0, 7
UINT8 = 1
CONFIG_MAGIC = 0xCAFEBEEF
CONFIG_VERSION = 21800
UNDEFINED = -(1 << 31)


class NoNccl(Exception):
    """Why there is no usable library."""


class _UniqueId(Structure):
    """``ncclUniqueId``, which is passed by value."""

    _fields_ = (("internal", c_ubyte * UNIQUE_ID_BYTES),)


class _Config(Structure):
    """``ncclConfig_t`` as 2.18 had it; later versions have more fields and take this one for their defaults."""

    _fields_ = (
        ("size", c_size_t),
        ("magic", c_uint),
        ("version", c_uint),
        ("blocking", c_int),
        ("cga_cluster_size", c_int),
        ("min_ctas", c_int),
        ("max_ctas", c_int),
        ("net_name", c_char_p),
        ("split_share", c_int),
    )


class Mark(Protocol):
    """A point in a stream."""

    @property
    def is_passed(self) -> bool:
        """Raises `CommunicatorFailed` for what the device says."""


class Stream(Protocol):
    """A stream of one device, for one communicator."""

    @property
    def handle(self) -> int:
        """``cudaStream_t``."""

    def on_device(self) -> AbstractContextManager[object]:
        """The device is the thread's current one inside."""

    def mark(self) -> Mark: ...

    def wait(self, mark: CopyMark) -> None:
        """Have what is launched here from now on run behind ``mark``; does not wait for it itself."""

    def address_of(self, buffer: Payload) -> int: ...


class NcclLibrary:
    """Raises `NoNccl`."""

    def __init__(self, path: str = LIBRARY) -> None:
        try:
            self._library = library = CDLL(path)
        except OSError as error:
            raise NoNccl(f"NCCL can't be loaded: {error}") from None
        library.ncclGetErrorString.restype = c_char_p
        library.ncclCommInitRankConfig.argtypes = [POINTER(c_void_p), c_int, _UniqueId, c_int, POINTER(_Config)]
        for name in ("ncclSend", "ncclRecv"):
            getattr(library, name).argtypes = [c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p]
        library.ncclCommGetAsyncError.argtypes = [c_void_p, POINTER(c_int)]
        library.ncclCommAbort.argtypes = [c_void_p]
        version = c_int()
        library.ncclGetVersion(byref(version))
        self.version = version.value
        if self.version < OLDEST:
            raise NoNccl(f"NCCL {self.name} is too old, {_dotted(OLDEST)} would do")

    @property
    def name(self) -> str:
        return f"NCCL {_dotted(self.version)}"

    def unique_id(self) -> bytes:
        """Raises `CommunicatorFailed`, like all that follow."""
        made = _UniqueId()
        self._check(self._library.ncclGetUniqueId(byref(made)))
        return bytes(made.internal)

    def begin_joining(self, unique_id: bytes, rank: Rank) -> int:
        """``ncclComm_t``, of two ranks, for the current device."""
        if len(unique_id) != UNIQUE_ID_BYTES:
            raise CommunicatorFailed(f"an id has {UNIQUE_ID_BYTES} bytes, not {len(unique_id)}")
        config = _Config(
            sizeof(_Config), CONFIG_MAGIC, CONFIG_VERSION, 0, UNDEFINED, NUM_CTAS, NUM_CTAS, None, UNDEFINED
        )
        communicator = c_void_p()
        there = _UniqueId((c_ubyte * UNIQUE_ID_BYTES).from_buffer_copy(unique_id))
        self._check(self._library.ncclCommInitRankConfig(byref(communicator), len(Rank), there, rank, byref(config)))
        assert communicator.value is not None, "what was begun can be asked for"
        return communicator.value

    def is_in_progress(self, communicator: int) -> bool:
        state = c_int()
        self._check(self._library.ncclCommGetAsyncError(communicator, byref(state)))
        self._check(state.value)
        return state.value == IN_PROGRESS

    def begin(self, communicator: int, rank: Rank, spans: Sequence[tuple[int, int]], stream: int) -> None:
        """Sends or receives of ``(address, number of bytes)``, in one group."""
        call: Callable[..., int] = self._library.ncclSend if rank is Rank.SENDER else self._library.ncclRecv
        self._check(self._library.ncclGroupStart())
        states = [call(address, size, UINT8, 1 - rank, communicator, stream) for address, size in spans]
        states.append(self._library.ncclGroupEnd())
        for state in states:
            self._check(state)

    def abort(self, communicator: int) -> None:
        self._check(self._library.ncclCommAbort(communicator))

    def _check(self, state: int) -> None:
        if state not in (SUCCESS, IN_PROGRESS):
            raise CommunicatorFailed(self._library.ncclGetErrorString(state).decode())


def _dotted(version: int) -> str:
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


@dataclass(slots=True, eq=False)
class NcclWork:
    """`Work`; ``mark`` is known when all of it has been handed to the stream."""

    communicator: "NcclCommunicator"
    mark: Mark | None = None

    @property
    def is_done(self) -> bool:
        """An error of the communicator could have let the device pass the mark, too."""
        return self.mark is not None and self.mark.is_passed and not self.communicator.is_busy


class NcclCommunicator:
    """`Communicator` of ``library`` on a stream of its own."""

    def __init__(self, library: NcclLibrary, unique_id: bytes, rank: Rank, stream: Stream) -> None:
        self._library = library
        self._rank = rank
        self._stream = stream
        self._begun: NcclWork | None = None
        with stream.on_device():
            self._handle = library.begin_joining(unique_id, rank)

    @property
    def is_busy(self) -> bool:
        if self._library.is_in_progress(self._handle):
            return True
        if self._begun is not None:
            self._begun.mark = self._stream.mark()
            self._begun = None
        return False

    def start(self, buffers: Sequence[Payload], after: CopyMark) -> Work:
        assert self._begun is None, "not before the last one is handed over"
        spans = [(self._stream.address_of(buffer), len(buffer)) for buffer in buffers]
        self._stream.wait(after)
        with self._stream.on_device():
            self._library.begin(self._handle, self._rank, spans, self._stream.handle)
        self._begun = work = NcclWork(self)
        return work

    def abort(self) -> None:
        with self._stream.on_device():
            self._library.abort(self._handle)


@dataclass(frozen=True, slots=True)
class NcclNetwork:
    """`Network`; every communicator gets a stream of its own."""

    library: NcclLibrary
    new_stream: Callable[[], Stream]

    @property
    def name(self) -> str:
        return self.library.name

    def new_id(self) -> bytes:
        return self.library.unique_id()

    def join(self, unique_id: bytes, rank: Rank) -> NcclCommunicator:
        return NcclCommunicator(self.library, unique_id, rank, self.new_stream())
