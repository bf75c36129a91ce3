"""Decode steps as CUDA graphs, for a ladder of batch sizes: one launch a step instead of hundreds."""

from bisect import bisect_left
from collections.abc import Callable

from .device_stream import DeviceStream


def batch_ladder(max_rows: int) -> list[int]:
    """Sizes that decode steps are padded to: powers of two to 8, then every eighth row, up to all of ``max_rows``."""
    sizes = [1, 2, 4, *range(8, max_rows, 8)]
    return [*(size for size in sizes if size < max_rows), max_rows]


def sequence_ladder(max_sequences: int) -> list[int]:
    """Numbers of prompts that a step is padded to; each one costs a compilation of the attention kernel."""
    sizes = [4, 32]
    return [*(size for size in sizes if size < max_sequences), max_sequences]


def padded(size: int, ladder: list[int]) -> int:
    """The next size of the ladder; 0 stays 0."""
    return ladder[bisect_left(ladder, size)] if size else 0


class DecodeGraphs:
    """``launch(n)`` launches a decode step of ``n`` rows whose inputs and outputs lie at fixed addresses."""

    def __init__(self, stream: DeviceStream, sizes: list[int], launch: Callable[[int], None]) -> None:
        self._replays: dict[int, Callable[[], None]] = {}
        for size in reversed(sizes):  # largest first: the smaller ones find their memory in its
            with stream.launching():
                launch(size)  # once as it is: what is compiled or set up at first use can't be captured
            self._replays[size] = stream.capture(lambda size=size: launch(size))

    def replay(self, num_rows: int) -> None:
        self._replays[num_rows]()
