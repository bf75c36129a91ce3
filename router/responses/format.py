"""A response as OpenAI's clients read it, whole or in events.

https://platform.openai.com/docs/api-reference/responses/object and …/responses-streaming
"""

import time
import uuid
from collections.abc import Callable, Sequence

from ...core.sequence import FinishReason
from ..openai_errors import ApiError
from ..output import OutputAssembler, OutputDelta
from ..prepare import PreparedRequest
from ..token_usage import token_usage
from ..wire_format import Json, WireFormat
from .bodies import ResponseRequest
from .items import Status
from .output_items import EventLog, OutputItems

Keep = Callable[[str, Json], bytes]
"""Given the id and the members of a response: the response as JSON, kept for later if it is to be."""


class ResponseFormat(WireFormat):
    """The answer to one request. ``created`` is in seconds since 1970."""

    def __init__(
        self, body: ResponseRequest, keep: Keep, prepared: PreparedRequest, unique: str, created: int, fingerprint: str
    ) -> None:
        self.id = f"resp_{unique}"
        self._keep = keep
        self._log = EventLog()
        self._output = OutputItems(self._log, lambda: uuid.uuid4().hex)
        head: Json = {"id": self.id, "object": "response", "created_at": created, "status": "in_progress"}
        self._members = {**head, **request_members(body, prepared)}

    def opening(self, index: int) -> bytes:
        begun = self._log.event("response.created", response=self._members)
        return begun + self._log.event("response.in_progress", response=self._members)

    def chunk(self, index: int, delta: OutputDelta) -> bytes:
        return self._output.feed(delta)

    def ending(self, assemblers: Sequence[OutputAssembler]) -> bytes:
        (assembler,) = assemblers
        closed = self._output.end(_status(assembler))
        return closed + self._final_event(self._ended(assembler))

    def body(self, assemblers: Sequence[OutputAssembler]) -> bytes:
        """Made of the same deltas as a stream, so that both have the same items."""
        (assembler,) = assemblers
        for delta in assembler.deltas:
            self._output.feed(delta)
        self._output.end(_status(assembler))
        return self._keep(self.id, self._ended(assembler))

    def failure(self, error: ApiError) -> bytes:
        told = self._log.event("error", code=error.code, message=error.message, param=error.param)
        closed = self._output.end("incomplete")
        failed = {"status": "failed", "error": {"code": _error_code(error), "message": error.message}}
        return told + closed + self._final_event({**self._members, **failed, "output": self._output.items})

    def _ended(self, assembler: OutputAssembler) -> Json:
        status = _status(assembler)
        is_whole = status == "completed"
        return {
            **self._members,
            "status": status,
            "completed_at": int(time.time()) if is_whole else None,
            "incomplete_details": None if is_whole else {"reason": "max_output_tokens"},
            "output": self._output.items,
            "usage": response_usage(assembler),
        }

    def _final_event(self, members: Json) -> bytes:
        name = f"response.{members['status']}".encode()
        return self._log.written(name, b'{"response":%b}' % self._keep(self.id, members))


def _status(assembler: OutputAssembler) -> Status:
    return "completed" if assembler.finish is FinishReason.STOP else "incomplete"


def _error_code(error: ApiError) -> str:
    """Of those that OpenAI lists for failed responses."""
    match error.status:
        case 400:
            return "invalid_prompt"
        case 429:
            return "rate_limit_exceeded"
        case _:
            return "server_error"


def request_members(body: ResponseRequest, prepared: PreparedRequest) -> Json:
    """What the request settles, and the members that its answer fills in later."""
    (choice,) = prepared.choices
    given = body.model_dump(include={"tools", "tool_choice"})
    return {
        "background": False,
        "completed_at": None,
        "conversation": None,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "max_tool_calls": None,
        "metadata": body.metadata or {},
        "model": prepared.model_name,
        "output": [],
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": body.previous_response_id,
        "prompt": None,
        "prompt_cache_key": body.prompt_cache_key,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "safety_identifier": body.safety_identifier,
        "service_tier": "default",
        "store": body.store is not False,
        "temperature": choice.params.temperature,
        "text": _text_config(body),
        "tool_choice": given["tool_choice"] or "auto",
        "tools": given["tools"] or [],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": choice.params.top_p if body.top_p is None else body.top_p,
        "truncation": body.truncation or "disabled",
        "usage": None,
        "user": body.user,
    }


def _text_config(body: ResponseRequest) -> Json:
    form = body.text and body.text.format
    shown = form.model_dump(by_alias=True) if form else {"type": "text"}
    return {"format": shown, "verbosity": "medium"}


def response_usage(assembler: OutputAssembler) -> Json:
    """Nothing is written to a cache that a client would have to ask or pay for."""
    used = token_usage([assembler])
    return {
        "input_tokens": used.num_prompt,
        "input_tokens_details": {"cached_tokens": used.num_cached, "cache_write_tokens": 0},
        "output_tokens": used.num_output,
        "output_tokens_details": {"reasoning_tokens": used.num_reasoning},
        "total_tokens": used.num_total,
    }
