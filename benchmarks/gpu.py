"""How near one GPU comes to its limits: correctness first, then decode steps, prefill, prefix hits, a cold batch, start-up.

    python benchmarks/gpu.py --shape llama-8b --results benchmarks/results

Weights are random, prompts too; work goes through the whole engine. The peers are vLLM 0.26.0 on the same kind of machine.
"""

import time

STARTED_AT = time.perf_counter()

import json  # noqa: E402
import logging  # noqa: E402
import platform  # noqa: E402
import subprocess  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
from collections.abc import Callable  # noqa: E402
from dataclasses import asdict, dataclass  # noqa: E402
from datetime import UTC, datetime  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Annotated  # noqa: E402

import torch  # noqa: E402
import typer  # noqa: E402

from crossdock.benchmarks.gpu_checks import all_checks  # noqa: E402
from crossdock.benchmarks.gpu_profile import Timeline, as_table, profile_decode  # noqa: E402
from crossdock.benchmarks.gpu_shapes import CONFIGS, ModelShape  # noqa: E402
from crossdock.benchmarks.gpu_workloads import DECODE_PEERS, Measurement, Workloads  # noqa: E402
from crossdock.benchmarks.offline_engine import OfflineEngine  # noqa: E402
from crossdock.core.config import EngineConfig  # noqa: E402
from crossdock.core.request import SamplingParams  # noqa: E402
from crossdock.model.startup import load_model  # noqa: E402

CHUNK_TOKENS = 8192
PARTS = "checks,startup,decode,prefill,cold,profile"
VLLM_START, START_GOAL = 60.0, 15.0


@dataclass(frozen=True, slots=True)
class StartUp:
    """Seconds since the process began."""

    imported: float
    loaded: float
    first_token: float


def engine_for(name: str) -> OfflineEngine:
    """A model of this shape with random weights, as large a pool as it finds room for."""
    config = EngineConfig(device="cuda", load_format="dummy", chunk_tokens=CHUNK_TOKENS, max_num_seqs=256)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIGS[name]))
        return OfflineEngine(load_model(Path(folder), name, b"benchmark", config), config)


def start_up(name: str) -> StartUp:
    """Of this very process; call it first."""
    imported_at = time.perf_counter()
    engine = engine_for(name)
    loaded_at = time.perf_counter()
    [answer] = engine.generate([[1, 2, 3]], SamplingParams(temperature=0, max_tokens=1, seed=0))
    return StartUp(imported_at - STARTED_AT, loaded_at - STARTED_AT, answer.first_at - STARTED_AT)


def start_up_apart(name: str) -> StartUp:
    command = [sys.executable, "-P", __file__, f"--shape={name}", "--parts=own-startup"]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    print(ran.stderr, end="", flush=True)
    return StartUp(**json.loads(ran.stdout.splitlines()[-1]))


def measure(name: str, parts: set[str], batches: list[int]) -> tuple[list[Measurement], list[tuple[str, Timeline]]]:
    shape = ModelShape.named(name)
    found: list[Measurement] = []
    if "startup" in parts:
        for kind in ("first", "again"):
            up = start_up_apart(name)
            note = f"imports {up.imported:.1f} s, ready {up.loaded:.1f} s"
            found.append(Measurement(f"start to first token, {kind}", "s", up.first_token, None, VLLM_START, START_GOAL, note=note))
    if not parts & {"decode", "prefill", "cold", "profile"}:
        return found, []
    engine = engine_for(name)
    work = Workloads(engine, shape, has_peers=name == "llama-8b")
    steps: list[Callable[[], Measurement]] = []
    if "decode" in parts:
        steps += [lambda batch=batch: work.decode(batch) for batch in batches]  # type: ignore[misc]
    if "prefill" in parts:
        steps += [work.prefill, work.one_prompt, work.prefix_hit]
    if "cold" in parts:
        steps.append(work.cold_batch)
    work.warm_up()
    for step in steps:
        found.append(step())
        print(row(found[-1]), flush=True)
    profiles = []
    if "profile" in parts:
        profiles = [(f"decode, batch {batch}", work.profile(batch)) for batch in batches]
        profiles.append(("prefill, 8192 tokens", work.profile_prompt()))
    engine.close()
    return found, profiles


def row(m: Measurement) -> str:
    def cell(value: float | None, width: int = 10) -> str:
        return f"{'-' if value is None else f'{value:.2f}' if value < 1000 else f'{value:.0f}':>{width}}"

    def share(value: float | None) -> str:
        return cell(None, 8) if value is None else f"{100 * (m.value / value if m.is_rate else value / m.value):>7.0f}%"

    return f"{m.name:<34}{m.unit:>9}{cell(m.value)}{cell(m.floor)}{share(m.floor)}{cell(m.vllm)}{share(m.vllm)}{cell(m.goal)}  {m.note}"


HEAD = f"{'':<34}{'unit':>9}{'measured':>10}{'floor':>10}{'of it':>8}{'vLLM':>10}{'of it':>8}{'goal':>10}"


def main(
    shape: Annotated[str, typer.Option(help=f"One of {', '.join(CONFIGS)}.")] = "llama-8b",
    parts: Annotated[str, typer.Option(help="What to run, comma-separated.")] = PARTS,
    batches: Annotated[str, typer.Option(help="Decode batches.")] = ",".join(map(str, DECODE_PEERS)),
    results: Annotated[Path | None, typer.Option(help="Folder for a JSON file.")] = None,
) -> None:
    """Measure one GPU; see the module's docstring."""
    wanted = set(parts.split(","))
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if "own-startup" in wanted:
        print(json.dumps(asdict(start_up(shape))))
        return
    checks = list(all_checks()) if "checks" in wanted else []
    for check in checks:
        print(f"{'ok  ' if check.is_passed else 'WRONG'} {check.name}: {check.num_equal} of {check.num_all} {check.note}", flush=True)
    found, profiles = measure(shape, wanted, [int(batch) for batch in batches.split(",")])
    for title, timeline in profiles:
        print(as_table(title, timeline))
    print("\n".join([HEAD, *(row(m) for m in found)]), flush=True)
    if results is not None:
        results.mkdir(parents=True, exist_ok=True)
        now = datetime.now(UTC)
        report = {
            "date": now.isoformat(timespec="seconds"),
            "machine": f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Python {platform.python_version()}",
            "shape": shape,
            "checks": [asdict(check) for check in checks],
            "measurements": [asdict(m) for m in found],
            "profiles": {title: asdict(timeline) for title, timeline in profiles},
        }
        (results / f"gpu-{shape}.json").write_text(json.dumps(report, indent=2) + "\n")
    if not all(check.is_passed for check in checks):
        raise typer.Exit(1)


if __name__ == "__main__":
    typer.run(main)
