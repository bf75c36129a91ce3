"""Spans leave a process whole: to a file, or to a collector."""

import json
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from crossdock.core.config import TraceConfig
from crossdock.core.request import RequestId
from crossdock.core.stages import Stage, StageName
from crossdock.deploy.traces import StageSpans, TracesUnavailable, tracing

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACE = f"00-{TRACE_ID}-{SPAN_ID}-01"
STAGES = [
    Stage(StageName.DECODE_QUEUE, TRACE, RequestId("a"), 1.0, 1.5, {}),
    Stage(StageName.DECODE, TRACE, RequestId("a"), 1.5, 3.75, {"output_tokens": 7}, "aborted by the client"),
]


@pytest.fixture
def collector() -> Iterator[HTTPServer]:
    """A collector that keeps what it was sent, in ``received``."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None: ...

    received: list[bytes] = []
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.received = received  # type: ignore[attr-defined]
    thread = Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_off_is_no_tracer_and_stages_vanish() -> None:
    with tracing(TraceConfig(), "test") as tracer:
        assert tracer is None
        StageSpans(tracer, "decode-1").note(STAGES)


def test_a_worker_s_stages_become_spans_under_the_router_s_attempt(tmp_path: Path) -> None:
    path = tmp_path / "spans.jsonl"
    with tracing(TraceConfig(file=str(path)), "crossdock-decode") as tracer:
        StageSpans(tracer, "decode-1").note(STAGES)
        StageSpans(tracer, "decode-1").note([])
    queue, decode = (json.loads(line) for line in path.read_text().splitlines())
    assert (queue["name"], decode["name"]) == ("decode.queue", "decode")
    for span in (queue, decode):
        assert (span["context"]["trace_id"], span["parent_id"]) == (f"0x{TRACE_ID}", f"0x{SPAN_ID}")
        assert span["resource"]["attributes"]["service.name"] == "crossdock-decode"
    assert queue["end_time"] == decode["start_time"]
    assert decode["attributes"] == {
        "crossdock.request_id": "a",
        "crossdock.worker": "decode-1",
        "crossdock.output_tokens": 7,
        "crossdock.outcome": "aborted by the client",
    }


def test_a_collector_gets_the_spans_before_the_process_ends(collector: HTTPServer) -> None:
    url = f"http://127.0.0.1:{collector.server_port}/v1/traces"
    with tracing(TraceConfig(otlp_endpoint=url), "crossdock-decode") as tracer:
        StageSpans(tracer, "decode-1").note(STAGES)
    requests = [ExportTraceServiceRequest.FromString(body) for body in collector.received]  # type: ignore[attr-defined]
    (spans,) = [scope.spans for request in requests for of in request.resource_spans for scope in of.scope_spans]
    assert [(span.name, span.trace_id.hex(), span.parent_span_id.hex()) for span in spans] == [
        ("decode.queue", TRACE_ID, SPAN_ID),
        ("decode", TRACE_ID, SPAN_ID),
    ]
    assert [(span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 for span in spans] == [0.5, 2.25]


def test_what_cannot_work_is_said_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nowhere = str(tmp_path / "nowhere" / "spans.jsonl")
    with (
        pytest.raises(TracesUnavailable, match=r"cannot write traces to .*nowhere"),
        tracing(TraceConfig(file=nowhere), "test"),
    ):
        pass
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace.export", None)
    with (
        pytest.raises(TracesUnavailable, match=r"pip install 'crossdock\[traces\]'"),
        tracing(TraceConfig(file=str(tmp_path / "spans.jsonl")), "test"),
    ):
        pass
