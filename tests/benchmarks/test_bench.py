"""The command itself: what it asks for, what it prints, how it refuses."""

from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from crossdock.benchmarks.bench import bench

NOBODY = "http://127.0.0.1:1"

app = typer.Typer()
app.command()(bench)


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, [*arguments], env={"COLUMNS": "200"})
    return result.exit_code, result.output


def test_a_run_in_which_everything_failed_is_reported_and_ends_with_one() -> None:
    status, output = run(NOBODY, "--model", "demo", "-n", "2")
    assert status == 1
    assert output.startswith("requests  0 of 2 in ")
    assert "failed    2 x ConnectionRefusedError" in output


def test_the_report_is_written_as_json_too(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    run(NOBODY, "--model", "demo", "-n", "3", "--json", str(file))
    assert '"num_failed": 3' in file.read_text()


def test_a_trace_is_cut_to_what_fits(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [f'{{"timestamp": 0, "input_length": {length}, "output_length": 10}}\n' for length in (50, 500, 60, 70)]
    trace.write_text("".join(lines))
    _, output = run(NOBODY, "--model", "demo", "--trace", str(trace), "--max-len", "100", "-n", "2")
    assert output.startswith("requests  0 of 2 in ")


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ((NOBODY,), "no model to be had from http://127.0.0.1:1"),
        (("--model", "demo", "--prompt-tokens", "9:2"), "lengths from 9 to 2"),
        (("--model", "demo", "--extra", "[]"), "'[]' is no JSON object"),
        (("--model", "demo", "--trace", __file__), "is no trace"),
    ],
)
def test_what_cannot_be_run_is_refused_with_the_value_in_it(arguments: tuple[str, ...], reason: str) -> None:
    status, output = run(*arguments)
    assert status == 2
    assert reason in output
