"""What tells of each request beyond the metrics: the access log and traces. Where both are off they cost nothing."""

import time
from dataclasses import dataclass

from fastapi import FastAPI
from opentelemetry.trace import Tracer
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .access_log import LineWriter, told_of
from .summary import Summary
from .tracing import begin_trace

FAULT_STATUS = 500
"""Of a request that ended without any answer of the app: the server answers for it."""


@dataclass(frozen=True, slots=True)
class Telemetry:
    access_log: LineWriter | None = None
    tracer: Tracer | None = None

    def install(self, app: FastAPI) -> None:
        """As the outermost middleware: call it last."""
        if self.access_log is not None or self.tracer is not None:
            app.add_middleware(Telling, telemetry=self)


SILENT = Telemetry()


class Telling:
    """ASGI middleware: tells of each request after its last byte; a traced one has its trace in its state."""

    def __init__(self, app: ASGIApp, telemetry: Telemetry) -> None:
        self._app = app
        self._log = telemetry.access_log
        self._tracer = telemetry.tracer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        came_at, began, status = time.time(), time.monotonic(), FAULT_STATUS
        state = scope.setdefault("state", {})
        trace = begin_trace(self._tracer, scope) if self._tracer is not None else None
        if trace is not None:
            state["trace"] = trace

        async def send_noting_status(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noting_status)
        finally:
            summary = Summary.of(state)
            if trace is not None:
                trace.end(status, scope, summary)
            if self._log is not None:
                self._log.write(told_of(scope, status, came_at, time.monotonic() - began, summary))
