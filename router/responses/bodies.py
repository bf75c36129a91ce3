"""The body of ``POST /v1/responses``, checked as far as it can be without knowing the model.

Beyond what OpenAI documents it takes the sampling fields of the completions (``seed``, ``top_k``, ``stop``, …).
https://platform.openai.com/docs/api-reference/responses/create
"""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, JsonValue, Tag, model_validator

from ...core.request import MAX_LOGPROBS
from ..object_types import one_of, only
from ..openai_api import Body, ListOf, NamedSchema, RequestFields, Unsupported
from ..openai_errors import refusal, shown
from .items import Item

LOGPROBS = "message.output_text.logprobs"

MetadataKey = Annotated[str, Field(max_length=64)]
MetadataValue = Annotated[str, Field(max_length=512)]


class FunctionTool(Body):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, JsonValue] | None = None
    strict: bool | None = None


class NamedFunction(Body):
    type: Literal["function"]
    name: str


class AllowedTools(Body):
    type: Literal["allowed_tools"]
    mode: Literal["auto", "required"]
    tools: Annotated[list[Annotated[NamedFunction, only("function")]], Field(min_length=1, fail_fast=True)]


ChosenTools = Annotated[
    Annotated[NamedFunction, Tag("<function>")] | Annotated[AllowedTools, Tag("<allowed_tools>")],
    *one_of("function", "allowed_tools"),
]


class PlainText(Body):
    type: Literal["text"]


class JsonObject(Body):
    type: Literal["json_object"]


class JsonSchema(NamedSchema):
    type: Literal["json_schema"]


Format = Annotated[
    Annotated[PlainText, Tag("<text>")]
    | Annotated[JsonObject, Tag("<json_object>")]
    | Annotated[JsonSchema, Tag("<json_schema>")],
    *one_of("text", "json_object", "json_schema"),
]


class TextConfig(Body):
    format: Format | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Body):
    """Reasoning is shown whole; nobody here could sum it up."""

    effort: str | None = None
    summary: None = None
    generate_summary: None = None
    context: Literal["auto"] | None = None
    mode: Literal["standard"] | None = None


class ResponseStreamOptions(Body):
    include_obfuscation: Literal[False] | None = None


class ResponseRequest(RequestFields):
    """``POST /v1/responses``."""

    unsupported: ClassVar[Unsupported] = {
        "access_programs": (None,),
        "background": (None, False),
        "background_options": (None,),
        "context_management": (None, []),
        "conversation": (None,),
        "image": (None,),
        "max_tool_calls": (None,),
        "moderation": (None,),
        "prompt": (None,),
        "prompt_cache_options": (None,),
        "prompt_cache_retention": (None, "in_memory"),
    }

    input: str | Annotated[list[Item], Field(min_length=1, fail_fast=True)]
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    stream_options: ResponseStreamOptions | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    tools: ListOf[Annotated[FunctionTool, only("function")]] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTools | None = None
    parallel_tool_calls: bool | None = None
    metadata: Annotated[dict[MetadataKey, MetadataValue], Field(max_length=16)] | None = None

    @property
    def has_grammar(self) -> bool:
        """Whether there may be something to compile, as for a chat."""
        return bool(self.tools) or (self.text is not None and self.text.format is not None)

    @property
    def shows_logprobs(self) -> bool:
        return LOGPROBS in (self.include or ())

    @model_validator(mode="after")
    def _check_include(self) -> Self:
        for name in self.include or ():
            if name != LOGPROBS:
                raise refusal("include", f"including {shown(name)} is not supported by this server")
        if self.top_logprobs and not self.shows_logprobs:
            raise refusal("top_logprobs", f"'top_logprobs' is only allowed when 'include' holds '{LOGPROBS}'")
        return self

    @model_validator(mode="after")
    def _check_stream_options(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "'stream_options' is only allowed when 'stream' is true")
        return self
