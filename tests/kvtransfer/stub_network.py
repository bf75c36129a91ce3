"""The stand-in for NCCL (stub_nccl.c), compiled once a session, and for the device: streams in memory of the host."""

import subprocess
import tempfile
from contextlib import AbstractContextManager, nullcontext
from ctypes import CDLL, c_long, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np

from crossdock.core.part import Payload
from crossdock.kvtransfer.nccl_library import NcclLibrary, NcclNetwork
from crossdock.kvtransfer.pool_bytes import Mark

SOURCE = Path(__file__).with_name("stub_nccl.c")


@cache
def stub_path() -> str:
    folder = Path(tempfile.mkdtemp(prefix="crossdock-stub-nccl-"))
    library = folder / "libnccl.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", "-pthread", "-o", library, SOURCE], check=True)
    return str(library)


@cache
def stub(path: str) -> CDLL:
    """What the stub has beside NCCL's own functions; one library, so a setting holds for the whole process."""
    library = CDLL(path)
    library.stubNewStream.restype = c_void_p
    for name in ("stubLaunched", "stubDone"):
        function = getattr(library, name)
        function.argtypes, function.restype = [c_void_p], c_long
    return library


@dataclass(frozen=True, slots=True)
class HostMark:
    stream: "HostStream"
    count: int

    @property
    def is_passed(self) -> bool:
        return bool(self.stream.library.stubDone(self.stream.handle) >= self.count)


class HostStream:
    """`Stream`; a mark counts what the library has brought there by now, as an event of CUDA does."""

    def __init__(self, library: CDLL) -> None:
        self.library = library
        self.handle: int = library.stubNewStream()

    def on_device(self) -> AbstractContextManager[object]:
        return nullcontext()

    def mark(self) -> HostMark:
        return HostMark(self, self.library.stubLaunched(self.handle))

    def wait(self, mark: Mark) -> None:
        mark.synchronize()

    def address_of(self, buffer: Payload) -> int:
        assert isinstance(buffer, np.ndarray)
        return int(buffer.ctypes.data)


def stub_network(path: str) -> NcclNetwork:
    library = stub(path)
    return NcclNetwork(NcclLibrary(path), lambda: HostStream(library))
