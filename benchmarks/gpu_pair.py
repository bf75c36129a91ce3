"""Everything about transfers that two linked GPUs have to show, in one command of less than ten minutes.

    python benchmarks/gpu_pair.py --results OUT

Sections run one after the other, each with a time of its own: tests of the transports on the GPUs, greedy parity of a
pair with one mixed worker, plain copies, GB/s over each link, real workers under load, variants of the copy kernel and
of staged pieces. What a section prints and writes is shown and kept as soon as it ends, in one JSON file; one that
fails or hangs is ended, and the next begins. Last comes a short table: what was asked for, what was measured.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOTAL_SECONDS = 540.0
MIN_SECONDS = 5.0
ROOT = Path(__file__).resolve().parent.parent
TESTS = ("tests/kvtransfer/test_cuda_ipc.py", "tests/kvtransfer/test_device_pool.py", "tests/kernels/test_kv_copy.py")
PARITY = "tests/e2e/test_gpu_parity.py"
COPIES = ("24x16x64x1", "16x16x64x1", "132x8x64x1", "1000000x8x32x1")
"""Of the kernel. Of so many programs as in the last there are as many as there are tiles: each copies one."""
STAGED = {
    "ucx": ("256x4x128x32x48", "256x4x128x32x24", "256x4x128x32x16x132", "256x4x64", "256x6x128"),
    "nccl": ("256x4x128x32x48", "256x4x128x32x24", "256x4x128x32x16x132", "256x4x64", "256x4x256"),
}
ASKED_TOKENS = 8192
MIN_EXPOSED_TOKENS = 2048
SHOWN_CHARACTERS = 2500
PATHS = [str(ROOT / ".typing"), *filter(None, [os.environ.get("PYTHONPATH")])]
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(PATHS), "PYTHONUNBUFFERED": "1"}
"""Children import this very copy, and show what they print at once."""


@dataclass(frozen=True, slots=True)
class Section:
    """A command that may take ``seconds``. Those that measure nothing run side by side."""

    name: str
    seconds: float
    command: tuple[str, ...]
    is_measured: bool = True


def sections(folder: Path, device: str) -> list[Section]:
    """What matters most comes first. ``folder`` is for their files."""
    rivals = ["ucx", *(["nccl"] if (ROOT / "kvtransfer" / "nccl.py").exists() else [])]
    transfer = (sys.executable, "-P", str(ROOT / "benchmarks" / "transfer.py"), f"--device={device}")

    def bench(name: str, *more: str) -> tuple[str, ...]:
        return (*transfer, f"--results={folder}", f"--name={name}", *size, *more)

    is_gpu = device == "cuda"
    size = [] if is_gpu else ["--shape=small", "--max-tokens=512", "--steps=20"]
    longest = ASKED_TOKENS if is_gpu else 512
    few = (f"--tokens=2048,{longest}" if is_gpu else f"--tokens={longest}", "--at-once=1,8")
    sweep = ("--parts=link", f"--tokens={longest}", "--at-once=1")
    first, *others = ("cuda_ipc", *rivals) if is_gpu else ("shm", "ucx")
    variants = [f"--copy-variants={','.join(COPIES)}"] if is_gpu else []
    return [
        Section("tests", 120, _pytest(*TESTS), is_measured=False),
        Section("parity", 150, _pytest(PARITY), is_measured=False),
        Section("limit", 40, bench("limit", "--parts=limit")),
        Section(f"link-{first}", 60, bench(f"link-{first}", "--parts=link", f"--transports={first}")),
        Section(f"workers-{first}", 150, bench(f"workers-{first}", "--parts=workers", f"--transports={first}")),
        *(Section(f"link-{n}", 45, bench(f"link-{n}", "--parts=link", f"--transports={n}")) for n in others),
        Section("copies", 50, bench("copies", *sweep, f"--transports={first}", *variants)),
        *(
            Section(f"workers-{n}", 70, bench(f"workers-{n}", "--parts=workers", *few, f"--transports={n}"))
            for n in others
        ),
        *(
            Section(f"staging-{n}", 60, bench(f"staging-{n}", *sweep, f"--transports={n}", f"--staged-variants={s}"))
            for n, s in ((n, ",".join(STAGED[n])) for n in others)
        ),
        Section("scattered", 30, bench("scattered", *sweep, f"--transports={first}", "--run-blocks=1")),
        Section("tcp", 40, bench("tcp", *sweep, "--transports=tcp")),
    ]


def _pytest(*files: str) -> tuple[str, ...]:
    """Without the project's settings, which ask for plugins that a GPU machine may lack."""
    options = ("-c", os.devnull, f"--rootdir={ROOT}", "--import-mode=importlib", "-p", "no:cacheprovider", "-q", "-rs")
    return (sys.executable, "-P", "-m", "pytest", *options, "--durations=5", *(str(ROOT / file) for file in files))


@dataclass(slots=True)
class Running:
    """A section's process; its output goes to ``log`` and, when it has ended, to whoever looks on."""

    section: Section
    process: "subprocess.Popen[bytes]"
    log: Path
    deadline: float
    begun: float

    @classmethod
    def begin(cls, section: Section, log: Path, seconds: float) -> "Running":
        now = time.monotonic()
        with log.open("wb") as output:
            process = subprocess.Popen(
                section.command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=ENVIRONMENT
            )
        return cls(section, process, log, now + seconds, now)

    def end(self) -> str:
        """How it ended. Its whole session is gone then."""
        try:
            status = self.process.wait(max(0.0, self.deadline - time.monotonic()))
            outcome = "done" if status == 0 else f"status {status}"
        except subprocess.TimeoutExpired:
            outcome = "ended: out of time"
        _kill_session(self.process)
        return f"{outcome}, {time.monotonic() - self.begun:.0f} s"


def _kill_session(process: "subprocess.Popen[bytes]") -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has ended with all its children
    process.wait()


def run(todo: Sequence[Section], folder: Path, total_seconds: float) -> Iterator[tuple[str, str]]:
    """The name of each section and how it ended, as they end."""
    end = time.monotonic() + total_seconds
    checks = [section for section in todo if not section.is_measured]
    for batch in [checks, *([section] for section in todo if section.is_measured)]:
        left = end - time.monotonic()
        if left < MIN_SECONDS:
            yield from ((section.name, "not begun: out of time") for section in batch)
            continue
        running = [Running.begin(each, folder / f"{each.name}.log", min(each.seconds, left)) for each in batch]
        for each in running:
            outcome = each.end()
            print(f"===== {each.section.name}: {outcome}")
            print(each.log.read_text(errors="replace")[-SHOWN_CHARACTERS:], flush=True)
            yield each.section.name, outcome


# --- what was asked for ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Verdict:
    """``is_met`` is ``None`` where nothing was measured."""

    what: str
    wanted: str
    found: str
    is_met: bool | None

    def __str__(self) -> str:
        mark = {True: "yes", False: "NO", None: "-"}[self.is_met]
        return f"{self.what:<52}{self.wanted:>10}{self.found:>28}{mark:>6}"


def verdicts(reports: Sequence[dict[str, Any]], outcomes: dict[str, str]) -> Iterator[Verdict]:
    """From what the sections have written."""
    limit = max((copy["gigabytes_per_second"] for report in reports for copy in report["limits"][-1:]), default=None)
    yield Verdict("plain copy, GB/s", "", "-" if limit is None else f"{limit:.0f}", None)
    link = [row for report in reports for row in report["link"] if not row["variant"]]
    for transport, wanted in (("cuda_ipc", 0.85), ("ucx", 0.8), ("nccl", 0.8)):
        for number in (1, 8):
            asked = (transport, ASKED_TOKENS, number)
            rates = [
                row["gigabytes_per_second"]
                for row in link
                if (row["transport"], row["num_tokens"], row["num_at_once"]) == asked
            ]
            shares = [rate / limit for rate in rates] if limit else []
            found = f"{rates[0]:.0f} GB/s, {shares[0]:.1%}" if shares else "not measured"
            yield _at_least(f"{transport}: {number} x {ASKED_TOKENS} tokens", wanted, found, shares)
    for transport in ("cuda_ipc", "ucx", "nccl"):
        yield from _best_variant(transport, [row for report in reports for row in report["link"] if row["variant"]])
    rows = [row for report in reports for row in report["workers"]]
    for transport in ("cuda_ipc", "ucx", "nccl"):
        yield from _of_workers(transport, [row for row in rows if row["transport"] == transport])
    for name in ("tests", "parity"):
        yield Verdict(name, "pass", outcomes.get(name, "not run"), outcomes.get(name, "").startswith("done"))


def _best_variant(transport: str, rows: list[dict[str, Any]]) -> Iterator[Verdict]:
    own = [row for row in rows if row["transport"] == transport]
    if own:
        best = max(own, key=lambda row: row["gigabytes_per_second"])
        yield Verdict(
            f"{transport}: best variant", "", f"{best['variant']}: {best['gigabytes_per_second']:.0f} GB/s", None
        )


def _of_workers(transport: str, rows: list[dict[str, Any]]) -> Iterator[Verdict]:
    long = [row for row in rows if row["num_tokens"] >= MIN_EXPOSED_TOKENS]
    yield _at_most(f"{transport}: exposed share of TTFT, told", 0.02, [row["exposed_share"] for row in long])
    yield _at_most(f"{transport}: exposed share of TTFT, seen", 0.02, [row["seen_share"] for row in long])
    yield _at_most(f"{transport}: prefill slowed", 0.02, [1 - r["rate_shipping"] / r["rate_alone"] for r in long])
    gaps = [row for row in rows if row["quiet"] and row["num_at_once"] == 1]
    yield _at_most(f"{transport}: p99 ITL up", 0.05, [row["busy"]["p99"] / row["quiet"]["p99"] - 1 for row in gaps])


def _at_least(what: str, wanted: float, found: str, values: list[float]) -> Verdict:
    return Verdict(what, f">= {wanted:.0%}", found, min(values) >= wanted if values else None)


def _at_most(what: str, wanted: float, values: list[float]) -> Verdict:
    found = f"{min(values):.1%} .. {max(values):.1%}" if values else "not measured"
    return Verdict(what, f"<= {wanted:.0%}", found, max(values) <= wanted if values else None)


def main() -> None:
    parser = argparse.ArgumentParser(description="What two linked GPUs have to show, in one command.")
    parser.add_argument("--results", type=Path, required=True, help="Folder for logs and JSON files.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda", help="cpu tries the sections themselves.")
    parser.add_argument("--only", default="", help="Sections to run, comma-separated; all if empty.")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="For everything together.")
    asked = parser.parse_args()
    asked.results.mkdir(parents=True, exist_ok=True)
    only = set(filter(None, asked.only.split(",")))
    outcomes: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        todo = [each for each in sections(folder, asked.device) if not only or each.name in only]
        for section, outcome in run(todo, folder, asked.seconds):
            outcomes[section] = outcome
            reports = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
            logs = {path.stem: path.read_text(errors="replace") for path in sorted(folder.glob("*.log"))}
            found = {"outcomes": outcomes, "reports": reports, "logs": logs}
            (asked.results / "gpu-pair.json").write_text(json.dumps(found, indent=1) + "\n")
    lines = [f"{name:<20} {outcome}" for name, outcome in outcomes.items()]
    print("\n".join(["", *lines, "", *map(str, verdicts(reports, outcomes))]), flush=True)


if __name__ == "__main__":
    main()
