"""Memory of one GPU process in another of the same host, by CUDA's driver library, whose ABI is stable.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html: ``cuMemGetAddressRange``, ``cuIpcGetMemHandle``,
``cuIpcOpenMemHandle``, ``cuIpcCloseMemHandle``, ``cuMemcpy3DBatchAsync``. Opened with the sending device current, a
mapping is good for the kernels and copies of that device, over NVLink or PCIe.
"""

from collections.abc import Iterator
from ctypes import CDLL, Structure, byref, c_char_p, c_size_t, c_ubyte, c_uint, c_uint64, c_ulonglong, c_void_p
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

HANDLE_BYTES = 64
LAZY_ENABLE_PEER_ACCESS = 1
OPERAND_IS_POINTER = 1
SOURCE_IN_STREAM_ORDER = 1
FIRST_COPIES, GROWTH = 48, 1.6
"""A batch begins when the driver has all of it, which takes almost 1 us a copy, and 512 KiB are copied in 1.3 us: each
batch may have so many times the copies of the one before, which is copied meanwhile."""


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


_COPY = np.dtype(
    [
        *(("source_type", "<i8"), ("source", "<i8"), ("source_pitch", "<i8"), ("source_rest", "<i8", 2)),
        *(("target_type", "<i8"), ("target", "<i8"), ("target_pitch", "<i8"), ("target_rest", "<i8", 2)),
        *(("width", "<i8"), ("height", "<i8"), ("depth", "<i8"), ("source_order", "<i4"), ("flags", "<u4")),
    ]
)
"""``CUDA_MEMCPY3D_BATCH_OP`` with two addresses; what it says of a third dimension and of managed memory is left 0."""


@dataclass(frozen=True, slots=True)
class RowCopies:
    """``heights[i]`` rows of ``width`` bytes, ``pitch`` apart on both sides, from one address to another, for each i.

    ``sources, destinations, heights [n]``.
    """

    sources: NDArray[np.int64]
    destinations: NDArray[np.int64]
    heights: NDArray[np.int64]
    width: int
    pitch: int


def has_batch_copies() -> bool:
    """Whether the driver has `copy_rows`: that of CUDA 13, and later ones."""
    return hasattr(_driver(), "cuMemcpy3DBatchAsync_v2")


def copy_rows(rows: RowCopies, stream: int) -> None:
    """Have the copy engines do it in the stream of this handle, which must not be a default one.

    The processors go on computing meanwhile. Raises `CudaError`.
    """
    copies = np.zeros(len(rows.sources), _COPY)
    copies["source_type"] = copies["target_type"] = OPERAND_IS_POINTER
    copies["source"], copies["target"], copies["height"] = rows.sources, rows.destinations, rows.heights
    copies["source_pitch"] = copies["target_pitch"] = rows.pitch
    copies["width"], copies["depth"], copies["source_order"] = rows.width, 1, SOURCE_IN_STREAM_ORDER
    for batch in batches(len(copies)):
        start = copies.ctypes.data + batch.start * copies.itemsize
        ordered = c_size_t(len(batch)), c_void_p(start), c_ulonglong(0)
        _check(_driver().cuMemcpy3DBatchAsync_v2(*ordered, c_void_p(stream)))


def batches(num_copies: int) -> Iterator[range]:
    """The copies in growing batches."""
    start, size = 0, float(FIRST_COPIES)
    while start < num_copies:
        yield range(start, min(start + int(size), num_copies))
        start, size = start + int(size), GROWTH * size


@cache
def _driver() -> CDLL:
    return CDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status:
        name = c_char_p()
        _driver().cuGetErrorName(status, byref(name))
        raise CudaError((name.value or b"unknown").decode())
