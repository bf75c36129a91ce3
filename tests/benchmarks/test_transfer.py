"""The benchmark of transfers runs from end to end: real processes, a small model, every part of the report filled."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from crossdock.benchmarks import transfer
from crossdock.benchmarks.played_router import Watched
from crossdock.benchmarks.transfer_link import CopyVariant
from crossdock.benchmarks.transfer_shapes import SHAPES, Work, layout_of
from crossdock.core.messages import StageTimes, TokenDelta
from crossdock.core.request import RequestId
from crossdock.core.sequence import FinishReason

PARTS = ("link", "workers")


@pytest.mark.timeout(180)
def test_a_small_run_prints_a_line_a_work_and_writes_all_of_it(tmp_path: Path) -> None:
    sizes = ("--tokens=40", "--at-once=1,2,99", "--max-tokens=512", "--steps=6")
    command = [sys.executable, "-P", str(transfer.__file__), "--shape=small", "--transports=shm,absent", *sizes]
    ran = subprocess.run([*command, f"--results={tmp_path}"], capture_output=True, text=True, timeout=170)
    assert ran.returncode == 1, "one transport is not there"
    report = json.loads((tmp_path / "transfer-cpu-small.json").read_text())
    asked = [("shm", 40, 1), ("shm", 40, 2)]
    told = {part: [(row["transport"], row["num_tokens"], row["num_at_once"]) for row in report[part]] for part in PARTS}
    assert told == {"link": [asked[0], asked[0], asked[1], asked[1]], "workers": asked}, ran.stdout
    assert [row["variant"] for row in report["link"]] == ["", "joined"] * 2
    assert all(row["gigabytes_per_second"] > 0 for row in report["link"] + report["limits"])
    assert all(row["rate_alone"] > 0 and row["busy"]["p99"] >= row["busy"]["p50"] > 0 for row in report["workers"])
    assert [failure.split(":")[0] for failure in report["failures"]] == ["link over absent", "workers over absent"]
    assert sum(line.startswith("shm") for line in ran.stdout.splitlines()) == 6


def test_shapes_have_the_layout_of_their_model() -> None:
    assert (layout_of("llama-8b").block_bytes, layout_of("llama-8b").dtype) == (2 << 20, "bfloat16")
    assert layout_of("demo").layer_bytes == 2 * 3 * 16 * 64 * 4
    assert set(SHAPES) == {"small", "demo", "llama-8b"}
    assert Work(8192, 8).total_tokens == 65_536


def test_variants_of_the_copy_are_told_in_numbers() -> None:
    assert CopyVariant("24x16x64x1").numbers == CopyVariant("24x16x64x1s").numbers == [24, 16, 64, 1]


def test_a_second_token_that_overtakes_the_first_waits_for_it() -> None:
    request, name = Watched(sent_at=10.0), RequestId("r")
    request.take(TokenDelta(name, 1, 7, times=StageTimes(0.5, transfer_seconds=0.25)), 12.0)
    assert request.token_ids == []
    request.take(TokenDelta(name, 0, 5), 12.5)
    request.take(TokenDelta(name, 2, 9, FinishReason.LENGTH), 13.0)
    assert (request.token_ids, request.came_at, request.is_finished) == ([5, 7, 9], [12.5, 12.0, 13.0], True)
    assert (request.first_token_seconds, request.transfer_seconds, request.decode_queue_seconds) == (2.5, 0.25, 0.5)
