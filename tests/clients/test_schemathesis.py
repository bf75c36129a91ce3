"""The server keeps what `/openapi.json` says, whatever comes in: no 5xx, every answer of the described form."""

import re

import pytest

from ..e2e.server import Server
from .conftest import RunTool

NUM_OPERATIONS = 19
CHECKS = ("--exclude-checks", "positive_data_acceptance")
"""JSON Schema can't say what refuses some bodies: ids outside the vocabulary, fields that exclude each other."""


@pytest.mark.timeout(1000)
def test_two_thousand_cases_find_no_fault_and_no_answer_of_another_form(
    run_tool: RunTool, small_server: Server, is_full: bool
) -> None:
    """About 200 of them without ``--full``. A failure is told with the case's ``curl`` line."""
    how = ("--phases", "examples,coverage,fuzzing", "-n", "40") if is_full else ("--phases", "fuzzing", "-n", "14")
    quiet = ("--no-color", "--generation-database", "none", "--continue-on-failure", "--request-timeout", "60")
    command = ("st", "run", f"{small_server.url}/openapi.json", *how, *CHECKS, *quiet, "--workers", "1", "--seed", "1")
    printed = run_tool(*command, seconds=900)
    tested = re.search(r"(\d+) generated, (\d+) passed", printed)
    assert tested is not None, printed
    assert int(tested[2]) == int(tested[1]) >= (2000 if is_full else 8 * NUM_OPERATIONS)
    assert f"Tested: {NUM_OPERATIONS}" in printed
    small_server.settled()
