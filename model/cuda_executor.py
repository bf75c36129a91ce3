"""Steps on a GPU. `launch` never waits for the device: whatever a step needs is queued behind the step before.

A second thread waits for what the device has done, announces layer groups and steps, and wakes the loop. Ids that a step
samples stay on the device for the next one; the copy that the host reads arrives a step later.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from threading import Event, Thread

import torch
from torch import Tensor

from ..core.sequence import Chunk, ChunkResult
from .cuda_runner import CudaRunner, RunStep
from .device_stream import Mark
from .executor import Launched
from .step_packing import PackedStep, StepPacker


@dataclass(slots=True, eq=False)
class CudaLaunched:
    """`Launched`. ``marks`` are passed by the device when layer groups are written, the last one when all is done."""

    chunks: Seq[Chunk]
    packed: PackedStep
    step: RunStep
    num_groups_done: int = 0
    done: Event = field(default_factory=Event)

    @property
    def is_done(self) -> bool:
        return self.done.is_set()

    def results(self) -> list[ChunkResult]:
        self.done.wait()
        return self.step.results(self.chunks)
