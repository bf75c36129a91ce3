"""Clients of a server under test: those who wait for their answer, and those who leave."""

import asyncio
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

import httpx

T = TypeVar("T")
Json = dict[str, object]
SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """How a completion ended for its client; ``error`` is what an error status or an error event said."""

    status: int
    text: str
    finish_reason: str | None
    error: str | None
    num_completion_tokens: int | None
    is_closed_by_done: bool
    seconds: float


class _Reader:
    """Puts an answer together from what arrives."""

    def __init__(self, status: int) -> None:
        self._status = status
        self._begun = time.monotonic()
        self._text = ""
        self._finish_reason: str | None = None
        self._error: str | None = None
        self._num_completion_tokens: int | None = None
        self._is_done = False

    def take(self, data: str) -> None:
        """A whole body, or the data of one server-sent event."""
        assert not self._is_done and self._error is None, f"after the end came {data}"
        if data == "[DONE]":
            self._is_done = True
            return
        content = json.loads(data)
        if "error" in content:
            self._error = content["error"]["message"]
        for choice in content.get("choices", ()):
            self._text += choice["text"]
            self._finish_reason = self._finish_reason or choice["finish_reason"]
        if content.get("usage"):
            self._num_completion_tokens = content["usage"]["completion_tokens"]

    def answer(self, begun: float) -> Answer:
        return Answer(
            self._status,
            self._text,
            self._finish_reason,
            self._error,
            self._num_completion_tokens,
            self._is_done,
            time.monotonic() - begun,
        )


async def complete(client: httpx.AsyncClient, body: Json, max_events: int | None = None) -> Answer:
    """One completion. A stream's client leaves after ``max_events`` events."""
    begun = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        reader = _Reader(response.status_code)
        if response.headers["content-type"].startswith("text/event-stream"):
            async for line in _first(response.aiter_lines(), max_events):
                reader.take(line.removeprefix("data: "))
        else:
            reader.take((await response.aread()).decode())
        return reader.answer(begun)


async def _first(lines: AsyncIterator[str], max_events: int | None) -> AsyncIterator[str]:
    num_events = 0
    async for line in lines:
        if line:
            yield line
            num_events += 1
            if num_events == max_events:
                return


async def complete_for(client: httpx.AsyncClient, body: Json, seconds: float) -> Answer | None:
    """One completion whose client leaves after ``seconds``; ``None`` if the answer had not come by then."""
    try:
        async with asyncio.timeout(seconds):
            return await complete(client, body)
    except TimeoutError:
        return None


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[httpx.AsyncClient]:
    """Any number of connections to one server."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    async with httpx.AsyncClient(base_url=url, timeout=SECONDS, limits=limits) as client:
        yield client


async def crowd(url: str, visits: Sequence[Callable[[httpx.AsyncClient], Awaitable[T]]], num_at_once: int) -> list[T]:
    """All visits, in order, ``num_at_once`` at a time."""
    free_places = asyncio.Semaphore(num_at_once)

    async def enter(client: httpx.AsyncClient, visit: Callable[[httpx.AsyncClient], Awaitable[T]]) -> T:
        async with free_places:
            return await visit(client)

    async with connected(url) as client:
        return list(await asyncio.gather(*(enter(client, visit) for visit in visits)))
