"""The access log: a JSON object a line and a request, written after its last byte.

``time`` is when the request came (UTC), durations are in milliseconds. What is not known of a request is left out, and
never is there anything of a prompt, an answer or a key. A thread writes, so that no disk or pipe holds a request up;
when it cannot keep up lines are dropped, and the next one tells how many.
"""

import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from queue import Full, Queue
from threading import Thread
from typing import Any, Self

import orjson
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .summary import Summary

STANDARD_OUTPUT = "-"
MAX_LINES_WAITING = 10_000
MAX_PATH_CHARS = 200
FAULT_STATUS = 500
"""Of a request that ended without any answer of the app: the server answers for it."""


class LineWriter:
    """Appends lines to a file, or to the standard output, in a thread of its own. Raises ``OSError`` at once."""

    def __init__(self, path: str) -> None:
        self._num_dropped = 0
        self._descriptor = (
            1 if path == STANDARD_OUTPUT else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        )
        self._lines: Queue[bytes | None] = Queue(MAX_LINES_WAITING)
        self._thread = Thread(target=self._write, name="access-log", daemon=True)
        self._thread.start()

    def write(self, told: Mapping[str, object]) -> None:
        """Never waits."""
        if self._num_dropped:
            told = {**told, "dropped_lines": self._num_dropped}
        try:
            self._lines.put_nowait(orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE))
        except Full:
            self._num_dropped += 1
        else:
            self._num_dropped = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Returns when every line is written."""
        self._lines.put(None)
        self._thread.join()
        if self._descriptor != 1:
            os.close(self._descriptor)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(self._descriptor, rest) :]


class AccessLog:
    """ASGI middleware, to be the outermost."""

    def __init__(self, app: ASGIApp, lines: LineWriter) -> None:
        self._app = app
        self._lines = lines

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        state = scope.setdefault("state", {})
        came_at, began, status = time.time(), time.monotonic(), FAULT_STATUS

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            told = {
                "time": datetime.fromtimestamp(came_at, UTC).isoformat(timespec="milliseconds"),
                "method": scope["method"],
                "path": scope["path"][:MAX_PATH_CHARS],
                "status": status,
                "duration_ms": _milliseconds(time.monotonic() - began),
                **_told(Summary.of(state)),
            }
            self._lines.write({name: value for name, value in told.items() if value is not None})


def _told(summary: Summary) -> dict[str, Any]:
    told: dict[str, Any] = {"request_id": summary.request_id, "key": summary.key, "error": summary.error}
    usage = summary.usage
    if usage is None:
        return told
    first = summary.attempted[0] if summary.attempted else None
    return told | {
        "model": summary.model,
        "stream": summary.is_stream,
        "prompt_tokens": usage.num_prompt,
        "cached_tokens": usage.num_cached,
        "output_tokens": usage.num_output,
        "ttft_ms": None if summary.ttft_seconds is None else _milliseconds(summary.ttft_seconds),
        "finish_reasons": summary.finish_reasons,
        "workers": first and [first.prefill, first.decode],
        "attempts": max((attempted.num_attempts for attempted in summary.attempted), default=0),
    }


def _milliseconds(seconds: float) -> float:
    return round(1000 * seconds, 3)
