"""Memory of one GPU process in another of the same host, by CUDA's driver library, whose ABI is stable.

https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__MEM.html: ``cuMemGetAddressRange``, ``cuIpcGetMemHandle``,
``cuIpcOpenMemHandle``, ``cuIpcCloseMemHandle``. Opened with the sending device current, a mapping is good for the
kernels of that device, over NVLink or PCIe.
"""

from ctypes import CDLL, Structure, byref, c_char_p, c_size_t, c_ubyte, c_uint, c_uint64
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

HANDLE_BYTES = 64
LAZY_ENABLE_PEER_ACCESS = 1


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


@cache
def _driver() -> CDLL:
    return CDLL("libcuda.so.1")


def _check(status: int) -> None:
    if status:
        name = c_char_p()
        _driver().cuGetErrorName(status, byref(name))
        raise CudaError((name.value or b"unknown").decode())
