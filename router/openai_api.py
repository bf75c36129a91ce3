"""The bodies of OpenAI's two completion endpoints, checked as far as they can be without knowing the model.

Unknown fields are refused, and so are documented ones that this server does not do; nothing that could change a
result is ignored. https://platform.openai.com/docs/api-reference/chat/create and …/completions/create; beyond those
the sampling fields that vLLM has too (``top_k``, ``min_p``, ``min_tokens``, …).
"""

from typing import Annotated, Any, ClassVar, Literal, Self, TypeVar

import orjson
from pydantic import BaseModel, ConfigDict, Field, JsonValue, Tag, model_validator
from pydantic_core import PydanticCustomError

from ..core.request import LEAST_URGENT, MAX_LOGPROBS, MOST_URGENT
from .object_types import one_of, only
from .openai_errors import encodable
from .openai_errors import refusal as _refusal

MAX_CHOICES = 128
"""Of one prompt."""
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_STOP_IDS = 1024
MAX_ENTRIES = 1024
"""Of an object that is the value of a field, such as ``logit_bias``."""
MAX_LEGACY_LOGPROBS = 5
MAX_TOOLS = 128
MAX_CACHE_SALT_CHARS = 256
MAX_TEXT_CHOICES = 4096
"""Texts of which an output may be one."""

NonNegative = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]
Bias = Annotated[float, Field(ge=-100, le=100)]
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Priority = Annotated[int, Field(ge=MOST_URGENT, le=LEAST_URGENT)]
CacheSalt = Annotated[str, Field(min_length=1, max_length=MAX_CACHE_SALT_CHARS)]
Item = TypeVar("Item")
ListOf = Annotated[list[Item], Field(fail_fast=True)]
"""Of any length: what is wrong with one item is told without a look at the millions that may follow."""
TokenIds = ListOf[int]
Prompt = str | TokenIds | ListOf[str] | ListOf[TokenIds]
JsonSchema = dict[str, JsonValue] | bool
TextChoices = Annotated[list[str], Field(min_length=1, max_length=MAX_TEXT_CHOICES)]

Unsupported = dict[str, tuple[JsonValue, ...]]
"""Fields that this server does not do, with the values that ask for nothing."""


class Body(BaseModel):
    """No type is bent into another, no field is unknown, no number is infinite."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
    aliases: ClassVar[frozenset[str]] = frozenset()
    """Names of fields in JSON that pydantic has taken for itself."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        """The first unknown field is told, however many there are."""
        for name in data if isinstance(data, dict) else ():
            if name not in cls.model_fields and name not in cls.aliases:
                raise PydanticCustomError("unknown", "{field}", {"field": encodable(name)})
        return data


class StreamOptions(Body):
    """``continuous_usage_stats`` is vLLM's: every chunk tells the usage so far."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None

    @model_validator(mode="after")
    def _check_usage(self) -> Self:
        if self.continuous_usage_stats and not self.include_usage:
            raise _refusal(
                "continuous_usage_stats", "'continuous_usage_stats' is only allowed when 'include_usage' is true"
            )
        return self


class CheckedBody(Body):
    """A body that other processes could be told: no lone surrogates, no huge numbers, no huge objects."""

    @model_validator(mode="before")
    @classmethod
    def _check_values(cls, data: Any) -> Any:
        for name, value in data.items() if isinstance(data, dict) else ():
            if isinstance(value, dict) and len(value) > MAX_ENTRIES:
                raise _refusal(name, f"'{name}' has {len(value)} entries, the most is {MAX_ENTRIES}")
            try:
                orjson.dumps(value)
            except orjson.JSONEncodeError as error:
                raise _refusal(name, f"'{name}' holds what cannot be encoded ({error})") from None
        return data


class RequestFields(CheckedBody):
    """What every endpoint that generates takes.

    ``None`` is the same as absent, and means the model's or OpenAI's default.
    """

    unsupported: ClassVar[Unsupported] = {}

    model: str | None = None
    stream: bool | None = None

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Share | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: dict[str, Bias] | None = None

    stop: StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_IDS)] | None = None
    min_tokens: NonNegative | None = None
    ignore_eos: bool | None = None

    priority: Priority | None = None
    """A lower number goes first; the caller's key says what it may ask for."""
    cache_salt: CacheSalt | None = None
    """Only requests with the same share prefixes in the KV cache."""

    user: str | None = None
    """This and the following have no effect on the result, by definition."""
    safety_identifier: str | None = None
    metadata: dict[str, str] | None = None
    prompt_cache_key: str | None = None
    service_tier: Literal["auto", "default"] | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in cls.unsupported.keys() & data.keys():
            if data[name] not in cls.unsupported[name]:
                raise _refusal(name, f"'{name}' is not supported by this server")
        return {name: value for name, value in data.items() if name not in cls.unsupported}


class NamedSchema(Body):
    """``strict`` or not, the output conforms."""

    aliases = frozenset({"schema"})

    name: Annotated[str, Field(pattern="^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    json_schema: JsonSchema = Field(alias="schema")
    strict: bool | None = None


class OutputFormat(Body):
    """``response_format``."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise _refusal("json_schema", "'json_schema' belongs to the type 'json_schema', which needs it")
        return self


class StructuredOutputs(Body):
    """vLLM's ``structured_outputs``; the fields exclude each other."""

    aliases = frozenset({"json"})

    json_schema: JsonSchema | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: TextChoices | None = None
    grammar: str | None = None
    json_object: bool | None = None


class CompletionFields(RequestFields):
    """What both endpoints of completions take."""

    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    stream_options: StreamOptions | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """vLLM's: of each token of the prompt, and of so many alternatives."""

    response_format: OutputFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: JsonSchema | str | None = None
    """This and the following are vLLM's older spelling."""
    guided_regex: str | None = None
    guided_choice: TextChoices | None = None
    guided_grammar: str | None = None

    @property
    def has_grammar(self) -> bool:
        """Whether there is something to compile, for which others must not wait."""
        guided = (self.guided_json, self.guided_regex, self.guided_choice, self.guided_grammar)
        return any(field is not None for field in (self.response_format, self.structured_outputs, *guided))

    @property
    def num_generated(self) -> int:
        """Choices of each prompt that are to be generated, shown or not."""
        return self.n or 1

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise _refusal("stream_options", "'stream_options' is only allowed when 'stream' is true")
        if self.prompt_logprobs is not None and self.stream:
            raise _refusal("prompt_logprobs", "'prompt_logprobs' is not allowed when 'stream' is true")
        return self


class CompletionRequest(CompletionFields):
    """``POST /v1/completions``."""

    unsupported: ClassVar[Unsupported] = {"suffix": (None,)}

    prompt: Prompt
    max_tokens: NonNegative | None = None
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LEGACY_LOGPROBS)] | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None

    @model_validator(mode="after")
    def _check_best_of(self) -> Self:
        num_shown = self.n or 1
        if self.best_of is not None and self.best_of < num_shown:
            raise _refusal("best_of", f"'best_of' is {self.best_of}, less than 'n', which is {num_shown}")
        if self.stream and self.num_generated > num_shown:
            raise _refusal("best_of", "'best_of' greater than 'n' is not allowed when 'stream' is true")
        return self

    @model_validator(mode="after")
    def _check_prompt_logprobs(self) -> Self:
        """An echo shows as many alternatives as ``logprobs`` says."""
        if self.num_prompt_logprobs != self.prompt_logprobs and self.prompt_logprobs is not None:
            raise _refusal("prompt_logprobs", "'prompt_logprobs' differs from 'logprobs', which 'echo' shows")
        return self

    @property
    def num_prompt_logprobs(self) -> int | None:
        return self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs

    @property
    def num_generated(self) -> int:
        return self.best_of or self.n or 1


class TextPart(Body):
    type: Literal["text"]
    text: str


class FunctionCall(Body):
    name: str
    arguments: str
    """JSON, as the model wrote it."""


class ToolCall(Body):
    id: str | None = None
    index: int | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One turn. The fields that may only be empty are what OpenAI's own answers carry when they are sent back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | ListOf[Annotated[TextPart, only("text")]] | None = None
    name: str | None = None
    tool_calls: ListOf[Annotated[ToolCall, only("function")]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    annotations: Annotated[list[JsonValue], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check_content(self) -> Self:
        may_be_empty = self.role == "assistant" and (self.tool_calls or self.refusal)
        if self.content is None and not may_be_empty:
            raise _refusal("content", f"a message of role '{self.role}' needs 'content'")
        return self


class Function(Body):
    """What a model may call; without ``parameters`` it takes none."""

    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _check_parameters(self) -> Self:
        """Arguments are an object, whatever else their schema says."""
        kind = (self.parameters or {}).get("type", "object")
        if kind != "object":
            raise _refusal("parameters", f"the parameters of '{self.name}' must be of type 'object'")
        return self

    @property
    def arguments_schema(self) -> dict[str, JsonValue]:
        """Of the arguments."""
        return {"type": "object", "properties": {}, **(self.parameters or {})}


class Tool(Body):
    type: Literal["function"]
    function: Function


class FunctionName(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: FunctionName


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MAX_TOOLS)]


class AllowedToolsChoice(Body):
    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


ToolChoice = (
    Literal["none", "auto", "required"]
    | Annotated[
        Annotated[NamedTool, Tag("<function>")] | Annotated[AllowedToolsChoice, Tag("<allowed_tools>")],
        *one_of("function", "allowed_tools"),
    ]
)


def chosen_names(choice: ToolChoice | None) -> list[str]:
    """The functions that a choice names."""
    match choice:
        case NamedTool():
            return [choice.function.name]
        case AllowedToolsChoice():
            return [tool.function.name for tool in choice.allowed_tools.tools]
        case _:
            return []


class ChatCompletionRequest(CompletionFields):
    """``POST /v1/chat/completions``."""

    unsupported: ClassVar[Unsupported] = {
        "functions": (None, []),
        "function_call": (None, "none"),
        "modalities": (None, ["text"]),
        "audio": (None,),
        "prediction": (None,),
        "verbosity": (None,),
        "web_search_options": (None,),
        "store": (None, False),
    }

    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = None
    tools: Annotated[list[Annotated[Tool, only("function")]], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    @property
    def has_grammar(self) -> bool:
        return super().has_grammar or bool(self.tools)

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools or ()]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise _refusal("tools", f"two functions are called '{twice}'")
        if not names:
            if self.tool_choice not in (None, "none"):
                raise _refusal("tool_choice", "'tool_choice' is only allowed when 'tools' are given")
            if self.parallel_tool_calls is not None:
                raise _refusal("parallel_tool_calls", "'parallel_tool_calls' is only allowed when 'tools' are given")
        for name in chosen_names(self.tool_choice):
            if name not in names:
                raise _refusal("tool_choice", f"'tool_choice' names a function {name!r} that is not in 'tools'")
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise _refusal("top_logprobs", "'top_logprobs' is only allowed when 'logprobs' is true")
        if self.add_generation_prompt and self.continue_final_message:
            raise _refusal(
                "continue_final_message", "exclude each other: 'continue_final_message', 'add_generation_prompt'"
            )
        limits = {self.max_tokens, self.max_completion_tokens} - {None}
        if len(limits) > 1:
            raise _refusal("max_tokens", "'max_tokens' and 'max_completion_tokens' differ")
        return self
