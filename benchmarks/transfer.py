"""What moving KV costs, by transport, length of prompt and number at once, with the limit of a plain copy beside it.

    python benchmarks/transfer.py                                      # host memory, the demo model's shape
    python benchmarks/transfer.py --device cuda --results benchmarks/results

Three parts: ``limit``, plain copies by size (transfer_limit.py); ``link``, two pools without engines, GB/s from the
first push to the last byte landed (transfer_link.py); ``workers``, two real workers with random weights: exposed time,
share of TTFT, speed of prefill, inter-token latency of decode (transfer_workers.py, which defines each). Lines are
printed as they are measured, and ``--results`` is written anew after each transport.
"""

import argparse
import json
import platform
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from crossdock.benchmarks.played_router import WorkersFailed
from crossdock.benchmarks.transfer_limit import PlainCopy, machine, plain_copies
from crossdock.benchmarks.transfer_link import CopyVariant, LinkFailed, LinkRow, Setting, StagedVariant, measure_link
from crossdock.benchmarks.transfer_shapes import SHAPES, Work, layout_of
from crossdock.benchmarks.transfer_workers import Load, WorkerRow, measure_workers

TRANSPORTS = {"cpu": "shm,ucx,tcp", "cuda": "cuda_ipc,ucx,tcp"}
DEFAULT_SHAPES = {"cpu": "demo", "cuda": "llama-8b"}
MAX_TOKENS = {"cpu": 2048, "cuda": 65_536}
BATCHES = {"cpu": 3, "cuda": 31}
CONTEXTS = {"cpu": 64, "cuda": 1024}
STEPS = {"cpu": 40, "cuda": 400}
LINK_HEAD = (
    f"{'link':<10}{'variant':>14}{'tokens':>8}{'at once':>9}{'GB/s':>9}{'of limit':>10}{'ms':>10}{'copied':>10}"
    f"{'us a push':>11}"
)
WORKER_HEAD = (
    f"{'workers':<10}{'tokens':>8}{'at once':>9}{'TTFT ms':>9}{'exposed ms':>12}{'seen':>7}{'share':>8}{'seen':>7}"
    f"{'tokens/s alone':>16}{'shipping':>10}{'slowed':>8}{'ITL p50/p99 quiet':>19}{'busy':>14}{'p99':>8}"
)


@dataclass(slots=True)
class Report:
    """All that a run found; ``failures`` tell what did not run."""

    device: str
    shape: str
    date: str
    machine: list[str]
    limits: list[PlainCopy] = field(default_factory=list)
    link: list[LinkRow] = field(default_factory=list)
    workers: list[WorkerRow] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)

    @property
    def limit(self) -> float:
        """GB/s of the largest plain copy, which no cache helps."""
        return self.limits[-1].gigabytes_per_second

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def link_line(row: LinkRow, limit: float) -> str:
    share = row.gigabytes_per_second / limit
    rate = f"{row.gigabytes_per_second:9.2f}{share:10.1%}{row.milliseconds:10.2f}"
    sender = f"{row.copied_ms:10.2f}{row.push_us:11.0f}"
    return f"{row.transport:<10}{row.variant:>14}{row.num_tokens:8}{row.num_at_once:9}{rate}{sender}"


def worker_line(row: WorkerRow) -> str:
    times = f"{row.ttft_ms:9.1f}{row.exposed_ms:12.2f}{row.seen_ms:7.2f}{row.exposed_share:8.1%}{row.seen_share:7.1%}"
    speed = f"{row.rate_alone:16.0f}{row.rate_shipping:10.0f}{row.slowed:8.1%}"
    gaps = ""
    if row.quiet is not None and row.busy is not None:
        quiet, busy = (f"{each.p50:.2f}/{each.p99:.2f}" for each in (row.quiet, row.busy))
        gaps = f"{quiet:>19}{busy:>14}{row.itl_rise:8.1%}"
    return f"{row.transport:<10}{row.num_tokens:8}{row.num_at_once:9}{times}{speed}{gaps}"


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="What moving KV between two workers costs.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--shape", choices=SHAPES)
    parser.add_argument("--parts", default="limit,link,workers")
    parser.add_argument("--transports", help="Comma-separated names, as workers know them.")
    parser.add_argument("--tokens", default="64,512,2048,8192,32768")
    parser.add_argument("--at-once", default="1,8,64")
    parser.add_argument("--max-tokens", type=int, help="Most tokens on their way at once; longer works are left out.")
    parser.add_argument("--copy-variants", default="", help="Of cuda_ipc's kernel, as in 24x16x64x1,16x16x64x2.")
    parser.add_argument("--staged-variants", default="", help="Of ucx and nccl, as in 256x4x128x32x16x48,128.")
    parser.add_argument("--run-blocks", type=int, help="How many blocks of a prompt lie side by side.")
    parser.add_argument("--steps", type=int, help="Of a window in which ITL is measured; 0: it is not.")
    parser.add_argument("--results", type=Path, help="Folder for a JSON file.")
    parser.add_argument("--name", default="transfer", help="What the file's name begins with.")
    return parser.parse_args()


def works_of(asked: argparse.Namespace, max_tokens: int) -> list[Work]:
    numbers = [int(number) for number in asked.at_once.split(",")]
    works = [Work(int(tokens), number) for tokens in asked.tokens.split(",") for number in numbers]
    return [work for work in works if work.total_tokens <= max_tokens]


def settings_of(asked: argparse.Namespace, shape: str, transport: str, num_blocks: int) -> list[Setting]:
    """One, or of a transport that stages one for each variant."""
    setting = Setting(asked.device, layout_of(shape), num_blocks + num_blocks // 4 + 8, transport)
    if asked.run_blocks:
        setting = replace(setting, run_blocks=asked.run_blocks)
    if not asked.staged_variants or transport not in ("ucx", "nccl"):
        return [setting]
    return [replace(setting, staged=StagedVariant(name)) for name in asked.staged_variants.split(",")]


def run_link(report: Report, asked: argparse.Namespace, transport: str, works: Sequence[Work]) -> None:
    names = asked.copy_variants.split(",") if asked.copy_variants and transport == "cuda_ipc" else []
    for setting in settings_of(asked, report.shape, transport, max(work.num_blocks for work in works)):
        for row in measure_link(setting, works, [CopyVariant(name) for name in names]):
            report.link.append(row)
            print(link_line(row, report.limit), flush=True)


def run_workers(report: Report, asked: argparse.Namespace, transport: str, works: Sequence[Work]) -> None:
    device = report.device
    steps = STEPS[device] if asked.steps is None else asked.steps
    most = max(work.total_tokens for work in works)
    load = Load(device, report.shape, transport, most, BATCHES[device], CONTEXTS[device], steps)
    for row in measure_workers(load, works):
        report.workers.append(row)
        print(worker_line(row), flush=True)


def run(report: Report, asked: argparse.Namespace, works: Sequence[Work], path: Path | None) -> None:
    parts = asked.parts.split(",")
    print("\n".join(report.machine), flush=True)
    for copy in plain_copies(report.device):
        report.limits.append(copy)
        if "limit" in parts:
            print(f"plain copy of {copy.num_bytes:>11} B: {copy.gigabytes_per_second:8.2f} GB/s", flush=True)
    todo = {"link": (LINK_HEAD, run_link), "workers": (WORKER_HEAD, run_workers)}
    for part in (part for part in parts if part in todo):
        head, measure = todo[part]
        print(head, flush=True)
        for transport in (asked.transports or TRANSPORTS[report.device]).split(","):
            try:
                measure(report, asked, transport, works)
            except (LinkFailed, WorkersFailed) as error:
                report.failures.append(f"{part} over {transport}: {error}")
                print(report.failures[-1], flush=True)
            if path is not None:
                report.write(path)


def main() -> None:
    asked = parsed()
    shape = asked.shape or DEFAULT_SHAPES[asked.device]
    date = datetime.now(UTC).isoformat(timespec="seconds")
    versions = f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()}"
    report = Report(asked.device, shape, date, [versions, *machine()])
    path = asked.results / f"{asked.name}-{asked.device}-{shape}.json" if asked.results else None
    run(report, asked, works_of(asked, asked.max_tokens or MAX_TOKENS[asked.device]), path)
    if path is not None:
        report.write(path)
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
