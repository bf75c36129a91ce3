"""Stands in for CUDA's driver where there is no GPU: an allocation is shared memory of the host, a handle its place.

As with the driver, memory that a peer has mapped lasts until the peer unmaps it, whatever becomes of its owner.
"""

import ctypes
import mmap
import os
import struct
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from crossdock.kvtransfer import cuda_ipc
from crossdock.kvtransfer.cuda_memory import HANDLE_BYTES, CudaError, Exported

_PLACE = struct.Struct(f"<iiq{HANDLE_BYTES - 16}x")


@dataclass(frozen=True, slots=True)
class _Allocation:
    fd: int
    num_bytes: int


_allocations: dict[int, _Allocation] = {}
_mappings: dict[int, mmap.mmap] = {}


def allocate(num_bytes: int) -> Tensor:
    """``[num_bytes]`` uint8 that `export_memory` knows."""
    fd = os.memfd_create("device")
    os.ftruncate(fd, num_bytes)
    tensor = torch.from_numpy(np.frombuffer(mmap.mmap(fd, num_bytes), np.uint8))
    _allocations[tensor.data_ptr()] = _Allocation(fd, num_bytes)
    return tensor


def export_memory(tensor: Tensor) -> Exported:
    found = _allocations[tensor.data_ptr()]
    return Exported(_PLACE.pack(os.getpid(), found.fd, found.num_bytes), 0)


def map_memory(handle: bytes, device: torch.device) -> int:
    pid, fd, num_bytes = _PLACE.unpack(handle)
    try:
        with open(f"/proc/{pid}/fd/{fd}", "r+b") as file:
            mapped = mmap.mmap(file.fileno(), num_bytes)
    except OSError:
        raise CudaError("CUDA_ERROR_INVALID_VALUE") from None
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
    _mappings[address] = mapped
    return address


def unmap_memory(address: int, device: torch.device) -> None:
    _mappings.pop(address).close()


def has_batch_copies() -> bool:
    return True


def copy_pieces(sources: NDArray[np.int64], destinations: NDArray[np.int64], num_bytes: int, stream: int) -> None:
    for source, destination in zip(sources.tolist(), destinations.tolist(), strict=True):
        ctypes.memmove(destination, source, num_bytes)


def stand_in() -> pytest.MonkeyPatch:
    """`cuda_ipc` uses these functions until the patch is undone."""
    patch = pytest.MonkeyPatch()
    for function in (export_memory, map_memory, unmap_memory, has_batch_copies, copy_pieces):
        patch.setattr(cuda_ipc, function.__name__, function)
    return patch
