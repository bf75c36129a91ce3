"""OpenTelemetry in one process, where the user wants traces: spans go to a collector (OTLP over HTTP) or to a file.

The SDK is an extra, imported only here and only then. Its own environment variables hold as well, for instance
``OTEL_TRACES_SAMPLER`` and ``OTEL_EXPORTER_OTLP_HEADERS``.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry.trace import Tracer

from ..core.config import TraceConfig
from ..core.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace.export import SpanExporter

EXPORT_SECONDS = 1.0


class TracesUnavailable(ValueError):
    """The extra is not installed, or the file cannot be written."""


@contextmanager
def tracing(config: TraceConfig, service: str) -> Iterator[Tracer | None]:
    """A tracer whose spans are all exported when the block ends; ``None`` where traces are off.

    Raises `TracesUnavailable`.
    """
    exporters = _exporters(config)
    if not exporters:
        yield None
        return
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


def _exporters(config: TraceConfig) -> "list[SpanExporter]":
    exporters: list[SpanExporter] = []
    try:
        if config.file is not None:
            exporters.append(_file_exporter(config.file))
        if config.otlp_endpoint is not None:
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

            exporters.append(OTLPSpanExporter(endpoint=config.otlp_endpoint))
    except ImportError as error:
        raise TracesUnavailable(f"traces need the extra 'traces' (pip install 'crossdock[traces]'): {error}") from None
    return exporters


def _file_exporter(path: str) -> "SpanExporter":
    """A span a line, as the SDK writes it in JSON; several processes may append to one file."""
    from opentelemetry.sdk.trace.export import ConsoleSpanExporter

    try:
        file = open(path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115 (it lives as long as the process)
    except OSError as error:
        raise TracesUnavailable(f"cannot write traces to {path}: {error.strerror}") from None
    return ConsoleSpanExporter(out=file, formatter=lambda span: span.to_json(indent=None) + "\n")
