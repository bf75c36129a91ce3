"""What tells of each request beyond the metrics: the access log and traces. Where both are off they cost nothing."""

from dataclasses import dataclass

from fastapi import FastAPI
from opentelemetry.trace import Tracer

from .access_log import AccessLog, LineWriter
from .tracing import Tracing


@dataclass(frozen=True, slots=True)
class Telemetry:
    access_log: LineWriter | None = None
    tracer: Tracer | None = None

    def install(self, app: FastAPI) -> None:
        """As the outermost middleware: call it last."""
        if self.tracer is not None:
            app.add_middleware(Tracing, tracer=self.tracer)
        if self.access_log is not None:
            app.add_middleware(AccessLog, lines=self.access_log)


SILENT = Telemetry()
