"""One request, several processes, one trace; and a line in the access log."""

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest

from .server import serving

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
ABORTED_ID = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"
PREFILL, DECODE = ["prefill.queue", "prefill"], ["decode.queue", "decode"]
ENDLESS = {"max_tokens": 1500, "ignore_eos": True, "stream": True}


@dataclass(frozen=True)
class Span:
    """As the SDK writes it in JSON."""

    name: str
    span_id: str
    parent_id: str
    service: str
    began_at: str
    ended_at: str
    outcome: str | None


def spans_of(path: Path) -> dict[str, list[Span]]:
    """By trace, in the order in which they began."""
    traces: dict[str, list[Span]] = defaultdict(list)
    for line in path.read_text().splitlines():
        told = json.loads(line)
        span = Span(
            told["name"],
            told["context"]["span_id"],
            told["parent_id"],
            told["resource"]["attributes"]["service.name"],
            told["start_time"],
            told["end_time"],
            told["attributes"].get("crossdock.outcome"),
        )
        traces[told["context"]["trace_id"].removeprefix("0x")].append(span)
    return {trace: sorted(spans, key=lambda span: span.began_at) for trace, spans in traces.items()}


def tree_of(spans: list[Span]) -> tuple[Span, Span, list[Span]]:
    """The request's root, its one attempt, and the workers' stages under it."""
    root = next(span for span in spans if span.name == "POST /v1/completions")
    (attempt,) = [span for span in spans if span.parent_id == root.span_id]
    stages = [span for span in spans if span.parent_id == attempt.span_id]
    assert len(spans) == 2 + len(stages), "nobody hangs elsewhere"
    return root, attempt, stages


@pytest.mark.parametrize(
    ("flags", "names", "services"),
    [
        (("--prefill", "1", "--decode", "1"), [*PREFILL, "transfer", *DECODE], ["prefill"] * 3 + ["decode"] * 2),
        (("--mixed", "1"), [*PREFILL, *DECODE], ["mixed"] * 4),
    ],
)
def test_router_and_workers_tell_one_story(
    small_model: Path, tmp_path: Path, flags: tuple[str, ...], names: list[str], services: list[str]
) -> None:
    traces, log = tmp_path / "spans.jsonl", tmp_path / "access.jsonl"
    more = ("--trace-file", str(traces), "--access-log", str(log))
    with serving(small_model, tmp_path / "server.log", *flags, *more) as server:
        headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
        body = {"prompt": "a secret " * 40, "max_tokens": 5, "ignore_eos": True}
        assert server.client.post("/v1/completions", json=body, headers=headers).status_code == 200
        leaving = {"traceparent": f"00-{ABORTED_ID}-{SPAN_ID}-01"}
        with server.client.stream("POST", "/v1/completions", json={**body, **ENDLESS}, headers=leaving) as response:
            chunks = (line for line in response.iter_lines() if line)
            assert [next(chunks)[:5] for _ in range(3)] == ["data:"] * 3
        scrape = server.wait_until_nothing_is_left(10)
    found = spans_of(traces)
    assert set(found) == {TRACE_ID, ABORTED_ID}
    root, attempt, stages = tree_of(found[TRACE_ID])
    assert root.parent_id == f"0x{SPAN_ID}"
    assert [stage.name for stage in stages] == names
    assert [stage.service.removeprefix("crossdock-") for stage in stages] == services
    assert attempt.outcome == "length"
    assert all(attempt.began_at <= stage.began_at <= stage.ended_at <= root.ended_at for stage in stages)
    _, given_up, told = tree_of(found[ABORTED_ID])
    assert (given_up.outcome, told[-1].name, told[-1].outcome) == ("abort", "decode", "aborted by the client")
    for stage in ("vllm:request_queue_time", "vllm:request_prefill_time", "crossdock:request_decode_queue_time"):
        assert scrape.total(f"{stage}_seconds_count") == 2
    assert scrape.total("crossdock:request_transfer_time_seconds_count") == (2 if "transfer" in names else 0)
    lines = [json.loads(line) for line in log.read_text().splitlines() if "/v1/completions" in line]
    assert "secret" not in log.read_text() + traces.read_text()
    assert [line["finish_reasons"] for line in lines] == [["length"], ["abort"]]
    assert len(set(lines[0]["workers"])) == (2 if "transfer" in names else 1)
