"""Memory of one GPU process in another of the same host, by CUDA's driver library, whose ABI is stable.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html: ``cuMemGetAddressRange``, ``cuIpcGetMemHandle``,
``cuIpcOpenMemHandle``, ``cuIpcCloseMemHandle``, ``cuMemcpyBatchAsync``. Opened with the sending device current, a
mapping is good for the kernels and copies of that device, over NVLink or PCIe.
"""

from collections.abc import Iterator
from ctypes import CDLL, Structure, byref, c_char_p, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HANDLE_BYTES = 64
LAZY_ENABLE_PEER_ACCESS = 1
SOURCE_IN_STREAM_ORDER = 1
FIRST_PIECES, GROWTH = 48, 1.6
"""A batch begins when the driver has all of it, which takes almost 1 us a piece, and 512 KiB are copied in 1.3 us: each
batch may have so many times the pieces of the one before, which is copied meanwhile."""


class CudaError(Exception):
    """What the driver says."""


@dataclass(frozen=True, slots=True)
class Exported:
    """A tensor's memory: ``offset`` bytes into the allocation that ``handle`` stands for in other processes."""

    handle: bytes
    offset: int


class _Handle(Structure):
    """``CUipcMemHandle``, which is passed by value."""

    _fields_ = (("reserved", c_ubyte * HANDLE_BYTES),)


def export_memory(tensor: Tensor) -> Exported:
    """How other processes of this host reach a contiguous tensor of this process. Raises `CudaError`."""
    base, num_bytes, handle = c_uint64(), c_size_t(), _Handle()
    with torch.cuda.device(tensor.device):
        _check(_driver().cuMemGetAddressRange_v2(byref(base), byref(num_bytes), c_uint64(tensor.data_ptr())))
        _check(_driver().cuIpcGetMemHandle(byref(handle), base))
    return Exported(bytes(handle.reserved), tensor.data_ptr() - base.value)


def map_memory(handle: bytes, device: torch.device) -> int:
    """The address at which ``device`` reaches an allocation of another process. Raises `CudaError`."""
    address = c_uint64()
    there = _Handle((c_ubyte * HANDLE_BYTES).from_buffer_copy(handle))
    with torch.cuda.device(device):
        _check(_driver().cuIpcOpenMemHandle_v2(byref(address), there, c_uint(LAZY_ENABLE_PEER_ACCESS)))
    return address.value


def unmap_memory(address: int, device: torch.device) -> None:
    """No kernel may use the mapping any more. Raises `CudaError`."""
    with torch.cuda.device(device):
        _check(_driver().cuIpcCloseMemHandle(c_uint64(address)))


class _CopyAttributes(Structure):
    """``CUmemcpyAttributes``; the locations are hints about memory that has none of its own."""

    _fields_ = (("source_order", c_int), ("locations", c_int * 4), ("flags", c_uint))


def has_batch_copies() -> bool:
    """Whether the driver has `copy_pieces`: that of CUDA 13, and later ones."""
    return hasattr(_driver(), "cuMemcpyBatchAsync_v2")


def copy_pieces(sources: NDArray[np.int64], destinations: NDArray[np.int64], num_bytes: int, stream: int) -> None:
    """Have the copy engines bring ``num_bytes`` from each address to its counterpart, in the stream of this handle.

    That must not be a default stream. The processors go on computing meanwhile. Raises `CudaError`.
    """
    sizes = np.full(len(sources), num_bytes, np.int64)
    lists = [array.ctypes.data for array in (destinations, sources, sizes)]
    of_all = byref(_CopyAttributes(source_order=SOURCE_IN_STREAM_ORDER)), byref(c_size_t(0)), c_size_t(1)
    for batch in batches(len(sources)):
        parts = [c_void_p(start + batch.start * sizes.itemsize) for start in lists]
        _check(_driver().cuMemcpyBatchAsync_v2(*parts, c_size_t(len(batch)), *of_all, c_void_p(stream)))


def batches(num_pieces: int) -> Iterator[range]:
    """The pieces in growing batches."""
    start, size = 0, float(FIRST_PIECES)
    while start < num_pieces:
        yield range(start, min(start + int(size), num_pieces))
        start, size = start + int(size), GROWTH * size


@cache
def _driver() -> CDLL:
    return CDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status:
        name = c_char_p()
        _driver().cuGetErrorName(status, byref(name))
        raise CudaError((name.value or b"unknown").decode())
