"""What each key has used, by day and model, in SQLite: added up in a thread of its own, off the event loop.

What is told here is on disk within a second, also if the process is killed then; several routers may share a file.
"""

import logging
import sqlite3
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..token_usage import TokenUsage  # a command that only reads need not load it

FLUSH_SECONDS = 0.4
CLOSE_SECONDS = 5.0
LOCKED_SECONDS = 5.0
SCHEMA_VERSION = 1

_CREATE = """
CREATE TABLE IF NOT EXISTS usage (
    day TEXT NOT NULL, key TEXT NOT NULL, model TEXT NOT NULL,
    requests INTEGER NOT NULL, prompt_tokens INTEGER NOT NULL, cached_tokens INTEGER NOT NULL,
    output_tokens INTEGER NOT NULL,
    PRIMARY KEY (day, key, model)
) WITHOUT ROWID
"""
_ADD = """
INSERT INTO usage VALUES (?, ?, ?, ?, ?, ?, ?) ON CONFLICT DO UPDATE SET
    requests = requests + excluded.requests,
    prompt_tokens = prompt_tokens + excluded.prompt_tokens,
    cached_tokens = cached_tokens + excluded.cached_tokens,
    output_tokens = output_tokens + excluded.output_tokens
"""

_log = logging.getLogger("crossdock.router")


class UsageError(ValueError):
    """What is wrong with a usage database."""


@dataclass(frozen=True, slots=True)
class Line:
    """What is added up together; ``day`` is UTC's."""

    day: str
    key: str
    model: str


@dataclass(slots=True)
class Total:
    num_requests: int = 0
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0

    def add(self, used: "TokenUsage") -> None:
        self.num_requests += 1
        self.num_prompt += used.num_prompt
        self.num_cached += used.num_cached
        self.num_output += used.num_output


@dataclass(frozen=True, slots=True)
class _Used:
    line: Line
    tokens: "TokenUsage"


class UsageLog:
    """The constructor raises `UsageError`; `close` writes what is left."""

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._connection = open_usage(path)
        self._told: SimpleQueue[_Used | None] = SimpleQueue()
        """``None`` is the last."""
        self._pending: dict[Line, Total] = {}
        self._is_failing = False
        self._thread = threading.Thread(target=self._run, name="usage", daemon=True)
        self._thread.start()

    def add(self, key: str, model: str, used: "TokenUsage") -> None:
        """One request of ``key`` is over. Touches no disk."""
        day = datetime.fromtimestamp(self._clock(), UTC).date().isoformat()
        self._told.put(_Used(Line(day, key, model), used))

    def close(self) -> None:
        self._told.put(None)
        self._thread.join(CLOSE_SECONDS)

    def _run(self) -> None:
        is_open = True
        while is_open:
            is_open = self._gather()
            self._write()
        self._connection.close()

    def _gather(self) -> bool:
        """Wait for one and take what comes soon after it; false after the last."""
        try:
            item = self._told.get(timeout=FLUSH_SECONDS if self._pending else None)
            deadline = time.monotonic() + FLUSH_SECONDS
            while item is not None:
                self._pending.setdefault(item.line, Total()).add(item.tokens)
                item = self._told.get(timeout=max(0.0, deadline - time.monotonic()))
        except Empty:
            return True
        return False

    def _write(self) -> None:
        """All that is pending, or nothing: it stays pending then."""
        try:
            with self._connection:
                self._connection.executemany(_ADD, [_row(line, total) for line, total in self._pending.items()])
        except sqlite3.Error as error:
            if not self._is_failing:
                _log.error("usage cannot be written, and is kept in memory meanwhile: %s", error)
            self._is_failing = True
            return
        self._pending.clear()
        self._is_failing = False


def _row(line: Line, total: Total) -> tuple[str | int, ...]:
    return (
        line.day,
        line.key,
        line.model,
        total.num_requests,
        total.num_prompt,
        total.num_cached,
        total.num_output,
    )


def open_usage(path: Path) -> sqlite3.Connection:
    """Make the file if there is none; raises `UsageError`. For one thread at a time."""
    connection: sqlite3.Connection | None = None
    try:
        connection = sqlite3.connect(path, timeout=LOCKED_SECONDS, check_same_thread=False)
        _prepare(connection)
    except (sqlite3.Error, UsageError) as error:
        if connection is not None:
            connection.close()
        raise UsageError(f"cannot use {path} as usage database: {error}") from None
    return connection


def _prepare(connection: sqlite3.Connection) -> None:
    """Raises `UsageError` for a database of another version."""
    connection.execute("PRAGMA journal_mode = WAL")
    connection.execute("PRAGMA synchronous = NORMAL")  # what is committed outlives the process, if not the machine
    [version] = connection.execute("PRAGMA user_version").fetchone()
    if version not in (0, SCHEMA_VERSION):
        raise UsageError(f"it is of version {version}, not {SCHEMA_VERSION}")
    with connection:
        connection.execute(_CREATE)
        connection.execute(f"PRAGMA user_version = {SCHEMA_VERSION}")
