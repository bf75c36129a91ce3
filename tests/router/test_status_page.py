"""The status page in a real browser, and the numbers that it is drawn from."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import httpx
import pytest
import uvicorn

from crossdock.core.config import DoorConfig
from crossdock.core.messages import Incarnation, Link, Peer, Role, TriedTransport
from crossdock.router.access.access import Access
from crossdock.router.app import create_app
from crossdock.router.history import NUM_POINTS, WINDOW_SECONDS, History, Totals, Window
from crossdock.router.server import listen
from crossdock.router.status import Status

from .chromium import EXECUTABLE, Chromium

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import Cluster, Wait

T = TypeVar("T")
WATCH_ANSWER = """
var watched = [], answer = document.getElementById("answer");
new MutationObserver(() => watched.push(answer.textContent.length)).observe(answer, { childList: true, subtree: true });
"""
PAIR = (Role.PREFILL, Role.DECODE)
needs_chromium = pytest.mark.skipif(EXECUTABLE is None, reason="needs Chromium on the PATH: apt-get install chromium")

# --- the history -----------------------------------------------------------------------------------


def test_rates_are_between_two_samples_and_the_hit_rate_is_over_the_window() -> None:
    totals = [Totals(), Totals(100, 0, 40, 1), Totals(200, 50, 50, 3)]
    history = History(iter(totals).__next__)
    for second, (num_running, num_waiting) in enumerate([(0, 0), (2, 1), (3, 0)]):
        history.sample(num_running, num_waiting, now=10.0 + 2 * second)
    one, other = history.since(0)
    assert (one.at, one.output_tokens_per_second, one.requests_per_second, one.hit_rate) == (12.0, 20, 0.5, 0)
    assert (other.prompt_tokens_per_second, other.output_tokens_per_second, other.hit_rate) == (50, 5, 0.25)
    assert (other.num_running, other.num_waiting, other.ttft_p50) == (3, 0, None)


def test_a_window_forgets_what_is_older_than_itself() -> None:
    window = Window()
    for n in range(1, 6):
        window.observe(float(n), now=float(n))
    assert window.percentiles(5.0, 0.5, 1.0) == [3.0, 5.0]
    assert window.percentiles(WINDOW_SECONDS + 3, 0.0, 1.0) == [4.0, 5.0]
    assert window.percentiles(100.0, 0.5) == [None]


def test_the_oldest_points_are_forgotten_and_the_numbers_go_on() -> None:
    history = History(Totals)
    for second in range(NUM_POINTS + 11):
        history.sample(0, 0, now=float(second))
    assert (history.num_points, len(list(history.since(0)))) == (NUM_POINTS + 10, NUM_POINTS)
    assert [point.at for point in history.since(NUM_POINTS + 8)] == [NUM_POINTS + 9, NUM_POINTS + 10]
    assert list(history.since(NUM_POINTS + 10)) == list(history.since(10**30)) == []


# --- /status.json ----------------------------------------------------------------------------------


async def test_the_status_tells_of_workers_and_requests_and_of_no_prompt(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    prefill, decode = await cluster.add(*PAIR)
    await client.post("/v1/completions", json={"prompt": "a secret", "max_tokens": 2})
    worker = cluster.dispatcher.fleet.find(prefill.mailbox.peer)
    assert worker is not None
    tried = TriedTransport("shm", error="torn"), TriedTransport("tcp", 2e9, 1e-5, detail="x")
    link = Link(to=decode.mailbox.peer.incarnation, transport="shm", error="torn", tried=tried)
    cluster.dispatcher.fleet.link(worker, link)
    stranger = Peer("tcp://127.0.0.1:9", Incarnation("x"))
    cluster.dispatcher.fleet.refuse(stranger, "model differs", time.monotonic() - 5)
    response = await client.get("/status.json")
    status = Status.model_validate_json(response.content)
    assert "secret" not in response.text
    assert (status.is_ready, status.max_model_len, status.block_size, status.has_chat_template) == (False, 0, 16, True)
    assert [worker.role for worker in status.workers] == ["prefill", "decode"]
    assert status.workers[0].blocks == {"free": 64, "cached": 0, "leased": 0, "quarantined": 0}
    assert [(link.to, link.error) for link in status.workers[0].links] == [(status.workers[1].name, "torn")]
    shown = status.workers[0].links[0].tried
    assert [(one.name, one.bytes_per_second, one.error) for one in shown] == [("shm", 0, "torn"), ("tcp", 2e9, "")]
    assert [one.detail for one in shown] == ["", "x"]
    assert [(refusal.name, refusal.reason) for refusal in status.refused] == [("127.0.0.1:9", "model differs")]
    assert 5 <= status.refused[0].seconds_ago < 30
    assert (status.requests.running, status.requests.waiting, status.requests.ended["length"]) == (0, 0, 1)


async def test_only_points_that_are_new_to_the_asker_are_sent(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    now = asyncio.get_running_loop().time()
    for second in range(5):
        cluster.router.metrics.sample(cluster.dispatcher.ledger, now + second)
    first = Status.model_validate_json((await client.get("/status.json")).content).history
    assert (first.next, len(first.points)) == (4, 4)
    assert all(len(point) == len(first.fields) for point in first.points)
    later = Status.model_validate_json((await client.get("/status.json?after=3")).content).history
    assert (later.next, len(later.points)) == (4, 1)
    refused = await client.get("/status.json?after=-1")
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "after")


# --- in a browser ----------------------------------------------------------------------------------


@pytest.fixture
async def url(cluster: "Cluster") -> AsyncIterator[str]:
    async with served(cluster) as address:
        yield address


@asynccontextmanager
async def served(cluster: "Cluster") -> AsyncIterator[str]:
    """Where a browser finds the router meanwhile."""
    listener = listen("127.0.0.1", 0)
    server = uvicorn.Server(uvicorn.Config(create_app(cluster.router), lifespan="off", log_config=None, ws="none"))
    serving = asyncio.create_task(server._serve([listener]))
    yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    server.should_exit = server.force_exit = True
    await serving


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    chromium = Chromium(tmp_path / "profile")
    yield chromium
    chromium.close()


async def in_thread(story: Callable[[], T]) -> T:
    """The browser waits for a router that runs in this very loop."""
    return await asyncio.to_thread(story)


@needs_chromium
async def test_the_page_shows_the_workers_and_streams_an_answer(
    cluster: "Cluster", url: str, browser: Chromium
) -> None:
    _, decode = await cluster.add(*PAIR)
    cluster.says = "the <b>sky</b> is blue"
    decode.behaviour.seconds_a_token = 0.02

    def story() -> None:
        browser.open(url)
        browser.wait_for(lambda: browser.text("#state") == "ready")
        browser.wait_for(lambda: browser.evaluate("document.querySelectorAll('.worker').length") == 2)
        assert "prefill" in browser.text(".worker")
        assert "→" in browser.text(".worker")
        browser.evaluate(WATCH_ANSWER)
        browser.evaluate("document.getElementById('send').click()")
        browser.wait_for(lambda: "generated" in browser.text("#measured"))
        lengths = browser.evaluate("watched")
        assert len(lengths) > 3, "it is shown while it comes"
        assert lengths == sorted(lengths)
        assert browser.text("#answer") == cluster.says
        assert "23 generated" in browser.text("#measured")
        browser.wait_for(lambda: "p50" in browser.text("#charts"))

    await in_thread(story)
    assert browser.complaints == []


@needs_chromium
async def test_the_page_says_what_is_missing_and_why_a_request_is_refused(
    cluster: "Cluster", url: str, browser: Chromium
) -> None:
    def story() -> None:
        browser.open(url)
        browser.wait_for(lambda: browser.text("#state") == "not ready")
        assert browser.text("#reasons") == "no worker that prefills is here; no worker that decodes is here"
        browser.evaluate("document.getElementById('send').click()")
        browser.wait_for(lambda: browser.text("#measured") == "no pair of workers is ready")

    await in_thread(story)
    assert [complaint for complaint in browser.complaints if "503" not in complaint] == []


@needs_chromium
async def test_where_keys_are_needed_the_box_asks_for_one(cluster: "Cluster", browser: Chromium) -> None:
    await cluster.add(Role.MIXED)
    cluster.router.access = Access(DoorConfig(api_key="sesame"), "toy")

    def story(url: str) -> None:
        browser.open(url)
        browser.wait_for(lambda: browser.text("#state") == "ready")
        assert browser.evaluate("document.getElementById('key-label').hidden")
        browser.evaluate("document.getElementById('send').click()")
        browser.wait_for(lambda: not browser.evaluate("document.getElementById('key-label').hidden"))
        browser.evaluate("document.getElementById('key').value = 'sesame'")
        browser.wait_for(lambda: browser.evaluate("!document.getElementById('send').disabled"))
        browser.evaluate("document.getElementById('send').click()")
        browser.wait_for(lambda: browser.text("#answer") == "hello")

    async with served(cluster) as url:
        await asyncio.to_thread(story, url)
    assert [complaint for complaint in browser.complaints if "401" not in complaint] == []


@needs_chromium
async def test_stopping_lets_the_workers_off(cluster: "Cluster", url: str, browser: Chromium, wait: "Wait") -> None:
    _, decode = await cluster.add(*PAIR)
    cluster.says = "x" * 100
    decode.behaviour.seconds_a_token = 0.1

    def story() -> None:
        browser.open(url)
        browser.wait_for(lambda: browser.text("#state") == "ready")
        browser.evaluate("document.getElementById('send').click()")
        browser.wait_for(lambda: browser.text("#answer").startswith("xx"))
        browser.evaluate("document.getElementById('stop').click()")
        browser.wait_for(lambda: browser.text("#measured") == "stopped")

    await in_thread(story)
    await wait(cluster.is_empty)
    assert browser.complaints == []


@needs_chromium
async def test_the_api_page_shows_every_endpoint(client: httpx.AsyncClient, url: str, browser: Chromium) -> None:
    api = (await client.get("/openapi.json")).json()
    operations = [operation for methods in api["paths"].values() for operation in methods]

    def story() -> None:
        browser.open(url + "/docs")
        count = "document.querySelectorAll('section').length"
        browser.wait_for(lambda: browser.evaluate(count) == len(operations))
        browser.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
        browser.wait_for(lambda: "max_tokens" in browser.text("#chat_completions"))

    await in_thread(story)
    assert browser.complaints == []
