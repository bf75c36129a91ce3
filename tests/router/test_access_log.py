"""One line a request, after its end, of everything but what it said."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from crossdock.core.messages import RequestFailed, Role
from crossdock.core.request import RequestId, TransferId
from crossdock.router.access_log import MAX_PATH_CHARS, LineWriter
from crossdock.router.app import create_app
from crossdock.router.telemetry import Telemetry

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import Cluster, Wait

SECRET = "sesame"
BODY = {"prompt": SECRET, "max_tokens": 3}
PAIR = (Role.PREFILL, Role.DECODE)
Lines = list[dict[str, Any]]


class Log:
    """A log file and its writer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.writer = LineWriter(str(path))

    def lines(self) -> Lines:
        """Everything written; the log is closed."""
        self.writer.close()
        text = self.path.read_text()
        assert SECRET not in text
        return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def log(tmp_path: Path) -> Log:
    return Log(tmp_path / "access.log")


@pytest.fixture
async def logged(cluster: "Cluster", log: Log) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a router that keeps the log."""
    app = create_app(cluster.router, Telemetry(access_log=log.writer))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        yield http


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_completion_is_told_with_its_tokens_times_and_workers(
    cluster: "Cluster", logged: httpx.AsyncClient, log: Log, is_stream: bool
) -> None:
    prefill, decode = await cluster.add(*PAIR)
    headers = {"x-request-id": "mine", "authorization": f"Bearer {SECRET}"}
    response = await logged.post(f"/v1/completions?key={SECRET}", json={**BODY, "stream": is_stream}, headers=headers)
    assert response.status_code == 200
    (line,) = log.lines()
    assert line["time"].endswith("+00:00")
    assert 0 < line["ttft_ms"] <= line["duration_ms"]
    untimed = {name: value for name, value in line.items() if name not in ("time", "ttft_ms", "duration_ms")}
    assert untimed == {
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "request_id": "mine",
        "key": "anonymous",
        "model": "toy",
        "stream": is_stream,
        "prompt_tokens": 6,
        "cached_tokens": 0,
        "output_tokens": 3,
        "finish_reasons": ["length"],
        "workers": [worker.mailbox.peer.address.removeprefix("tcp://") for worker in (prefill, decode)],
        "attempts": 1,
    }


async def test_a_line_names_the_field_that_is_wrong_and_never_what_the_client_wrote(
    cluster: "Cluster", logged: httpx.AsyncClient, log: Log
) -> None:
    await cluster.add(Role.MIXED)
    await logged.post("/v1/completions", json={**BODY, "model": SECRET})
    await logged.post("/v1/completions", json={**BODY, SECRET: 1})
    await logged.post("/v1/completions", json={**BODY, "logit_bias": {SECRET: 1}})
    await logged.post("/v1/completions", json={**BODY, "max_tokens": 10_000})
    await logged.post("/v1/completions", content=f'{{"prompt": "{SECRET}"')
    await logged.get("/v1/models/" + "x" * 1000)
    lines = log.lines()
    assert [(line["status"], line["error"]) for line in lines] == [
        (404, "model_not_found: model"),
        (400, "unknown_parameter"),
        (400, "invalid_request_error: logit_bias"),
        (400, "context_length_exceeded: prompt"),
        (400, "invalid_request_error"),
        (404, "model_not_found: model"),
    ]
    assert len(lines[-1]["path"]) == MAX_PATH_CHARS
    assert all("model" not in line for line in lines)


async def test_failures_before_and_within_a_stream_are_told(
    cluster: "Cluster", logged: httpx.AsyncClient, log: Log
) -> None:
    await logged.post("/v1/completions", json=BODY)
    prefill, decode = await cluster.add(*PAIR)
    decode.behaviour.dies_after = 2
    cluster.dispatcher.fleet._dead_after = 0.5
    streamed = await logged.post("/v1/completions", json={**BODY, "stream": True})
    assert streamed.status_code == 200
    ids = (RequestId(""), TransferId(""))
    prefill.behaviour.fails_with = RequestFailed(request_id=ids[0], transfer_id=ids[1], reason="", is_retryable=True)
    none_left, broken = log.lines()
    assert (none_left["status"], none_left["error"]) == (503, "overloaded")
    assert (broken["status"], broken["error"], broken["finish_reasons"]) == (200, "overloaded", ["error"])
    assert broken["output_tokens"] == 2


async def test_a_client_that_leaves_is_told_when_it_has_left(
    cluster: "Cluster", logged: httpx.AsyncClient, log: Log, wait: "Wait"
) -> None:
    (mixed,) = await cluster.add(Role.MIXED)
    mixed.behaviour.seconds_a_token = 30.0
    asking = asyncio.create_task(logged.post("/v1/completions", json=BODY))
    await wait(lambda: mixed.num_tasks == 1)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await wait(cluster.is_empty)
    (line,) = log.lines()
    assert (line["finish_reasons"], line["output_tokens"], "ttft_ms" in line) == (["abort"], 0, False)


class StuckPipe:
    """A log whose reader does not read, and whose writer is stuck in its first line, until `text` is asked for."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        self.writer = LineWriter(str(path))
        self.writer.write({"said": "x" * (1 << 20)})  # more than a pipe holds
        self.wait_until_taken()

    def wait_until_taken(self) -> None:
        while not self.writer._lines.empty():
            time.sleep(0.001)

    @contextmanager
    def read(self) -> Iterator[Callable[[], bytes]]:
        """It is read from now on; what has come, once the writer is closed."""
        os.set_blocking(self._reader, True)
        with ThreadPoolExecutor(1) as pool, open(self._reader, "rb") as pipe:
            yield pool.submit(pipe.read).result


def test_lines_that_cannot_be_written_in_time_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossdock.router.access_log.MAX_LINES_WAITING", 1)
    stuck = StuckPipe(tmp_path / "pipe")
    for number in range(4):
        stuck.writer.write({"number": number})
    with stuck.read() as text:
        stuck.wait_until_taken()
        stuck.writer.write({"number": 4})
        stuck.writer.close()
        _, *lines = map(json.loads, text().splitlines())
    assert lines == [{"number": 0}, {"number": 4, "dropped_lines": 3}]


def test_a_log_that_nobody_reads_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossdock.router.access_log.CLOSE_SECONDS", 0.05)
    stuck = StuckPipe(tmp_path / "pipe")
    stuck.writer.close()
    assert stuck.writer._thread.is_alive()
    with stuck.read():
        stuck.writer._thread.join()
        os.close(stuck.writer._descriptor)


def test_a_log_that_cannot_be_written_is_known_at_once(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        LineWriter(str(tmp_path / "nowhere" / "access.log"))


def test_a_full_disk_costs_lines_and_neither_the_writer_nor_the_end(caplog: pytest.LogCaptureFixture) -> None:
    writer = LineWriter("/dev/full")
    for number in range(3):
        writer.write({"number": number})
    writer.close()
    assert writer._num_unwritten == 3
    assert caplog.text.count("the access log /dev/full cannot be written") == 1
