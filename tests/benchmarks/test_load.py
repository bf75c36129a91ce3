"""The load client against a small real server on the loopback interface."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import orjson
import pytest

from crossdock.benchmarks.load import Endpoint, LoadSpec, first_model, run_requests
from crossdock.benchmarks.report import Outcome
from crossdock.benchmarks.workload import LoadRequest

HEAD = b"HTTP/1.1 %d X\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
TOKEN = b'data: {"choices":[{"text":"a","finish_reason":null}]}\n\n'
LAST = b'data: {"choices":[{"text":"b","finish_reason":"stop"}]}\n\ndata: [DONE]\n\n'


def chunked(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


class ScriptedServer:
    """Answers every request with the same pieces; notes what was asked and how many were open at once.

    It holds all answers back until ``num_awaited`` requests are open.
    """

    def __init__(self, *pieces: bytes, status: int = 200, num_awaited: int = 1) -> None:
        self.bodies: list[dict[str, object]] = []
        self.heads: list[str] = []
        self.max_open = 0
        self._pieces = pieces
        self._status = status
        self._num_awaited = num_awaited
        self._num_open = 0
        self._all_open = asyncio.Event()

    def release(self) -> None:
        self._all_open.set()

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = next((int(line[15:]) for line in head.splitlines() if line.startswith("Content-Length:")), 0)
        self.heads.append(head)
        self.bodies.append(orjson.loads(await reader.readexactly(length) or b"{}"))
        self._num_open += 1
        self.max_open = max(self.max_open, self._num_open)
        if self._num_open >= self._num_awaited:
            self.release()
        await self._all_open.wait()
        writer.write(HEAD % self._status)
        for piece in self._pieces:
            writer.write(piece)
            await writer.drain()
        self._num_open -= 1
        writer.close()


@asynccontextmanager
async def serving(scripted: ScriptedServer) -> AsyncIterator[str]:
    server = await asyncio.start_server(scripted.answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def outcomes(server: ScriptedServer, num_requests: int, max_concurrency: int | None = None) -> list[Outcome]:
    async with serving(server) as url:
        requests = tuple(LoadRequest((5, 6), 7) for _ in range(num_requests))
        spec = LoadSpec(Endpoint(url, "demo", api_key="key", extra={"seed": 3}), requests, max_concurrency)
        seen: list[Outcome] = []
        found = await run_requests(spec, seen.append)
        assert len(seen) == num_requests
        return found


async def test_a_request_says_all_that_was_asked_for() -> None:
    server = ScriptedServer(chunked(LAST), b"0\r\n\r\n")
    await outcomes(server, 1)
    assert server.bodies == [
        {
            "model": "demo",
            "prompt": [5, 6],
            "max_tokens": 7,
            "stream": True,
            "stream_options": {"include_usage": True},
            "seed": 3,
        }
    ]
    assert server.heads[0].startswith("POST /v1/completions HTTP/1.1\r\n")
    assert "Authorization: Bearer key\r\n" in server.heads[0]


async def test_an_answer_is_counted_and_timed_from_arrival() -> None:
    server = ScriptedServer(chunked(TOKEN), chunked(TOKEN + LAST), b"0\r\n\r\n")
    (outcome,) = await outcomes(server, 1)
    assert (outcome.output_tokens, outcome.error, len(outcome.gaps_seconds)) == (3, "", 2)
    assert 0 < outcome.ttft_seconds <= outcome.e2e_seconds


async def test_the_open_loop_does_not_wait_for_answers() -> None:
    server = ScriptedServer(chunked(LAST), b"0\r\n\r\n", num_awaited=8)
    await outcomes(server, 8)
    assert server.max_open == 8


async def test_the_closed_loop_keeps_to_its_concurrency() -> None:
    server = ScriptedServer(chunked(LAST), b"0\r\n\r\n", num_awaited=3)
    found = await outcomes(server, 9, max_concurrency=3)
    assert server.max_open == 3
    assert [outcome.error for outcome in found] == [""] * 9


async def test_every_way_to_fail_is_an_outcome() -> None:
    (refused,) = await outcomes(ScriptedServer(chunked(b"full"), b"0\r\n\r\n", status=503), 1)
    (cut,) = await outcomes(ScriptedServer(chunked(TOKEN)), 1)
    (garbled,) = await outcomes(ScriptedServer(chunked(b"data: {oops\n\n"), b"0\r\n\r\n"), 1)
    assert refused.error == "HTTP 503: full"
    assert cut.error == "ConnectionError: closed before the response was complete"
    assert garbled.error.startswith("HttpParserCallbackError")


async def test_nobody_listening_and_a_silent_server_are_outcomes() -> None:
    async with serving(ScriptedServer()) as url:
        pass
    silent = ScriptedServer(num_awaited=2)
    async with serving(silent) as silent_url:
        request = (LoadRequest("x", 1),)
        (closed,) = await run_requests(LoadSpec(Endpoint(url, "demo"), request), lambda _: None)
        spec = LoadSpec(Endpoint(silent_url, "demo"), request, timeout_seconds=0.05)
        (late,) = await run_requests(spec, lambda _: None)
        silent.release()
    assert closed.error.startswith("ConnectionRefusedError")
    assert late.error == "no complete answer in 0.05 s"


async def test_the_model_is_the_first_that_the_endpoint_names() -> None:
    models = chunked(b'{"object":"list","data":[{"id":"demo","object":"model"},{"id":"other"}]}')
    server = ScriptedServer(models, b"0\r\n\r\n")
    async with serving(server) as url:
        assert await asyncio.to_thread(first_model, f"{url}/v1/") == "demo"
    assert server.heads[0].startswith("GET /v1/models HTTP/1.1\r\n")


async def test_an_endpoint_without_models_is_told_apart_from_one_that_fails() -> None:
    async with serving(ScriptedServer(chunked(b'{"data":[]}'), b"0\r\n\r\n")) as url:
        with pytest.raises(ConnectionError, match="serves no model"):
            await asyncio.to_thread(first_model, url)
