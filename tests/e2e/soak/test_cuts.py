"""Networks that break and heal: every process on a host of its own, in a network namespace."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

import pytest

from ..questions import Question, random_questions
from ..server import free_port
from .fleet import Fleet, Place
from .meddler import ROUTER
from .namespaces import Network
from .visitors import Visitors

WORKERS = ("prefill-0", "decode-0")
CUT_SECONDS = (1.0, 5.0, 20.0)
NUM_REGULARS = 6

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(400),
    # Text, so that it is asked when a test is about to run: to ask is to make a namespace.
    pytest.mark.skipif("not Network.can_be_made()", reason="needs iproute2 and root: sudo make test ARGS=--full"),
]

Cut = Callable[[Network], None]


@pytest.fixture(scope="module")
def questions(small_model: Path) -> Sequence[Question]:
    return random_questions(small_model, 8, longest_prompt=400, num_tokens=64)


@pytest.fixture
def network() -> Iterator[Network]:
    with closing(Network((ROUTER, *WORKERS))) as made:
        yield made


def places_on(network: Network, control_port: int) -> dict[str, Place]:
    reports_to = f"tcp://{network.address(ROUTER)}:{control_port}"
    return {
        name: Place(network.address(name), network.command_prefix(name), reports_to if name != ROUTER else "")
        for name in (ROUTER, *WORKERS)
    }


@pytest.mark.parametrize("transport", ["tcp", "ucx"])
def test_links_may_be_cut_and_healed(
    transport: str,
    network: Network,
    small_model: Path,
    tmp_path: Path,
    questions: Sequence[Question],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")  # these hosts have one memory, which UCX would find
    monkeypatch.setenv("UCX_NET_DEVICES", "eth0")
    control_port = free_port()
    flags = (f"--transports={transport}", "--num-blocks=64", "--chunk-tokens=64")
    fleet = Fleet(small_model, tmp_path, places_on(network, control_port), control_port, lambda place: flags)
    try:
        fleet.settle()
        for seconds in CUT_SECONDS:
            for cut, heal in cuts_of(network):
                cut_under_load(fleet, questions, seconds, cut, heal)
    finally:
        faults = fleet.stop()
    assert faults == []


def cuts_of(network: Network) -> Iterator[tuple[Callable[[], None], Callable[[], None]]]:
    prefill, decode = WORKERS
    yield lambda: network.part(prefill, decode), lambda: network.join(prefill, decode)
    yield lambda: network.pull(prefill), lambda: network.plug(prefill)
    yield lambda: network.part(decode, ROUTER), lambda: network.join(decode, ROUTER)


def cut_under_load(
    fleet: Fleet, questions: Sequence[Question], seconds: float, cut: Callable[[], None], heal: Callable[[], None]
) -> None:
    visitors = Visitors(questions, fleet.router.url, NUM_REGULARS, seed=round(seconds))
    try:
        fleet.router.wait_for(lambda: visitors.num_right >= NUM_REGULARS, 20)
        cut()
        try:
            time.sleep(seconds)
        finally:
            heal()
        num_right = visitors.num_right
        fleet.router.wait_for(lambda: visitors.num_right >= num_right + 2 * NUM_REGULARS, 90)
    finally:
        visitors.leave()
    assert visitors.faults == []
    assert fleet.settle().unfinished == {}
    assert fleet.faults == []
