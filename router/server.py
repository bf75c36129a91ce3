"""The router as a process: its listening socket, its signals and its end.

`listen` comes first, before anything slow, so that a port in use is known at once; the socket is kept.
SIGTERM and SIGINT drain: new requests get 503, running ones end, then the process returns. A second
signal ends it at once.
"""

import asyncio
import gc
import logging
import signal
import socket
from collections.abc import Awaitable, Callable, Generator
from contextlib import contextmanager

import uvicorn
import uvloop

from ..core.config import RouterConfig
from ..core.mailbox import AsyncMailbox
from .access.exposure import exposure
from .app import Router, create_app
from .dispatcher import Dispatcher
from .metrics import RouterMetrics
from .telemetry import SILENT, Telemetry
from .text import TextModel

_log = logging.getLogger("crossdock.router")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens on ``host:port`` (0: the system's choice); raises ``OSError`` naming both."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        listener.listen(2048)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {host}:{port}: {error.strerror}") from None
    return listener


def serve_router(
    config: RouterConfig,
    listener: socket.socket,
    mailbox: AsyncMailbox,
    text: TextModel,
    companion: Callable[[], Awaitable[object]],
    telemetry: Telemetry = SILENT,
) -> None:
    """Serve until a signal ends it; returns when everything is closed.

    Both sockets are the caller's until here and closed on return. What the dispatcher raises ends the
    process: a router that cannot hear its workers must not look alive. ``companion`` runs beside it and is
    cancelled at the end; what it raises ends the process too.
    """
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(config, listener, mailbox, text, companion, telemetry))


async def _serve(
    config: RouterConfig,
    listener: socket.socket,
    mailbox: AsyncMailbox,
    text: TextModel,
    companion: Callable[[], Awaitable[object]],
    telemetry: Telemetry,
) -> None:
    metrics = RouterMetrics(config.served_model_name or config.model)
    dispatcher = Dispatcher(config, mailbox, metrics)
    router = Router(config, text, dispatcher, metrics)
    server = _Server(_uvicorn_config(router, telemetry))
    host, port = listener.getsockname()[:2]
    url = f"{'https' if server.config.is_ssl else 'http'}://{host}:{port}"
    _log.info("serving %s on %s, workers report to %s", router.model_name, url, mailbox.peer.address)
    for warning in exposure(config):
        _log.warning("%s", warning)
    ending = _Ending(router, server)
    _collect_rarely()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, ending.advance)
    try:
        async with asyncio.TaskGroup() as tasks:
            beside = [tasks.create_task(_forever(work)) for work in (dispatcher.run, router.access.run, companion)]
            await server.serve(sockets=[listener])
            for task in beside:
                task.cancel()
    finally:
        router.close()
        router.access.close()
        mailbox.close(linger_seconds=0.5)


def _collect_rarely() -> None:
    """A full collection looks at all of a thousand open streams, which takes a tenth of a second.

    It finds next to nothing: a request leaves no cycles behind.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000, 20, 100)


async def _forever(work: Callable[[], Awaitable[object]]) -> None:
    await work()


class _Server(uvicorn.Server):
    """uvicorn without its own signal handlers, which would close the door instead of answering 503."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Ending:
    """What signals do: the first begins to drain, the next ends the open requests and the process now."""

    def __init__(self, router: Router, server: uvicorn.Server) -> None:
        self._router = router
        self._server = server
        self._drain: asyncio.Task[None] | None = None

    def advance(self) -> None:
        if self._drain is None:
            _log.info("draining: no new requests, at most %.0f s for open ones", self._router.config.drain_seconds)
            self._drain = asyncio.create_task(self._drain_and_exit())
        else:
            self._drain.cancel()
            self._router.stop_streams()
            self._server.should_exit = True

    async def _drain_and_exit(self) -> None:
        await self._router.drain()
        self._server.should_exit = True


def _uvicorn_config(router: Router, telemetry: Telemetry) -> uvicorn.Config:
    certificate = router.access.certificate
    return uvicorn.Config(
        create_app(router, telemetry),
        ssl_context_factory=None if certificate is None else lambda config, default: certificate.context,
        http="httptools",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=30,
        timeout_graceful_shutdown=1,
    )
