"""OpenTelemetry in one process, where the user wants traces: spans go to a collector (OTLP over HTTP) or to a file.

The SDK is an extra, imported only here and only then. Its own environment variables hold as well, for instance
``OTEL_TRACES_SAMPLER`` and ``OTEL_EXPORTER_OTLP_HEADERS``.
"""

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from opentelemetry.trace import SpanKind, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ..core.config import TraceConfig
from ..core.stages import Stage
from ..core.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

EXPORT_SECONDS = 1.0

_propagator = TraceContextTextMapPropagator()


class TracesUnavailable(ValueError):
    """The extra is not installed, or the file cannot be written."""


@contextmanager
def tracing(config: TraceConfig, service: str) -> Iterator[Tracer | None]:
    """A tracer whose spans are all exported when the block ends; ``None`` where traces are off.

    Raises `TracesUnavailable`.
    """
    if config.file is None and config.otlp_endpoint is None:
        yield None
        return
    with ExitStack() as files, _exporting(_exporters(config, files), service) as tracer:
        yield tracer


@contextmanager
def _exporting(exporters: "list[SpanExporter]", service: str) -> Iterator[Tracer]:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    resource = Resource.create({"service.name": service, "service.version": VERSION, "process.pid": os.getpid()})
    provider = TracerProvider(resource=resource, shutdown_on_exit=False)
    for exporter in exporters:
        provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=1000 * EXPORT_SECONDS))
    try:
        yield provider.get_tracer("crossdock", VERSION)
    finally:
        provider.shutdown()


class StageSpans:
    """A worker's spans: one a stage of a traced request, made when the request has left, under the router's attempt."""

    def __init__(self, tracer: Tracer | None, worker: str) -> None:
        self._tracer = tracer
        self._worker = worker

    def note(self, stages: list[Stage]) -> None:
        """Without a tracer here nothing becomes of them."""
        if self._tracer is None or not stages:
            return
        parent = _propagator.extract({"traceparent": stages[0].trace})
        wall, monotonic = time.time_ns(), time.monotonic()
        for stage in stages:
            began, ended = (wall - round(1e9 * (monotonic - at)) for at in (stage.began_at, stage.ended_at))
            attributes: dict[str, str | int] = {
                "crossdock.request_id": stage.request_id,
                "crossdock.worker": self._worker,
                **{f"crossdock.{name}": count for name, count in stage.counts.items()},
            }
            if stage.outcome:
                attributes["crossdock.outcome"] = stage.outcome
            self._tracer.start_span(stage.name, parent, SpanKind.SERVER, attributes, start_time=began).end(ended)


def _exporters(config: TraceConfig, files: ExitStack) -> "list[SpanExporter]":
    exporters: list[SpanExporter] = []
    try:
        if config.file is not None:
            exporters.append(_file_exporter(config.file, files))
        if config.otlp_endpoint is not None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporters.append(OTLPSpanExporter(endpoint=config.otlp_endpoint))
    except ImportError as error:
        raise TracesUnavailable(f"traces need the extra 'traces' (pip install 'crossdock[traces]'): {error}") from None
    return exporters


def _file_exporter(path: str, files: ExitStack) -> "SpanExporter":
    """A span a line, as the SDK writes it in JSON; several processes may append to one file."""
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    try:
        file = files.enter_context(open(path, "a", buffering=1, encoding="utf-8"))  # noqa: SIM115 (it does)
    except OSError as error:
        raise TracesUnavailable(f"cannot write traces to {path}: {error.strerror}") from None
    return ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
