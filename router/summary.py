"""What is told of one HTTP request after its end, in the access log and in its trace. Nothing of any prompt or key.

Middlewares and endpoints leave what they know in the request's state: ``request_id`` and ``caller`` (router/access),
``error`` (an `ApiError`), ``reply`` (a `Reply`, as soon as workers are asked).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .ledger import Entry
from .openai_errors import ApiError
from .token_usage import TokenUsage


@dataclass(frozen=True, slots=True)
class Attempted:
    """The workers of a choice's last attempt, and how many there were."""

    prefill: str
    decode: str
    num_attempts: int


@dataclass(frozen=True, slots=True)
class Summary:
    """``model`` and what follows is known only of requests that workers were asked for."""

    request_id: str | None
    key: str | None
    error: str | None
    model: str | None = None
    is_stream: bool = False
    usage: TokenUsage | None = None
    ttft_seconds: float | None = None
    finish_reasons: tuple[str | None, ...] = ()
    attempted: tuple[Attempted, ...] = field(default=())

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> "Summary":
        request_id, caller = state.get("request_id"), state.get("caller")
        key = caller.name if caller is not None else None
        error = _error(state.get("error"))
        reply = state.get("reply")
        if reply is None:
            return cls(request_id, key, error)
        entries: list[Entry] = reply.entries
        starts = [entry.first_token_at - entry.opened_at for entry in entries if entry.first_token_at is not None]
        return cls(
            request_id,
            key,
            error,
            model=reply.prepared.model_name,
            is_stream=reply.prepared.is_stream,
            usage=reply.usage,
            ttft_seconds=min(starts, default=None),
            finish_reasons=tuple(entry.end_reason for entry in entries),
            attempted=tuple(_attempted(entry) for entry in entries),
        )


def _attempted(entry: Entry) -> Attempted:
    pair = entry.attempt.pair
    return Attempted(pair.prefill.name, pair.decode.name, len(entry.attempts))


def _error(error: ApiError | None) -> str | None:
    """Its kind and the field at fault, never its message, which may quote what the client sent."""
    if error is None:
        return None
    kind = error.code or error.type
    if error.param is None or kind == "unknown_parameter":
        return kind
    return f"{kind}: {error.param.partition('.')[0]}"
