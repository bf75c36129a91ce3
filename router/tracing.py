"""The router's spans of a request's trace: the HTTP request, and under it one a choice and attempt.

The workers' spans hang under an attempt's (deploy/traces.py): its context travels to them in ``Request.trace``. A
client's ``traceparent`` is the parent of all (W3C Trace Context); attributes follow OpenTelemetry's conventions for
HTTP and for generative AI as far as they reach.
"""

from collections.abc import Mapping
from typing import Any

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.datastructures import Headers
from starlette.types import Scope

from ..core.request import RequestId
from .ledger import Entry
from .summary import Summary

API_PREFIX = "/v1/"
_propagator = TraceContextTextMapPropagator()


class RequestTrace:
    """The open spans of one HTTP request."""

    def __init__(self, tracer: Tracer, root: Span) -> None:
        self._tracer = tracer
        self._root = root
        self._attempts: dict[RequestId, Span] = {}

    def begin_attempt(self, entry: Entry) -> str:
        """The ``traceparent`` of an attempt that is about to be sent to its workers."""
        attempt = entry.attempt
        prefill, decode = attempt.pair.prefill, attempt.pair.decode
        link = prefill.links.get(decode.incarnation)
        attributes: dict[str, str | int] = {
            "crossdock.request_id": attempt.request_id,
            "crossdock.choice": entry.choice,
            "crossdock.attempt": len(entry.attempts),
            "crossdock.prefill_worker": prefill.name,
            "crossdock.decode_worker": decode.name,
            "crossdock.transport": link.transport if link is not None else "none",
            "gen_ai.usage.input_tokens": entry.request.num_prompt_tokens,
        }
        parent = set_span_in_context(self._root)
        span = self._tracer.start_span("attempt", parent, SpanKind.CLIENT, attributes)
        self._attempts[attempt.request_id] = span
        carrier: dict[str, str] = {}
        _propagator.inject(carrier, set_span_in_context(span))
        return carrier["traceparent"]

    def end_attempt(self, entry: Entry, outcome: str, is_failure: bool) -> None:
        """``outcome`` is the reason of the end, or of the failure."""
        span = self._attempts.pop(entry.attempt.request_id)
        span.set_attribute("crossdock.outcome", outcome)
        span.set_attribute("gen_ai.usage.output_tokens", len(entry.output_ids))
        if entry.first_token_at is not None:
            span.set_attribute("gen_ai.server.time_to_first_token", entry.first_token_at - entry.opened_at)
        if is_failure:
            span.set_status(Status(StatusCode.ERROR, outcome))
        span.end()

    def end(self, status: int, scope: Scope, summary: Summary) -> None:
        """The last byte is sent; every attempt has ended."""
        assert not self._attempts, "whoever answered has closed its stream"
        root, route = self._root, scope.get("route")
        if route is not None:
            root.update_name(f"{scope['method']} {route.path_format}")
            root.set_attribute("http.route", route.path_format)
        root.set_attribute("http.response.status_code", status)
        root.set_attributes(_attributes(summary))
        if status >= 500 or summary.error is not None:
            root.set_status(Status(StatusCode.ERROR, summary.error))
        root.end()


def _attributes(summary: Summary) -> Mapping[str, Any]:
    told: dict[str, Any] = {"crossdock.request_id": summary.request_id, "error.type": summary.error}
    if summary.usage is not None:
        told |= {
            "gen_ai.request.model": summary.model,
            "gen_ai.usage.input_tokens": summary.usage.num_prompt,
            "gen_ai.usage.cache_read.input_tokens": summary.usage.num_cached,
            "gen_ai.usage.output_tokens": summary.usage.num_output,
            "gen_ai.response.finish_reasons": [reason or "none" for reason in summary.finish_reasons],
            "crossdock.stream": summary.is_stream,
            "crossdock.attempts": max(attempted.num_attempts for attempted in summary.attempted),
        }
    return {name: value for name, value in told.items() if value is not None}


def begin_trace(tracer: Tracer, scope: Scope) -> RequestTrace | None:
    """The trace of an API request that begins; ``None`` for any other, and where this one is not sampled."""
    if scope["method"] != "POST" or not scope["path"].startswith(API_PREFIX):
        return None
    context = _propagator.extract(dict(Headers(scope=scope)))
    attributes = {"http.request.method": scope["method"], "url.path": scope["path"]}
    root = tracer.start_span(scope["method"], context, SpanKind.SERVER, attributes)
    return RequestTrace(tracer, root) if root.is_recording() else None
