"""Reads one streamed answer of an OpenAI endpoint and notes when its tokens came."""

from collections.abc import Callable
from itertools import pairwise

import msgspec

from .report import Outcome
from .sse_client import EventLines

MAX_ERROR_BYTES = 200


class Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[msgspec.Raw] | None = None


class Choice(msgspec.Struct):
    """Of a completion (``text``) or a chat completion (``delta``)."""

    text: str | None = None
    delta: Delta | None = None
    finish_reason: str | None = None

    @property
    def shows_a_token(self) -> bool:
        """False for the role that opens a chat stream: no token stands behind it."""
        delta = self.delta or Delta()
        return bool(self.text or delta.content or delta.reasoning_content or delta.tool_calls)


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: PromptTokensDetails | None = None

    @property
    def cached_tokens(self) -> int:
        return (self.prompt_tokens_details and self.prompt_tokens_details.cached_tokens) or 0


class ErrorBody(msgspec.Struct):
    message: str = "an error without a message"


class StreamChunk(msgspec.Struct):
    """What is measured of an event; every other field is ignored."""

    choices: list[Choice] = []
    usage: Usage | None = None
    error: ErrorBody | None = None


_chunk_decoder = msgspec.json.Decoder(StreamChunk)


class StreamMeter:
    """Takes the body of one answer as it arrives; `outcome` once it has ended.

    Tokens are counted by the endpoint's own usage, or, if it sends none, one for each chunk that shows text.
    """

    def __init__(self, arrived_at: float, clock: Callable[[], float]) -> None:
        self._arrived_at = arrived_at
        self._clock = clock
        self._lines = EventLines()
        self._head = b""
        self._shown_at: list[float] = []
        self._ended_at = arrived_at
        self._usage: Usage | None = None
        self._error = ""
        self._is_finished = False

    def feed(self, data: bytes) -> None:
        """Raises ``msgspec.MsgspecError`` for an event that is not OpenAI's."""
        now = self._clock()
        if len(self._head) < MAX_ERROR_BYTES:
            self._head += data
        for payload in self._lines.feed(data):
            if payload != b"[DONE]":
                self._note(_chunk_decoder.decode(payload), now)

    def _note(self, chunk: StreamChunk, now: float) -> None:
        if chunk.error:
            self._error = chunk.error.message
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            self._ended_at = now
            self._is_finished |= bool(choice.finish_reason)
            if choice.shows_a_token:
                self._shown_at.append(now)

    def outcome(self, status: int) -> Outcome:
        error = self._failure(status)
        if error:
            return Outcome(error=error)
        usage = self._usage or Usage(completion_tokens=len(self._shown_at))
        first = self._shown_at[0] if self._shown_at else self._ended_at
        return Outcome(
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            ttft_seconds=first - self._arrived_at,
            e2e_seconds=self._ended_at - self._arrived_at,
            gaps_seconds=tuple(after - before for before, after in pairwise(self._shown_at)),
        )

    def _failure(self, status: int) -> str:
        if self._error:
            return self._error
        if status != 200:
            return f"HTTP {status}: {self._head[:MAX_ERROR_BYTES].decode(errors='replace')}"
        return "" if self._is_finished else "the stream ended without a finish_reason"
