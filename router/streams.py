"""One HTTP request between the dispatcher and its client: `Stream` carries events, `Reply` turns them into bytes.

The dispatcher puts events in; the request's own task takes all that have come at once, so that what is
ready travels in one write, and a fault in one request's text stays with that request.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Receive

from ..core.messages import PromptLogprobs, TokenDelta
from ..core.request import Request
from .access.visit import Deadline
from .dispatcher import Dispatcher
from .ledger import AttemptTrace, Entry, Failure
from .metrics import EndReason
from .openai_errors import ApiError
from .output import OutputAssembler
from .placement import NoCapacity
from .prepare import PreparedRequest
from .text import TextModel
from .token_usage import TokenUsage, token_usage
from .wire_format import WireFormat


class ClientGone(Exception):
    """Nobody reads the answer any more."""


@dataclass(frozen=True, slots=True)
class Emitted:
    choice: int
    delta: TokenDelta


@dataclass(frozen=True, slots=True)
class PromptScored:
    choice: int
    part: PromptLogprobs


@dataclass(frozen=True, slots=True)
class Restarted:
    choice: int


@dataclass(frozen=True, slots=True)
class OutOfTime:
    """The request was given ``seconds``."""

    seconds: float


Event = Emitted | PromptScored | Restarted | OutOfTime | Failure


class Stream:
    """The entries of one HTTP request, the events that have come for them, and their common end."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self._entries: Sequence[Entry] = ()
        self._events: list[Event] = []
        self._wake: asyncio.Future[None] | None = None
        self._is_left = False
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    def open(
        self,
        requests: Sequence[Request],
        may_restart: bool,
        arrived_at: float,
        trace: AttemptTrace | None = None,
    ) -> None:
        """Raises `ApiError` 503 when no pair of workers takes the request, `ClientGone` when it needs none any more."""
        if self._is_left:
            raise ClientGone
        entries = [
            Entry(request, choice, self, arrived_at, may_restart, trace) for choice, request in enumerate(requests)
        ]
        outcome = self._dispatcher.open(entries)
        if isinstance(outcome, NoCapacity):
            raise ApiError.overloaded(outcome.reason)
        self._entries = entries

    @property
    def entries(self) -> Sequence[Entry]:
        return self._entries

    def watch(self, receive: Receive) -> None:
        """Notice the client's leaving; the request's body must have been read."""
        self._watch = asyncio.create_task(self._leave_with_client(receive))

    def end_at(self, deadline: Deadline) -> None:
        """Let the client read then that its time is over, and close."""
        delay = deadline.at - time.monotonic()
        self._timer = asyncio.get_running_loop().call_later(delay, self._put, OutOfTime(deadline.seconds))

    async def _leave_with_client(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._is_left = True
        self._wake_reader()

    async def next_events(self) -> list[Event]:
        """All that has come since the last call, at least one; raises `ClientGone`."""
        if not self._events and not self._is_left:
            self._wake = asyncio.get_running_loop().create_future()
            await self._wake
        if self._is_left:
            raise ClientGone
        events, self._events = self._events, []
        return events

    def end_choice(self, choice: int) -> None:
        """A stop string was seen: the workers need not go on."""
        self._dispatcher.release(self._entries[choice], EndReason.STOP)

    def stop(self, failure: Failure) -> None:
        """Let the client read why it gets no more, and then close."""
        self._put(failure)

    def close(self) -> None:
        """End whatever still runs; called once the client has its answer, an error, or is gone."""
        for pending in (self._watch, self._timer):
            if pending is not None:
                pending.cancel()
        self._watch = self._timer = None  # a cancelled task keeps its traceback, and that this stream
        for entry in self._entries:
            self._dispatcher.release(entry, EndReason.ABORT)
        self._entries = ()  # they know this stream

    # --- what the dispatcher calls -------------------------------------------------------------

    def emit(self, entry: Entry, delta: TokenDelta) -> None:
        self._put(Emitted(entry.choice, delta))

    def emit_prompt(self, entry: Entry, part: PromptLogprobs) -> None:
        self._put(PromptScored(entry.choice, part))

    def restart(self, entry: Entry) -> None:
        self._put(Restarted(entry.choice))

    def fail(self, entry: Entry, failure: Failure) -> None:
        self._put(failure)

    def _put(self, event: Event) -> None:
        self._events.append(event)
        self._wake_reader()

    def _wake_reader(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)


class Reply:
    """The text of one answer: an assembler a choice, fed from the stream's events."""

    def __init__(self, stream: Stream, prepared: PreparedRequest, text: TextModel, form: WireFormat) -> None:
        self.entries = stream.entries
        """One a choice."""
        self._stream = stream
        self._prepared = prepared
        self._text = text
        self._form = form
        self._assemblers = [OutputAssembler(text, choice) for choice in prepared.choices]
        self._num_unfinished = len(self._assemblers)
        self._error: ApiError | None = None
        self._is_closed = False

    async def body(self) -> bytes:
        """The whole answer as JSON; raises `ApiError` or `ClientGone`."""
        while self._num_unfinished:
            for event in await self._stream.next_events():
                self._take(event)
            if self._error is not None and self._num_unfinished:
                raise self._error
        if self._form.may_leave_loop and self._prepared.choices[0].wants_numbers:
            return await asyncio.to_thread(self._form.body, self._assemblers)
        return self._form.body(self._assemblers)

    async def next_bytes(self) -> bytes:
        """Server-sent events, all that are ready; empty after the last.

        Raises `ApiError` (after what came before the failure) or `ClientGone`.
        """
        written = b""
        while not written and not self._is_closed:
            if self._error is not None:
                raise self._error
            written = b"".join([self._take(event) for event in await self._stream.next_events()])
            if not self._num_unfinished:
                self._is_closed = True
                written += self._form.ending(self._assemblers)
        return written

    @property
    def prepared(self) -> PreparedRequest:
        return self._prepared

    @property
    def usage(self) -> TokenUsage:
        """So far, of what was taken from the stream."""
        return token_usage(self._assemblers)

    def failure(self, error: ApiError) -> bytes:
        """The server-sent events that end a stream which fails."""
        return self._form.failure(error)

    def _take(self, event: Event) -> bytes:
        """The server-sent events that follow from one event, if any."""
        match event:
            case Emitted(choice, delta):
                return self._take_token(choice, delta)
            case PromptScored(choice, part):
                prompt = self._assemblers[choice].choice.prompt
                for assembler in self._assemblers:  # told once for all choices over one prompt
                    other = assembler.choice.prompt
                    if other is prompt or other.token_ids == prompt.token_ids:
                        assembler.add_prompt_logprobs(part.start, part.logprobs)
            case Restarted(choice) if self._assemblers[choice].finish is None:
                self._assemblers[choice] = OutputAssembler(self._text, self._prepared.choices[choice])
            case OutOfTime(seconds):
                self._error = ApiError.timed_out(seconds)
            case Failure():
                self._error = _api_error(event)
        return b""

    def _take_token(self, choice: int, delta: TokenDelta) -> bytes:
        assembler = self._assemblers[choice]
        if assembler.finish is not None:  # tokens that were on their way when a stop string was seen
            return b""
        output = assembler.feed(delta)
        if output.finish is not None:
            self._num_unfinished -= 1
            if delta.finish is None:
                self._stream.end_choice(choice)
        if not self._prepared.is_stream:
            return b""
        if self._prepared.repeats_usage:
            self._form.tell_usage(self._assemblers)
        opening = self._form.opening(choice) if delta.index == 0 else b""
        return opening + self._form.chunk(choice, output)


def _api_error(failure: Failure) -> ApiError:
    if failure.is_retryable:
        return ApiError.overloaded(failure.reason)
    return ApiError(400, failure.reason)
