"""Steps as CUDA graphs: one launch a step instead of hundreds."""

from collections.abc import Callable, Iterable
from functools import partial

from .device_stream import DeviceStream
from .step_shapes import StepShape


class StepGraphs:
    """``launch(shape)`` launches a step of that shape whose inputs and outputs lie at fixed addresses."""

    def __init__(self, stream: DeviceStream, shapes: Iterable[StepShape], launch: Callable[[StepShape], None]) -> None:
        self._replays: dict[StepShape, Callable[[], None]] = {}
        for shape in shapes:
            self._replays[shape] = stream.capture(partial(launch, shape))

    def __contains__(self, shape: StepShape) -> bool:
        return shape in self._replays

    def replay(self, shape: StepShape) -> None:
        self._replays[shape]()
