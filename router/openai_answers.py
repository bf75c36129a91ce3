"""The bodies of answers, as ``/openapi.json`` describes them and tests check them.

They describe; they do not build: what is sent is written by hand where it is made (``wire_format``, ``openai_errors``,
the route files).
https://platform.openai.com/docs/api-reference
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

FinishReason = Literal["stop", "length"]
ChatFinishReason = Literal["stop", "length", "tool_calls"]


class Answer(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)


class ErrorDetail(Answer):
    message: str
    type: str
    param: str | None
    """The field at fault."""
    code: str | None


class ErrorAnswer(Answer):
    """OpenAI's form of an error, which all endpoints use."""

    error: ErrorDetail


class CachedTokens(Answer):
    cached_tokens: int = Field(ge=0)


class ReasoningTokens(Answer):
    reasoning_tokens: int = Field(ge=0)


class Usage(Answer):
    prompt_tokens: int = Field(ge=0)
    completion_tokens: int = Field(ge=0)
    total_tokens: int = Field(ge=0)
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens


class ChatToken(Answer):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenWithTop(ChatToken):
    top_logprobs: list[ChatToken]


class ChatLogprobs(Answer):
    content: list[ChatTokenWithTop]
    refusal: None


class CalledFunction(Answer):
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(Answer):
    role: Literal["assistant"]
    content: str | None
    """Null where the model has called tools or only thought."""
    refusal: None
    reasoning_content: str = ""
    reasoning: str = ""
    """The same, under vLLM's newer name."""
    tool_calls: list[ToolCall] = []


class ChatChoice(Answer):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason


class Completed(Answer):
    """What every result and every piece of one begins with."""

    id: str
    created: int
    """Seconds since 1970."""
    model: str
    system_fingerprint: str


class PromptToken(Answer):
    logprob: float
    rank: int | None
    """1 for the likeliest; null for one that is not among the alternatives."""
    decoded_token: str


PromptLogprobs = list[dict[str, PromptToken] | None]
"""By token id, for each position of the prompt but the first."""


class ChatCompletion(Completed):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | None = None
    """Only where ``prompt_logprobs`` asks for it."""


class CalledFunctionDelta(Answer):
    name: str = ""
    """Only in the first piece of a call, as its id and type."""
    arguments: str
    """More of them."""


class ToolCallDelta(Answer):
    index: int
    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunctionDelta


class ChatDelta(Answer):
    role: Literal["assistant"] = "assistant"
    content: str = ""
    reasoning_content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = []


class ChatChunkChoice(Answer):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None
    finish_reason: ChatFinishReason | None


class ChatCompletionChunk(Completed):
    """One event of a streamed chat. With ``include_usage`` the last has the usage and no choices."""

    object: Literal["chat.completion.chunk"]
    choices: list[ChatChunkChoice]
    usage: Usage | None = None


class LegacyLogprobs(Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class TextChoice(Answer):
    index: int
    text: str
    logprobs: LegacyLogprobs | None
    finish_reason: FinishReason | None
    """Null only before the end of a stream."""
    prompt_logprobs: PromptLogprobs | None = None
    """Only where ``prompt_logprobs`` asks for it."""


class TextCompletion(Completed):
    """A completion, or one event of a streamed one."""

    object: Literal["text_completion"]
    choices: list[TextChoice]
    usage: Usage | None = None


class Embedding(Answer):
    object: Literal["embedding"]
    index: int
    embedding: list[float] | str
    """Little-endian float32 in base64 where ``encoding_format`` says so."""


class EmbeddingUsage(Answer):
    prompt_tokens: int
    total_tokens: int


class EmbeddingList(Answer):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    usage: EmbeddingUsage


class ModelCard(Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    """The longest prompt plus output that can be served now; 0 without workers."""


class ModelList(Answer):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None
    """As the vocabulary spells them; only where ``return_token_strs`` is true."""


class Detokenized(Answer):
    prompt: str


class Version(Answer):
    version: str


class Readiness(Answer):
    is_ready: bool
    reasons: list[str]
    """Why not; empty when it is."""
    workers: dict[str, int]
    """Live ones by role."""
