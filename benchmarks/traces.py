"""Recorded request traces as load: when requests came, how long they were, what they shared.

Two formats are read: JSON lines as Mooncake publishes them (``timestamp`` in ms, ``input_length``,
``output_length``, and ``hash_ids``, one for each 512 tokens of prompt, equal where prompts are equal), and CSV
as Azure does (``TIMESTAMP,ContextTokens,GeneratedTokens``). Neither has text: prompts are made of random ids,
with equal spans where the trace says so.
"""

import csv
import random
from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import groupby
from operator import attrgetter
from pathlib import Path

import msgspec

from .workload import LoadRequest, PromptSource

HASHED_SPAN = 512
"""Prompt tokens behind one ``hash_ids`` entry."""


class TraceRecord(msgspec.Struct, frozen=True):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...] = ()


def read_records(path: Path) -> list[TraceRecord]:
    """In order of time, in milliseconds; raises ``msgspec.MsgspecError`` or ``KeyError`` for other files."""
    if path.suffix == ".csv":
        with path.open(newline="", encoding="utf-8") as file:
            records = [azure_record(row) for row in csv.DictReader(file)]
    else:
        decoder = msgspec.json.Decoder(TraceRecord)
        records = [decoder.decode(line) for line in path.read_bytes().splitlines() if line.strip()]
    return sorted(records, key=attrgetter("timestamp"))


def azure_record(row: dict[str, str]) -> TraceRecord:
    seconds, _, fraction = row["TIMESTAMP"].partition(".")
    moment = datetime.fromisoformat(f"{seconds}+00:00").timestamp() + float(f"0.{fraction or 0}")
    return TraceRecord(moment * 1000, int(row["ContextTokens"]), int(row["GeneratedTokens"]))


def requests_of(
    records: Iterable[TraceRecord], source: PromptSource, speed: float = 1.0, seed: int = 0
) -> list[LoadRequest]:
    """The records as requests, ``speed`` times as fast as they were recorded; the first arrives at 0."""
    timed = list(smeared(records))
    start = timed[0][0] if timed else 0.0
    return [
        LoadRequest(prompt_of(record, source, seed), max(1, record.output_length), (at - start) / 1000 / speed)
        for at, record in timed
    ]


def smeared(records: Iterable[TraceRecord]) -> Iterator[tuple[float, TraceRecord]]:
    """Spread records of one timestamp evenly over the time until the next: recorders round to coarse ticks."""
    bins = [list(group) for _, group in groupby(records, attrgetter("timestamp"))]
    for i, group in enumerate(bins):
        start = group[0].timestamp
        width = bins[i + 1][0].timestamp - start if i + 1 < len(bins) else 0.0
        for j, record in enumerate(group):
            yield start + width * j / len(group), record


def prompt_of(record: TraceRecord, source: PromptSource, seed: int) -> str | tuple[int, ...]:
    """``input_length`` random tokens; each span depends on its hash id alone, an unhashed one on the record."""
    spans = record.hash_ids or (repr(record),)
    width = HASHED_SPAN if record.hash_ids else record.input_length
    drawn = [source.tokens(random.Random(f"{seed}:{span}"), width) for span in spans]
    return source.prompt([token for span in drawn for token in span][: record.input_length])
