"""Reads what `usage` has written, while it is being written."""

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import date
from enum import StrEnum
from pathlib import Path

from .usage import LOCKED_SECONDS, UsageError


class Column(StrEnum):
    DAY = "day"
    KEY = "key"
    MODEL = "model"


@dataclass(frozen=True, slots=True)
class UsageRow:
    """``group`` has a value for each column that was asked for."""

    group: tuple[str, ...]
    requests: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


def read_usage(path: Path, by: Sequence[Column], since: date | None = None) -> list[UsageRow]:
    """Totals by these columns, in their order, from that day on (UTC); raises `UsageError`."""
    columns = ", ".join(dict.fromkeys(by))
    query = (
        f"SELECT {columns}, sum(requests), sum(prompt_tokens), sum(cached_tokens), sum(output_tokens) "
        f"FROM usage WHERE day >= ? GROUP BY {columns} ORDER BY {columns}"
    )
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", timeout=LOCKED_SECONDS, uri=True)) as found:
            rows = found.execute(query, ["" if since is None else since.isoformat()]).fetchall()
    except sqlite3.Error as error:
        raise UsageError(f"cannot read the usage database {path}: {error}") from None
    return [UsageRow(row[:-4], *row[-4:]) for row in rows]
