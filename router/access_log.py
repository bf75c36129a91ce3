"""The access log: a JSON object a line and a request, written after its last byte.

``time`` is when the request came (UTC), durations are in milliseconds. What is not known of a request is left out, and
never is there anything of a prompt, an answer or a key. A thread writes, so that no disk or pipe holds a request up;
when it cannot keep up, or cannot write, lines are dropped, and the next one tells how many.
"""

import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import UTC, datetime
from queue import Full, Queue
from threading import Thread
from typing import Any, Self

import orjson
from starlette.types import Scope

from .summary import Summary

STANDARD_OUTPUT = "-"
MAX_LINES_WAITING = 10_000
MAX_PATH_CHARS = 200
CLOSE_SECONDS = 5.0

_log = logging.getLogger("crossdock.router")


class LineWriter:
    """Appends lines to a file, or to the standard output, in a thread of its own. Raises ``OSError`` at once."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._num_dropped = 0
        """Since the start, as are those that could not be written and those of both that a line has told of."""
        self._num_unwritten = 0
        self._num_told = 0
        self._is_failing = False
        self._descriptor = (
            1 if path == STANDARD_OUTPUT else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o640)
        )
        self._lines: Queue[bytes | None] = Queue(MAX_LINES_WAITING)
        self._thread = Thread(target=self._write, name="access-log", daemon=True)
        self._thread.start()

    def write(self, told: Mapping[str, object]) -> None:
        """Never waits."""
        num_lost = self._num_dropped + self._num_unwritten
        if num_lost > self._num_told:
            told = {**told, "dropped_lines": num_lost - self._num_told}
        try:
            self._lines.put_nowait(orjson.dumps(told, option=orjson.OPT_APPEND_NEWLINE))
        except Full:
            self._num_dropped += 1
        else:
            self._num_told = num_lost

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Returns when every line is written, or `CLOSE_SECONDS` after the writer has got stuck."""
        with suppress(Full):
            self._lines.put(None, timeout=CLOSE_SECONDS)
        self._thread.join(CLOSE_SECONDS)
        if self._descriptor != 1 and not self._thread.is_alive():
            os.close(self._descriptor)

    def _write(self) -> None:
        while (line := self._lines.get()) is not None:
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(self._descriptor, rest) :]
            except OSError as error:  # a full disk, a pipe whose reader is gone
                self._failed(error)
            else:
                self._is_failing = False

    def _failed(self, error: OSError) -> None:
        self._num_unwritten += 1
        if not self._is_failing:
            _log.error("the access log %s cannot be written, and lines are dropped meanwhile: %s", self._path, error)
        self._is_failing = True


def told_of(scope: Scope, status: int, came_at: float, seconds: float, summary: Summary) -> dict[str, object]:
    """A line of the log; ``came_at`` is in seconds since 1970."""
    told = {
        "time": datetime.fromtimestamp(came_at, UTC).isoformat(timespec="milliseconds"),
        "method": scope["method"],
        "path": scope["path"][:MAX_PATH_CHARS],
        "status": status,
        "duration_ms": _milliseconds(seconds),
        **_told(summary),
    }
    return {name: value for name, value in told.items() if value is not None}


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
