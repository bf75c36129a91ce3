"""The ``nccl`` transport on a GPU: each communicator gets a CUDA stream of its own."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..core.mailbox import Mailbox
from ..core.part import Payload
from .device_pool import DevicePool
from .nccl import NcclTransport
from .nccl_channel import CommunicatorFailed
from .nccl_library import NcclLibrary, NcclNetwork
from .pool_bytes import Mark

PATIENCE_LEASES = 0.5
"""Of a transfer that takes longer nothing would be left but its lease."""


@dataclass(frozen=True, slots=True)
class CudaMark:
    """`nccl_library.Mark`."""

    event: torch.cuda.Event

    @property
    def is_passed(self) -> bool:
        try:
            return bool(self.event.query())
        except RuntimeError as error:
            raise CommunicatorFailed(str(error)) from None


class NcclStream:
    """`nccl_library.Stream`, ahead of the computation's: few programs, which another GPU waits for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device, priority=-1)
        self.handle = self._stream.cuda_stream

    def on_device(self) -> AbstractContextManager[object]:
        return torch.cuda.device(self._device)

    def mark(self) -> CudaMark:
        event = torch.cuda.Event()
        event.record(self._stream)
        return CudaMark(event)

    def wait(self, mark: Mark) -> None:
        mark.delay(self._stream)

    def address_of(self, buffer: Payload) -> int:
        assert isinstance(buffer, Tensor) and buffer.is_cuda, "NCCL carries what lies on a GPU"
        return buffer.data_ptr()


def nccl_over(
    library: NcclLibrary,
    pool: DevicePool,
    mailbox: Mailbox,
    key: bytes,
    lease_seconds: float,
    wake: Callable[[], None],
) -> NcclTransport:
    """The transport for a pool, with a mailbox of its own."""
    device = pool.stream.device
    network = NcclNetwork(library, lambda: NcclStream(device))
    return NcclTransport(pool, network, mailbox, key, PATIENCE_LEASES * lease_seconds, wake)
