"""Servers for clients that live in a virtual environment of their own."""

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ..e2e.models import chat_model
from ..e2e.server import Server, serving

ROOT = Path(__file__).parents[2]
BIN = ROOT / ".venv-clients" / "bin"
SCRIPTS = Path(__file__).parent / "scripts"

ENVIRONMENT = {
    **{name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "HF_HUB_OFFLINE")},
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it waits for the internet
    "LANGSMITH_TRACING": "false",
}

RunClient = Callable[..., object]
RunTool = Callable[..., str]


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The demo model on a prefill and a decode worker."""
    with serving("demo", tmp_path_factory.mktemp("clients") / "log") as server:
        yield server


@pytest.fixture(scope="session")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("small_model"))


@pytest.fixture(scope="session")
def small_server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A worker that prefills and decodes, for clients that measure and need the model's folder for that."""
    log = tmp_path_factory.mktemp("clients") / "log"
    flags = ("--mixed", "1", "--served-model-name", "small", "--pooling", "mean", "--max-model-len", "512")
    with serving(small_model, log, *flags) as server:
        yield server


@pytest.fixture(scope="session")
def run_tool(tmp_path_factory: pytest.TempPathFactory) -> RunTool:
    """Run a program of the clients' environment; what it printed."""
    folder = tmp_path_factory.mktemp("what_tools_leave")

    def run(*command: str, stdin: str = "", seconds: float = 100) -> str:
        assert BIN.is_dir(), "the clients are not installed: run `make clients`"
        line = [str(BIN / command[0]), *command[1:]]
        done = subprocess.run(
            line, input=stdin, capture_output=True, text=True, env=ENVIRONMENT, timeout=seconds, cwd=folder
        )
        assert done.returncode == 0, f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    return run


@pytest.fixture(scope="session")
def run_client(run_tool: RunTool) -> RunClient:
    """Run a script against a server; what it saw."""

    def run(script: str, server: Server, *arguments: str, stdin: str = "") -> object:
        path = SCRIPTS / f"{script}.py"
        return json.loads(run_tool("python", "-P", str(path), server.url, *arguments, stdin=stdin))

    return run
