"""Steps as CUDA graphs: a launch or a few a step instead of hundreds."""

from collections.abc import Callable, Iterable
from functools import partial

from .device_stream import DeviceStream, Launch
from .step_shapes import StepShape


class StepGraphs:
    """``launch(shape, between)`` launches a step of that shape whose inputs and outputs lie at fixed addresses.

    It calls ``between`` where something may be launched within the step. ``rehearse(shape)`` launches each of its
    kernels once.
    """

    def __init__(
        self,
        stream: DeviceStream,
        shapes: Iterable[StepShape],
        launch: Callable[[StepShape, Callable[[], None]], None],
        rehearse: Callable[[StepShape], None],
    ) -> None:
        self._replays: dict[StepShape, Launch] = {}
        for shape in shapes:
            self._replays[shape] = stream.capture(partial(launch, shape), partial(rehearse, shape))

    def __contains__(self, shape: StepShape) -> bool:
        return shape in self._replays

    def replay(self, shape: StepShape, between: Callable[[], None]) -> None:
        self._replays[shape](between)
