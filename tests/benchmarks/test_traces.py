"""Recorded traces become requests with their times, lengths and shared prefixes."""

from pathlib import Path

import msgspec
import pytest

from crossdock.benchmarks.traces import TraceRecord, read_records, requests_of
from crossdock.benchmarks.workload import PromptSource

SOURCE = PromptSource(vocab_size=1000)


def test_mooncake_lines_are_read_in_order_of_time(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(
        '{"timestamp": 3000, "input_length": 600, "output_length": 5, "hash_ids": [0, 7]}\n'
        '{"timestamp": 0, "input_length": 700, "output_length": 9, "hash_ids": [0, 1]}\n'
    )
    assert read_records(file) == [TraceRecord(0, 700, 9, (0, 1)), TraceRecord(3000, 600, 5, (0, 7))]


def test_azure_rows_keep_fractions_of_a_second(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n"
        "2023-11-16 18:15:46.2500000,374,44\n"
        "2023-11-16 18:15:50.5000000,396,109\n"
    )
    first, second = requests_of(read_records(file), SOURCE)
    assert (first.at_seconds, second.at_seconds) == (0.0, 4.25)
    assert [(len(request.prompt), request.max_tokens) for request in (first, second)] == [(374, 44), (396, 109)]


def test_a_file_of_neither_format_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("when,what\n1,2\n")
    with pytest.raises(msgspec.DecodeError):
        read_records(file)


def test_equal_hash_ids_are_equal_text_and_all_else_differs() -> None:
    one, other = requests_of([TraceRecord(0, 700, 1, (0, 1)), TraceRecord(1, 800, 1, (0, 2))], SOURCE)
    assert one.prompt[:512] == other.prompt[:512]
    assert one.prompt[512:] != other.prompt[512:700]
    assert (len(one.prompt), len(other.prompt)) == (700, 800)


def test_records_of_one_tick_are_spread_until_the_next() -> None:
    records = [TraceRecord(at, 8, 1) for at in (1000, 1000, 1000, 4000, 4000)]
    assert [request.at_seconds for request in requests_of(records, SOURCE)] == [0.0, 1.0, 2.0, 3.0, 3.0]


def test_a_trace_can_be_replayed_faster() -> None:
    records = [TraceRecord(at, 8, 1) for at in (0, 1000)]
    assert [request.at_seconds for request in requests_of(records, SOURCE, speed=4.0)] == [0.0, 0.25]
