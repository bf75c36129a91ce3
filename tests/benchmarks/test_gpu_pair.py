"""The command for two GPUs loses nothing: sections that fail or hang are ended, told, and the next ones run."""

import os
import sys
import time
from pathlib import Path

import pytest

from crossdock.benchmarks.gpu_pair import Section, run, sections, verdicts


def section(name: str, program: str, seconds: float = 20.0, is_measured: bool = True) -> Section:
    return Section(name, seconds, (sys.executable, "-c", program), is_measured)


def test_a_section_that_hangs_ends_with_all_its_children_and_the_next_one_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hang = (
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print('child', child.pid, flush=True)\ntime.sleep(60)"
    )
    todo = [section("hangs", hang, 1.5), section("fails", "print('half'); raise SystemExit(3)"), section("works", "")]
    begun = time.monotonic()
    outcomes = dict(run(todo, tmp_path, 60.0))
    assert time.monotonic() - begun < 10
    assert [outcome.split(",")[0] for outcome in outcomes.values()] == ["ended: out of time", "status 3", "done"]
    assert "half" in capsys.readouterr().out
    child = int((tmp_path / "hangs.log").read_text().split()[1])
    end = time.monotonic() + 5
    while Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().rpartition(")")[2][:3]:
        assert time.monotonic() < end, "it outlived its section"
        time.sleep(0.01)


def test_checks_run_side_by_side_and_what_finds_no_time_is_told(tmp_path: Path) -> None:
    wait = "import time; print(time.monotonic(), flush=True); time.sleep(2); print(time.monotonic())"
    todo = [section(f"check {number}", wait, is_measured=False) for number in range(3)]
    outcomes = dict(run([*todo, section("late", "")], tmp_path, 6.9))
    times = [[float(line) for line in (tmp_path / f"{each.name}.log").read_text().splitlines()] for each in todo]
    assert max(begun for begun, _ in times) < min(ended for _, ended in times)
    assert list(outcomes) == ["check 0", "check 1", "check 2", "late"]
    assert outcomes["late"] == "not begun: out of time"


def test_every_section_for_gpus_is_a_script_of_this_checkout(tmp_path: Path) -> None:
    for each in sections(tmp_path, "cuda"):
        files = [part for part in each.command if part.endswith(".py")]
        assert files
        assert all(os.path.exists(file) for file in files)
    assert sum(each.seconds for each in sections(tmp_path, "cuda") if each.is_measured) < 900


def worker_row(transport: str, share: float, busy: float) -> dict[str, object]:
    rates = {"rate_alone": 100.0, "rate_shipping": 99.0, "exposed_share": share, "seen_share": share}
    gaps = {"quiet": {"p50": 5.0, "p99": 10.0}, "busy": {"p50": 5.0, "p99": busy}}
    return {"transport": transport, "num_tokens": 8192, "num_at_once": 1, **rates, **gaps}


def test_verdicts_compare_what_was_measured_with_what_was_asked_for() -> None:
    link = [
        {"transport": name, "variant": variant, "num_tokens": 8192, "num_at_once": 1, "gigabytes_per_second": rate}
        for name, variant, rate in (("cuda_ipc", "", 350.0), ("cuda_ipc", "24x16x64x1", 370.0), ("ucx", "", 300.0))
    ]
    copies = [{"num_bytes": 1, "gigabytes_per_second": 999.0}, {"num_bytes": 2, "gigabytes_per_second": 400.0}]
    workers = [worker_row("cuda_ipc", 0.01, 10.4), worker_row("ucx", 0.03, 11.0)]
    reports = [{"limits": copies, "link": link, "workers": workers}]
    told = {verdict.what: verdict for verdict in verdicts(reports, {"tests": "done, 3 s", "parity": "status 1, 2 s"})}
    assert told["plain copy, GB/s"].found == "400"
    assert [told[f"{name}: 1 x 8192 tokens"].is_met for name in ("cuda_ipc", "ucx", "nccl")] == [True, False, None]
    assert told["cuda_ipc: best variant"].found == "24x16x64x1: 370 GB/s"
    for what, met in (("exposed share of TTFT, told", [True, False]), ("p99 ITL up", [True, False])):
        assert [told[f"{name}: {what}"].is_met for name in ("cuda_ipc", "ucx")] == met
    assert told["cuda_ipc: prefill slowed"].is_met is True
    assert (told["tests"].is_met, told["parity"].is_met) == (True, False)
