"""The router as a real process: its port, its signals, its end."""

import asyncio
import contextlib
import errno
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from crossdock.core.messages import Incarnation, Peer
from crossdock.router.server import listen
from crossdock.router.text import TextModel

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import ScriptedWorker

SCRIPT = """
import asyncio, logging, sys
from pathlib import Path
from crossdock.core.config import RouterConfig
from crossdock.core.mailbox import AsyncMailbox
from crossdock.core.messages import Incarnation
from crossdock.router.server import listen, serve_router
from crossdock.router.text import load_text

async def idle():
    await asyncio.Event().wait()

logging.basicConfig(level=logging.INFO)
config = RouterConfig(model="toy", port=int(sys.argv[2]), drain_seconds=float(sys.argv[3]))
listener = listen(config.host, config.port)
mailbox = AsyncMailbox(config.control_host, config.control_port, Incarnation("router"))
print(listener.getsockname()[1], mailbox.peer.address, flush=True)
serve_router(config, listener, mailbox, load_text(Path(sys.argv[1])), idle)
"""


class RouterProcess:
    """``crossdock router`` without its command line."""

    def __init__(self, folder: Path, drain_seconds: float = 5.0, port: int = 0) -> None:
        arguments = [sys.executable, "-c", SCRIPT, str(folder), str(port), str(drain_seconds)]
        self.process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        words = self.process.stdout.readline().split()
        self.url = f"http://127.0.0.1:{words[0]}" if words else ""
        self.control = Peer(words[1], Incarnation("router")) if words else None

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    async def wait(self, seconds: float) -> int:
        return await asyncio.to_thread(self.process.wait, seconds)

    def close(self) -> tuple[str, str]:
        self.process.kill()
        return self.process.communicate()


@pytest.fixture
def folder(text: TextModel, tmp_path: Path) -> Path:
    text.tokenizer.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": "<eos>", "chat_template": "{{ messages[0]['content'] }}"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


Start = Callable[..., Awaitable[tuple[RouterProcess, "ScriptedWorker", httpx.AsyncClient]]]


@pytest.fixture
async def start(folder: Path, new_worker: "Callable[[Peer], ScriptedWorker]") -> AsyncIterator[Start]:
    """Starts a router process with one mixed worker, ready for requests."""
    async with contextlib.AsyncExitStack() as ends:

        async def started(drain_seconds: float = 5.0) -> tuple[RouterProcess, "ScriptedWorker", httpx.AsyncClient]:
            router = await asyncio.to_thread(RouterProcess, folder, drain_seconds)
            ends.callback(router.close)
            assert router.control is not None
            worker = new_worker(router.control)
            ends.push_async_callback(worker.close)
            client = await ends.enter_async_context(httpx.AsyncClient(base_url=router.url, timeout=10))
            await healthy(client)
            return router, worker, client

        yield started


async def healthy(client: httpx.AsyncClient) -> None:
    for _ in range(300):
        if (await client.get("/health")).status_code == 200:
            return
        await asyncio.sleep(0.05)
    pytest.fail("the router was not healthy within 15 seconds")


BODY = {"model": "toy", "prompt": "say hello", "stream": True, "max_tokens": 30, "ignore_eos": True}


async def stream(client: httpx.AsyncClient, first: asyncio.Event) -> list[str]:
    """The events of a streamed request; ``first`` is set when some have come."""
    received = ""
    async with client.stream("POST", "/v1/completions", json=BODY) as response:
        async for part in response.aiter_text():
            received += part
            first.set()
    return [event.removeprefix("data: ") for event in received.split("\n\n") if event]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains_the_router_and_it_exits_with_0(start: Start, number: signal.Signals) -> None:
    router, worker, client = await start()
    worker.behaviour.seconds_a_token = 0.05
    first = asyncio.Event()
    running = asyncio.create_task(stream(client, first))
    await asyncio.wait_for(first.wait(), 5)
    router.send(number)
    await asyncio.sleep(0.2)
    async with httpx.AsyncClient(base_url=router.url) as late:
        assert (await late.get("/health")).status_code == 503
        assert (await late.post("/v1/completions", json=BODY)).status_code == 503
    events = await running
    assert (len(events), events[-1]) == (31, "[DONE]")
    assert await router.wait(5) == 0
    assert "Traceback" not in router.close()[1]


async def test_a_drain_is_bounded_and_the_client_told(start: Start) -> None:
    router, worker, client = await start(drain_seconds=0.3)
    worker.behaviour.seconds_a_token = 0.2
    first = asyncio.Event()
    running = asyncio.create_task(stream(client, first))
    await asyncio.wait_for(first.wait(), 5)
    router.send(signal.SIGTERM)
    events = await running
    assert json.loads(events[-1])["error"]["message"] == "the router is shutting down"
    assert await router.wait(5) == 0


async def test_a_second_signal_ends_it_at_once(start: Start) -> None:
    router, worker, client = await start(drain_seconds=60)
    worker.behaviour.seconds_a_token = 1
    first = asyncio.Event()
    running = asyncio.create_task(stream(client, first))
    await asyncio.wait_for(first.wait(), 5)
    router.send(signal.SIGINT)
    await asyncio.sleep(0.2)
    began = time.monotonic()
    router.send(signal.SIGINT)
    assert await router.wait(5) == 0
    assert time.monotonic() - began < 3
    with contextlib.suppress(httpx.RemoteProtocolError):
        await running
    assert "Traceback" not in router.close()[1]


async def test_an_idle_router_costs_next_to_nothing(start: Start) -> None:
    router, _, _ = await start()
    before = cpu_seconds(router.process.pid)
    await asyncio.sleep(2)
    assert cpu_seconds(router.process.pid) - before <= 0.1
    assert resident_mib(router.process.pid) < 300


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


def resident_mib(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmRSS"))


def test_a_port_in_use_is_told_with_its_name_before_anything_is_loaded() -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}") as raised:
            listen("127.0.0.1", port)
        assert raised.value.errno == errno.EADDRINUSE


async def test_a_port_in_use_ends_the_process_at_once(folder: Path) -> None:
    with listen("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        router = await asyncio.to_thread(RouterProcess, folder, 5.0, port)
        assert await router.wait(5) == 1
        assert f"cannot listen on 127.0.0.1:{port}" in router.close()[1]


def test_side_ports_never_take_the_api_s() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
