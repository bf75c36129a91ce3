"""Where the device's time goes in decode steps: how long each kind of kernel runs, and how long nothing does."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.profiler import ProfilerActivity, profile

from crossdock.benchmarks.offline_engine import OfflineEngine
from crossdock.core.request import SamplingParams
from crossdock.model.engine import Step

NAME_LENGTH = 60


@dataclass(frozen=True, slots=True)
class KernelTime:
    """Microseconds a step, and launches a step; kernels that overlap count both."""

    name: str
    microseconds: float
    launches: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """Microseconds a step: ``busy`` while a kernel or copy runs at all, ``step`` from one step's end to the next's."""

    step: float
    busy: float
    kernels: list[KernelTime]


def profile_decode(engine: OfflineEngine, prompts: list[list[int]], num_steps: int = 20) -> Timeline:
    """Profile steps in which all ``prompts`` are being answered."""
    params = SamplingParams(temperature=0, max_tokens=2 * num_steps + len(prompts), seed=0)
    answers = [engine.add(prompt, params)[1] for prompt in prompts]
    step: Step | None = None
    while not all(answer.token_ids for answer in answers):
        step = engine.step(step)
    step = engine.step(step)
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_steps):
            step = engine.step(step)
        torch.cuda.synchronize()
    engine.run(step)
    return _timeline(profiler, num_steps)


def profile_prefill(engine: OfflineEngine, prompts: list[list[int]]) -> Timeline:
    """Profile prompts, one after the other, to their first tokens."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for prompt in prompts:
            engine.generate([prompt], SamplingParams(temperature=0, max_tokens=1, seed=0))
    return _timeline(profiler, len(prompts))


def _timeline(profiler: profile, num_steps: int) -> Timeline:
    events = [event for event in profiler.events() or [] if event.device_type == torch.profiler.DeviceType.CUDA]
    return timeline([(e.name, e.time_range.start, e.time_range.end) for e in events], num_steps)


def timeline(spans: Iterable[tuple[str, float, float]], num_steps: int) -> Timeline:
    """From names, starts and ends of what ran on the device."""
    ordered = sorted(spans, key=lambda span: span[1])
    busy, end = 0.0, ordered[0][1]
    total: dict[str, float] = defaultdict(float)
    count: dict[str, int] = defaultdict(int)
    for name, start, stop in ordered:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
        total[name[:NAME_LENGTH]] += stop - start
        count[name[:NAME_LENGTH]] += 1
    kernels = [KernelTime(name, total[name] / num_steps, count[name] / num_steps) for name in total]
    kernels.sort(key=lambda kernel: -kernel.microseconds)
    return Timeline((end - ordered[0][1]) / num_steps, busy / num_steps, kernels)


def as_table(title: str, found: Timeline, num_kernels: int = 16) -> str:
    gap = found.step - found.busy
    head = f"{title}: {found.step:.0f} us a step, device busy {found.busy:.0f}, idle {gap:.0f}"
    rows = [f"  {k.microseconds:9.1f} us {k.launches:7.1f} x  {k.name}" for k in found.kernels[:num_kernels]]
    return "\n".join([head, *rows])
