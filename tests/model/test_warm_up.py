"""What is compiled while the weights load: work for every kernel, of every kind that steps bring."""

import pytest

from crossdock.core.config import EngineConfig

from .gpu import NUM_PROGRAMS, gpu_stream
from .test_gpu_engine import plan_of

from crossdock.model.step_shapes import StepShape, StepShapes  # isort: skip
from crossdock.model.warm_up import WarmUp, kinds_of_shapes  # isort: skip

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def test_prompts_are_compiled_for_each_number_and_all_that_has_a_graph_once() -> None:
    assert list(kinds_of_shapes(StepShapes(256))) == [
        StepShape(0, 256, 256, is_short=False),
        StepShape(0, 32, 32, is_short=False),
        StepShape(0, 4, 4, is_short=False),
        StepShape(0, 4, 128, is_short=True),
        StepShape(256, 0, 256, is_short=False),
        StepShape(1, 0, 1, is_short=False),
    ]


def test_all_work_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossdock.model.warm_up.NUM_THREADS", 1)  # the interpreter can't do two things at once
    WarmUp(plan_of("MistralForCausalLM", EngineConfig(max_num_seqs=2)), gpu_stream, NUM_PROGRAMS).finish()


def test_a_failure_in_the_background_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise RuntimeError("out of shared memory")

    monkeypatch.setattr("crossdock.model.warm_up.all_work", lambda *_: [fail])
    with pytest.raises(RuntimeError, match="out of shared memory"):
        WarmUp(plan_of(), gpu_stream).finish()
