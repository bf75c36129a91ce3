"""What a step needs of a GPU beside kernels: memory to copy from, events, graphs; thin, so that tests do without."""

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

Launch = Callable[[Callable[[], None]], None]
"""Launches work, and calls what it is given at certain places between."""


class Mark(Protocol):
    """A point in a stream."""

    @property
    def is_passed(self) -> bool:
        """Whether all that was launched before has run."""

    def synchronize(self) -> None:
        """Wait for that."""

    def delay(self, stream: object) -> None:
        """Have what is launched from now on in another stream of the device run behind it."""


class DeviceStream(Protocol):
    """Work of one thread for one device, done in launch order, without waiting for it."""

    @property
    def device(self) -> torch.device: ...

    @property
    def handle(self) -> int:
        """What CUDA's driver knows it by."""

    def launching(self) -> AbstractContextManager[object]:
        """What is launched inside goes to this stream."""

    def host_memory(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host from and to which the device copies on its own; reused when the copy is done."""

    def mark(self) -> Mark: ...

    def capture(self, launch: Launch, rehearse: Callable[[], None]) -> Launch:
        """Record what ``launch`` launches; the result launches it again, with the same addresses, and calls what it is
        given at the same places.

        ``rehearse`` launches each of its kernels once before: what is set up at first use can't be recorded. Graphs
        of one stream share their memory: what one leaves there lasts until another one runs.
        """


@dataclass(frozen=True, slots=True)
class CudaMark:
    """`Mark`."""

    event: torch.cuda.Event
    device: torch.device

    @property
    def is_passed(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        """On this device: a thread that knows none would set up another one for itself, half a GiB there."""
        with torch.cuda.device(self.device):
            self.event.synchronize()

    def delay(self, stream: object) -> None:
        assert isinstance(stream, torch.cuda.Stream), "streams of another kind belong to no GPU"
        stream.wait_event(self.event)


class CudaStream:
    """`DeviceStream` of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._graph_memory = torch.cuda.graph_pool_handle()

    @property
    def handle(self) -> int:
        return int(self._stream.cuda_stream)

    def launching(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self._stream)

    def host_memory(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_elements, dtype=dtype, pin_memory=True)

    def mark(self) -> Mark:
        event = torch.cuda.Event()
        event.record(self._stream)
        return CudaMark(event, self.device)

    def capture(self, launch: Launch, rehearse: Callable[[], None]) -> Launch:
        """A graph for each piece between two places."""
        with self.launching():
            rehearse()
        pieces: list[torch.cuda.CUDAGraph] = []
        with ExitStack() as capturing:

            def begin_piece() -> None:
                capturing.close()
                pieces.append(torch.cuda.CUDAGraph())
                capturing.enter_context(torch.cuda.graph(pieces[-1], pool=self._graph_memory, stream=self._stream))

            begin_piece()
            launch(begin_piece)
        return partial(_replay, pieces)


def _replay(pieces: list[torch.cuda.CUDAGraph], between: Callable[[], None]) -> None:
    for number, piece in enumerate(pieces):
        if number:
            between()
        piece.replay()
