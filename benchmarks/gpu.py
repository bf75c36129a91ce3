"""How near one GPU comes to its limits: correctness, start-up, decode steps, prefill, prefix hits, a cold batch.

    python benchmarks/gpu.py --shape llama-8b --results benchmarks/results

Weights and prompts are random; all work goes through the whole engine. The peer is vLLM 0.26.0 on the same machine.
"""

import time

STARTED_AT = time.perf_counter()

import json  # noqa: E402
import logging  # noqa: E402
import platform  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Iterator  # noqa: E402
from dataclasses import asdict, dataclass, field  # noqa: E402
from datetime import UTC, datetime  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Annotated  # noqa: E402

import torch  # noqa: E402
import typer  # noqa: E402

from crossdock.benchmarks.gpu_checks import Check, all_checks  # noqa: E402
from crossdock.benchmarks.gpu_profile import Timeline, as_table  # noqa: E402
from crossdock.benchmarks.gpu_shapes import CONFIGS, ModelShape  # noqa: E402
from crossdock.benchmarks.gpu_workloads import DECODE_PEERS, START, Measurement, Workloads  # noqa: E402
from crossdock.benchmarks.offline_engine import OfflineEngine  # noqa: E402
from crossdock.core.block_hash import ModelFingerprint  # noqa: E402
from crossdock.core.config import EngineConfig  # noqa: E402
from crossdock.core.request import SamplingParams  # noqa: E402
from crossdock.model.startup import load_model  # noqa: E402

CHUNK_TOKENS = 8192
SHORT_PROMPTS = (64, 512, 1024)
PARTS = "checks,startup,decode,prefill,cold,profile"
OWN_START = "own-start"
HEAD = f"{'':<34}{'unit':>9}{'measured':>10}{'floor':>10}{'of it':>8}{'vLLM':>10}{'of it':>8}{'goal':>10}"


@dataclass(slots=True)
class Report:
    """All that a run found."""

    shape: str
    date: str
    machine: str
    checks: list[Check] = field(default_factory=list)
    measurements: list[Measurement] = field(default_factory=list)
    profiles: dict[str, Timeline] = field(default_factory=dict)

    @classmethod
    def begun(cls, shape: str) -> "Report":
        machine = f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}"
        return cls(shape, datetime.now(UTC).isoformat(timespec="seconds"), machine)


def engine_for(shape: str) -> OfflineEngine:
    """A model of this shape with random weights, and as large a pool as it finds room for."""
    config = EngineConfig(device="cuda", load_format="dummy", chunk_tokens=CHUNK_TOKENS)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIGS[shape]))
        return OfflineEngine(load_model(Path(folder), ModelFingerprint(shape, "random"), b"benchmark", config), config)


def start(shape: str) -> None:
    """Print the seconds from this very process's beginning to imports done, engine ready, first token."""
    imported_at = time.perf_counter()
    engine = engine_for(shape)
    ready_at = time.perf_counter()
    [answer] = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1, seed=0))
    print(json.dumps([at - STARTED_AT for at in (imported_at, ready_at, answer.first_at)]))


def start_apart(shape: str, name: str) -> Measurement:
    command = [sys.executable, "-P", __file__, f"--shape={shape}", f"--parts={OWN_START}"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    imported, ready, first_token = json.loads(ran.stdout.splitlines()[-1])
    note = f"imports {imported:.1f} s, ready {ready:.1f} s"
    return Measurement(f"start to first token, {name}", "s", first_token, vllm=START.vllm, goal=START.goal, note=note)


def measurements(work: Workloads, parts: set[str], batches: list[int]) -> Iterator[Measurement]:
    work.warm_up()
    if "decode" in parts:
        yield from (work.decode(batch) for batch in batches)
    if "prefill" in parts:
        yield work.prefill()
        yield from (work.one_prompt(num_tokens) for num_tokens in SHORT_PROMPTS)
        yield work.one_prompt()
        yield work.prefix_hit()
    if "cold" in parts:
        yield work.cold_batch()


def run(report: Report, parts: set[str], batches: list[int]) -> None:
    if "checks" in parts:
        for check in all_checks():
            report.checks.append(check)
            verdict = "right" if check.is_passed else "WRONG"
            print(f"{verdict}  {check.name}: {check.num_equal} of {check.num_all} tokens  {check.note}", flush=True)
    print(HEAD)
    if "startup" in parts:
        for name in ("kernels compiled", "again"):
            report.measurements.append(start_apart(report.shape, name))
            print(row(report.measurements[-1]), flush=True)
    if parts <= {"checks", "startup"}:
        return
    engine = engine_for(report.shape)
    work = Workloads(engine, ModelShape.named(report.shape), has_peers=report.shape == "llama-8b")
    for measurement in measurements(work, parts, batches):
        report.measurements.append(measurement)
        print(row(measurement), flush=True)
    if "profile" in parts:
        report.profiles = {f"decode, batch {batch}": work.profile(batch) for batch in batches}
        report.profiles |= {"prefill": work.profile_prompt(), "prefix hit": work.profile_hit()}
    engine.close()


def row(m: Measurement) -> str:
    def cell(value: float | None) -> str:
        return f"{'-' if value is None else f'{value:.2f}' if value < 1000 else f'{value:.0f}':>10}"

    def share(peer: float | None) -> str:
        return f"{'-' if peer is None else f'{100 * (m.value / peer if m.is_rate else peer / m.value):.0f}%':>8}"

    name = f"{m.name:<34}{m.unit:>9}"
    peers = cell(m.floor) + share(m.floor) + cell(m.vllm) + share(m.vllm) + cell(m.goal)
    return f"{name}{cell(m.value)}{peers}  {m.note}"


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(CONFIGS)}.")] = "llama-8b",
    parts: Annotated[str, typer.Option(help="What to run, comma-separated.")] = PARTS,
    batches: Annotated[str, typer.Option(help="Decode batches.")] = ",".join(map(str, DECODE_PEERS)),
    results: Annotated[Path | None, typer.Option(help="Folder for a JSON file.")] = None,
) -> None:
    """Measure one GPU; see the module's docstring."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if parts == OWN_START:
        start(shape)
        return
    report = Report.begun(shape)
    run(report, set(parts.split(",")), [int(batch) for batch in batches.split(",")])
    print("\n".join(as_table(title, timeline) for title, timeline in report.profiles.items()))
    print("\n".join([report.machine, HEAD, *map(row, report.measurements)]), flush=True)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        (results / f"gpu-{shape}.json").write_text(json.dumps(asdict(report), indent=2) + "\n")
    if not all(check.is_passed for check in report.checks):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
