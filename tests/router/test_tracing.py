"""One trace a request: who hangs under whom, what is told, and that no span stays open."""

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import httpx
import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from crossdock.core.messages import RequestFailed, Role
from crossdock.core.request import Request, RequestId, TransferId
from crossdock.router.app import create_app
from crossdock.router.telemetry import Telemetry

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import Cluster, Wait

BODY = {"prompt": "say hello", "max_tokens": 3}
PAIR = (Role.PREFILL, Role.DECODE)
TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Spans:
    """What a process exported."""

    def __init__(self) -> None:
        self.exporter = InMemorySpanExporter()

        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        self.tracer = provider.get_tracer("test")

    def ended(self) -> dict[str, list[ReadableSpan]]:
        """By name."""
        found: dict[str, list[ReadableSpan]] = {}
        for span in self.exporter.get_finished_spans():
            found.setdefault(span.name, []).append(span)
        return found


def trace_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


def id_of(span: ReadableSpan) -> str:
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def parent_of(span: ReadableSpan) -> str:
    assert span.parent is not None
    return f"{span.parent.span_id:016x}"


def told(span: ReadableSpan, *names: str) -> list[object]:
    return [(span.attributes or {}).get(name) for name in names]


@pytest.fixture
def spans() -> Spans:
    return Spans()


@pytest.fixture
async def traced(cluster: "Cluster", spans: Spans) -> AsyncIterator[httpx.AsyncClient]:
    app = create_app(cluster.router, Telemetry(tracer=spans.tracer))
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        yield http


def remember_traces(cluster: "Cluster", worker: int) -> list[str]:
    """The traces of the requests that this worker will be asked for."""
    seen: list[str] = []

    def script(request: Request) -> list[int]:
        seen.append(request.trace)
        return cluster.script(request)

    cluster.workers[worker].behaviour.script = script
    return seen


async def test_the_client_s_trace_goes_on_through_the_router_to_the_workers(
    cluster: "Cluster", traced: httpx.AsyncClient, spans: Spans
) -> None:
    await cluster.add(*PAIR)
    seen = remember_traces(cluster, 0)
    headers = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01", "x-request-id": "mine"}
    await traced.post("/v1/completions", json=BODY, headers=headers)
    (root,), (attempt,) = spans.ended()["POST /v1/completions"], spans.ended()["attempt"]
    assert trace_of(root) == trace_of(attempt) == TRACE_ID
    assert (parent_of(root), parent_of(attempt)) == (SPAN_ID, id_of(root))
    assert set(seen) == {f"00-{TRACE_ID}-{id_of(attempt)}-01"}
    names = ("http.route", "http.response.status_code", "crossdock.request_id", "gen_ai.response.finish_reasons")
    assert told(root, *names) == ["/v1/completions", 200, "mine", ("length",)]
    names = ("crossdock.transport", "crossdock.attempt", "crossdock.outcome", "gen_ai.usage.output_tokens")
    assert told(attempt, *names) == ["tcp", 1, "length", 3]


async def test_a_retry_is_a_second_attempt_of_the_same_trace(
    cluster: "Cluster", traced: httpx.AsyncClient, spans: Spans
) -> None:
    bad, *_ = await cluster.add(Role.MIXED)
    ids = (RequestId(""), TransferId(""))
    bad.behaviour.fails_with = RequestFailed(request_id=ids[0], transfer_id=ids[1], reason="no room", is_retryable=True)
    await cluster.add(Role.MIXED)
    for _ in range(2):
        assert (await traced.post("/v1/completions", json=BODY)).status_code == 200
    attempts = spans.ended()["attempt"]
    failed = [span for span in attempts if span.status.status_code is StatusCode.ERROR]
    assert failed
    assert told(failed[0], "crossdock.attempt", "crossdock.outcome") == [1, "no room"]
    (again,) = [
        span for span in attempts if told(span, "crossdock.attempt") == [2] and trace_of(span) == trace_of(failed[0])
    ]
    assert told(again, "crossdock.outcome") == ["length"]


async def test_what_the_router_refuses_has_a_span_of_its_own_that_says_so(
    cluster: "Cluster", traced: httpx.AsyncClient, spans: Spans
) -> None:
    await cluster.add(Role.MIXED)
    await traced.post("/v1/completions", json={**BODY, "n": 0})
    (root,) = spans.ended()["POST /v1/completions"]
    assert told(root, "http.response.status_code", "error.type") == [400, "invalid_request_error: n"]
    assert list(spans.ended()) == ["POST /v1/completions"]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_client_that_leaves_leaves_no_span_open(
    cluster: "Cluster", traced: httpx.AsyncClient, spans: Spans, wait: "Wait", is_stream: bool
) -> None:
    (mixed,) = await cluster.add(Role.MIXED)
    mixed.behaviour.seconds_a_token = 30.0
    asking = asyncio.create_task(traced.post("/v1/completions", json={**BODY, "n": 2, "stream": is_stream}))
    await wait(lambda: len(mixed.active) == 2)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    await wait(cluster.is_empty)
    outcomes = [told(span, "crossdock.outcome") for span in spans.ended()["attempt"]]
    assert outcomes == [["abort"], ["abort"]]
    assert len(spans.ended()["POST /v1/completions"]) == 1


async def test_requests_that_a_client_does_not_sample_are_not_traced(
    cluster: "Cluster", traced: httpx.AsyncClient, spans: Spans
) -> None:
    await cluster.add(Role.MIXED)
    seen = remember_traces(cluster, 0)
    await traced.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-00"})
    await traced.get("/v1/models")
    assert (spans.ended(), set(seen)) == ({}, {""})


async def test_without_a_tracer_workers_are_told_of_no_trace(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(Role.MIXED)
    seen = remember_traces(cluster, 0)
    await client.post("/v1/completions", json=BODY, headers={"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"})
    assert set(seen) == {""}
