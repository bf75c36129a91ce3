"""Makes `crossdock` importable by its name only; keeps tests off the network and on one core each."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The root on the path would offer `model`, `core` and `kernels` as top-level packages, and transformers takes the last.
sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != ROOT]
if importlib.util.find_spec("crossdock") is None:
    sys.path.append(str(ROOT / ".typing"))

os.environ.setdefault("OMP_NUM_THREADS", "1")
if not Path("/dev/nvidiactl").exists():
    # Triton decides when it is first imported, by whichever test that is, whether its kernels run in the interpreter.
    os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="also what takes a quarter of an hour")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "full: takes minutes, so that it runs with --full only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skipif(True, reason='takes minutes: make test ARGS="--full"'))


@pytest.fixture(scope="session")
def is_full(request: pytest.FixtureRequest) -> bool:
    return bool(request.config.getoption("--full"))
