"""Steps on a GPU. `launch` never waits for the device: whatever a step needs is queued behind the step before.

A thread waits for what the device has done, announces layer groups and steps, and wakes the loop. Ids that a step
samples stay on the device for the next one; what the host reads of them arrives while that one runs.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from ..core.sequence import Chunk, ChunkResult
from .cuda_runner import CudaRunner, RunningStep
from .executor import Launched
from .grammar import ConstrainedStep, Grammars
from .step_packing import StepPacker


@dataclass(slots=True, eq=False)
class CudaLaunched:
    """`Launched`."""

    chunks: Seq[Chunk]
    running: RunningStep
    constrained: ConstrainedStep | None
    num_groups_done: int = 0
    future: Future[list[ChunkResult]] = field(default_factory=Future)

    @property
    def is_done(self) -> bool:
        return self.future.done()

    def results(self) -> list[ChunkResult]:
        return self.future.result()


class CudaExecutor:
    """`Executor`. ``wake`` is called, from another thread, whenever a layer group or a step is done."""

    def __init__(
        self,
        runner: CudaRunner,
        packer: StepPacker,
        num_layer_groups: int,
        wake: Callable[[], None] = lambda: None,
        grammars: Grammars | None = None,
    ) -> None:
        """Without ``grammars`` no request may have one."""
        self.num_layer_groups = num_layer_groups
        self._runner = runner
        self._packer = packer
        self._wake = wake
        self._grammars = grammars
        self._waiting = ThreadPoolExecutor(1, "device")

    def launch(self, chunks: Seq[Chunk], previous: Launched | None) -> CudaLaunched:
        assert previous is None or isinstance(previous, CudaLaunched), "steps of one executor follow each other"
        packed = self._packer.pack(chunks, previous.running.packed if previous is not None else None)
        constrained = self._grammars.begin(packed.sampled) if self._grammars else None
        launched = CudaLaunched(chunks, self._runner.run(packed, constrained), constrained)
        launched.future = self._waiting.submit(self._wait, launched)
        launched.future.add_done_callback(lambda _: self._wake())
        return launched

    def close(self) -> None:
        self._waiting.shutdown(wait=True)

    def _wait(self, launched: CudaLaunched) -> list[ChunkResult]:
        for mark in launched.running.group_marks:
            mark.synchronize()
            launched.num_groups_done += 1
            self._wake()
        launched.running.end.synchronize()
        launched.num_groups_done = self.num_layer_groups
        results = launched.running.results(launched.chunks)
        return launched.constrained.settled(launched.chunks, results) if launched.constrained else results
