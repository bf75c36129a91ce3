"""The bodies of answers, as ``/openapi.json`` describes them and tests check them; like ``openai_answers``."""

from typing import Literal

from pydantic import JsonValue

from ..openai_answers import Answer


class ResponseError(Answer):
    code: str
    message: str


class IncompleteDetails(Answer):
    reason: Literal["max_output_tokens"]


class InputDetails(Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(Answer):
    reasoning_tokens: int


class ResponseUsage(Answer):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class ReasoningUsed(Answer):
    effort: str | None
    summary: None


class ResponseAnswer(Answer):
    """A response; its items and tools are those of OpenAI's reference."""

    id: str
    object: Literal["response"]
    created_at: int
    """Seconds since 1970, as is ``completed_at``."""
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False]
    completed_at: int | None
    conversation: None
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: None
    metadata: dict[str, str]
    model: str
    output: list[dict[str, JsonValue]]
    parallel_tool_calls: bool
    previous_response_id: str | None
    prompt: None
    prompt_cache_key: str | None
    reasoning: ReasoningUsed
    safety_identifier: str | None
    service_tier: Literal["default"]
    store: bool
    """Whether it is kept for later."""
    temperature: float
    text: dict[str, JsonValue]
    tool_choice: str | dict[str, JsonValue]
    tools: list[dict[str, JsonValue]]
    top_logprobs: int
    top_p: float
    truncation: Literal["auto", "disabled"]
    usage: ResponseUsage | None
    user: str | None


class ResponseEvent(Answer):
    """One event of a stream; what else it has depends on its ``type``, as in OpenAI's reference."""

    model_config = Answer.model_config | {"extra": "allow"}

    type: str
    sequence_number: int


class ItemList(Answer):
    object: Literal["list"]
    data: list[dict[str, JsonValue]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedResponse(Answer):
    id: str
    object: Literal["response"]
    deleted: Literal[True]
