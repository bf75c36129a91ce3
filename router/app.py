"""The HTTP face of the router: OpenAI's endpoints, ``/health`` and ``/metrics``."""

import asyncio
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from starlette.types import Receive, Scope, Send

from ..core.block_hash import model_root
from ..core.config import RouterConfig
from ..core.request import Request, RequestId
from .access.access import Access
from .access.caller import Caller
from .access.door import stand_before
from .access.visit import Visit
from .completion_routes import EVENTS, completion_routes
from .dispatcher import Dispatcher
from .embedding_routes import embedding_routes
from .json_body import LONG_BODY_BYTES
from .ledger import Failure
from .metrics import RouterMetrics
from .model_routes import model_routes
from .openai_errors import ApiError, exception_handlers
from .openapi import DescribedApp
from .operation_routes import operation_routes
from .pages.routes import page_routes
from .prepare import Limits, PreparedRequest
from .responses.routes import EVENTS as RESPONSE_EVENTS
from .responses.routes import response_routes
from .responses.store import ResponseStore
from .status import status_routes
from .streams import ClientGone, Reply, Stream
from .telemetry import SILENT, Telemetry
from .text import TextModel
from .tokenization import tokenization_routes
from .tracing import RequestTrace

MAX_COMPILING = 8
"""Requests that may wait for their grammars at a time; they have threads of their own."""

CLIENT_GONE_STATUS = 499
"""Nobody sees it."""

_draw_seed = partial(secrets.randbits, 63)

Prepare = Callable[[TextModel, Limits, Callable[[], int]], PreparedRequest]


class Router:
    """What all endpoints share, and the open streams."""

    def __init__(self, config: RouterConfig, text: TextModel, dispatcher: Dispatcher, metrics: RouterMetrics) -> None:
        self.config = config
        self.text = text
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.model_name = config.served_model_name or config.model
        self.access = Access(config.door, self.model_name)
        self.started_at = int(time.time())
        self.is_draining = False
        self.responses = ResponseStore(config.responses)
        self._streams: set[Stream] = set()
        self._is_quiet = asyncio.Event()
        self._compiling = ThreadPoolExecutor(MAX_COMPILING, "prepare")

    @property
    def is_ready(self) -> bool:
        return not self.is_draining and bool(self.dispatcher.fleet.pairs())

    def limits(self) -> Limits:
        """What a request may ask of the workers that are here now; raises `ApiError` 503 when none can serve."""
        fleet = self.dispatcher.fleet
        max_model_len, card = fleet.max_model_len(), fleet.card
        if card is None or max_model_len == 0:
            raise ApiError.overloaded("no pair of workers is ready")
        return Limits(self.model_name, max_model_len, card.vocab_size, self.config.max_open_requests, fleet.roomiest())

    def open_stream(self) -> Stream:
        """A place among the open requests, given back by `close_stream`; raises `ApiError` 503."""
        if self.is_draining:
            raise ApiError.overloaded("the router is shutting down")
        if len(self._streams) >= self.config.max_open_requests:
            raise self._refusal(len(self._streams))
        stream = Stream(self.dispatcher)
        self._streams.add(stream)
        return stream

    def _check_room_for(self, num_choices: int) -> None:
        """Each choice is a request to the workers; raises `ApiError`."""
        num_open = len(self.dispatcher.ledger)
        if num_open + num_choices > self.config.max_open_requests:
            raise self._refusal(num_open)

    def _refusal(self, num_open: int) -> ApiError:
        self.metrics.counts.refusals += 1
        return ApiError.overloaded(f"{num_open} requests are open, the most is {self.config.max_open_requests}")

    def close_stream(self, stream: Stream) -> None:
        stream.close()
        self._streams.discard(stream)
        if not self._streams:
            self._is_quiet.set()

    async def drain(self) -> None:
        """Refuse new requests and wait for the open ones; those open after ``drain_seconds`` end with an error."""
        self.is_draining = True
        if not await self._quiet_within(self.config.drain_seconds):
            self.stop_streams()
            await self._quiet_within(1.0)

    def stop_streams(self) -> None:
        """End all open requests with an error."""
        for stream in self._streams:
            stream.stop(Failure("the router is shutting down", is_retryable=True))

    def close(self) -> None:
        """Let the workers off whatever is still open; the last thing that may send to them."""
        for stream in list(self._streams):
            self.close_stream(stream)
        self._compiling.shutdown(wait=False, cancel_futures=True)

    async def _quiet_within(self, seconds: float) -> bool:
        self._is_quiet.clear()
        if not self._streams:
            return True
        try:
            await asyncio.wait_for(self._is_quiet.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def answer(
        self, http: HttpRequest, prepare: Prepare, more_bytes: int = 0, compiles: bool = False
    ) -> Response:
        """Serve one completion from its validated body to its last byte.

        ``more_bytes`` is what `prepare` reads beside the body; it ``compiles`` if there is a grammar.
        """
        try:
            return await self._answer(http, prepare, more_bytes, compiles)
        except ClientGone:
            return Response(status_code=CLIENT_GONE_STATUS)

    async def _answer(self, http: HttpRequest, prepare: Prepare, more_bytes: int, compiles: bool) -> Response:
        """Raises `ClientGone`."""
        arrived_at = time.monotonic()
        visit: Visit = http.state.visit
        trace: RequestTrace | None = getattr(http.state, "trace", None)
        with ExitStack() as cleanup:
            stream = self.open_stream()
            cleanup.callback(self.close_stream, stream)
            stream.watch(http.receive)
            prepared = await self._prepared_in_time(visit, self._prepared(http, prepare, more_bytes, compiles))
            self._check_room_for(len(prepared.choices))
            visit.reserve(prepared.num_prompt_tokens, prepared.most_tokens)
            if visit.deadline is not None:
                stream.end_at(visit.deadline)
            form = prepared.format(prepared, uuid.uuid4().hex, int(time.time()), self._fingerprint())
            stream.open(_requests(prepared, form.id, visit.caller), not prepared.is_stream, arrived_at, trace)
            reply = http.state.reply = Reply(stream, prepared, self.text, form)
            cleanup.callback(lambda: visit.settle(reply.usage))
            if not prepared.is_stream:
                return Response(await reply.body(), media_type="application/json")
            return EventStream(await reply.next_bytes(), reply, cleanup.pop_all())

    async def _prepared_in_time(self, visit: Visit, prepared: Awaitable[PreparedRequest]) -> PreparedRequest:
        """Raises `ApiError` 504; who waited for a thread until then no longer does."""
        try:
            async with asyncio.timeout(visit.seconds_left):
                return await prepared
        except TimeoutError:
            assert visit.deadline is not None, "without a deadline there is no timeout"
            raise ApiError.timed_out(visit.deadline.seconds) from None

    async def _prepared(self, http: HttpRequest, prepare: Prepare, more_bytes: int, compiles: bool) -> PreparedRequest:
        limits = self.limits()
        if compiles:
            loop = asyncio.get_running_loop()
            return await loop.run_in_executor(self._compiling, prepare, self.text, limits, _draw_seed)
        if int(http.headers.get("content-length", LONG_BODY_BYTES)) + more_bytes < LONG_BODY_BYTES:
            return prepare(self.text, limits, _draw_seed)
        return await asyncio.to_thread(prepare, self.text, limits, _draw_seed)

    def _fingerprint(self) -> str:
        """Changes with the model that serves."""
        card = self.dispatcher.fleet.card
        if card is None:
            return "fp_none"
        return f"fp_{model_root(self.config.cluster_key, card.model, card.layout, card.weights).hex()[:16]}"


def _requests(prepared: PreparedRequest, response_id: str, caller: Caller) -> list[Request]:
    """One a choice; those of one prompt share its bytes."""
    distinct = {id(choice.prompt): choice.prompt for choice in prepared.choices}
    packed = {key: prompt.packed for key, prompt in distinct.items()}
    salt, priority = caller.salt(prepared.cache_salt), caller.priority_of(prepared.priority)
    return [
        Request(
            request_id=RequestId(f"{response_id}-{choice.index}"),
            prompt=packed[id(choice.prompt)],
            params=choice.params,
            salt=salt,
            priority=priority,
            pooling=choice.pooling,
        )
        for choice in prepared.choices
    ]


class EventStream(Response):
    """Server-sent events until the reply ends.

    ``first`` was waited for, so that what fails before it has its own status.
    """

    media_type = "text/event-stream"

    def __init__(self, first: bytes, reply: Reply, cleanup: ExitStack) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        del self.headers["content-length"]
        self._first = first
        self._reply = reply
        self._cleanup = cleanup

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._cleanup:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            try:
                data = self._first
                while data:
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                    data = await self._reply.next_bytes()
            except ApiError as error:
                scope["state"]["error"] = error.bare()
                data = self._reply.failure(error)
            except ClientGone:
                return
            await send({"type": "http.response.body", "body": data, "more_body": False})


ROUTES = (
    completion_routes,
    embedding_routes,
    response_routes,
    model_routes,
    tokenization_routes,
    operation_routes,
    status_routes,
    page_routes,
)


def create_app(router: Router, telemetry: Telemetry = SILENT) -> FastAPI:
    app = DescribedApp((*EVENTS, *RESPONSE_EVENTS), exception_handlers=exception_handlers)
    stand_before(app, router.access, router.config.door)
    telemetry.install(app)  # outside of the door, so that refusals are told of too
    for routes in ROUTES:
        app.include_router(routes(router))
    return app
