"""The items that a conversation is made of, and the chat messages that they become.

Items come from clients, from this server's own answers sent back, and from the store; all are checked by these types.
https://platform.openai.com/docs/api-reference/responses/create (``input``)
"""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Annotated, ClassVar, Literal, Protocol, Self

from pydantic import Field, JsonValue, Tag, TypeAdapter, model_validator

from ..object_types import one_of, only
from ..openai_api import Body, ListOf
from ..openai_errors import refusal
from ..wire_format import Json

Empty = Annotated[list[JsonValue], Field(max_length=0)]
Status = Literal["in_progress", "completed", "incomplete"]
ItemId = Annotated[str, Field(min_length=1, max_length=128)]


class HasText(Protocol):
    @property
    def text(self) -> str: ...


# --- parts of a content ------------------------------------------------------------------------


class InputText(Body):
    type: Literal["input_text"]
    text: str


class OutputText(Body):
    """``logprobs`` and what a client has ``parsed`` come back with the text and change nothing."""

    type: Literal["output_text"]
    text: str
    annotations: Empty | None = None
    logprobs: list[JsonValue] | None = None
    parsed: JsonValue = None


class RefusalText(Body):
    type: Literal["refusal"]
    refusal: str

    @property
    def text(self) -> str:
        return self.refusal


class ReasoningText(Body):
    type: Literal["reasoning_text"]
    text: str


class SummaryText(Body):
    type: Literal["summary_text"]
    text: str


Part = Annotated[
    Annotated[InputText, Tag("<input_text>")]
    | Annotated[OutputText, Tag("<output_text>")]
    | Annotated[RefusalText, Tag("<refusal>")],
    *one_of("input_text", "output_text", "refusal"),
]
InputPart = Annotated[InputText, only("input_text")]


# --- items -------------------------------------------------------------------------------------


class ItemFields(Body):
    """``id`` and ``status`` are what items carry when they are sent back."""

    id_prefix: ClassVar[str]

    id: ItemId | None = None
    status: Status | None = None

    @abstractmethod
    def message(self) -> Json:
        """The chat message that holds this item and no other."""

    @abstractmethod
    def content_members(self) -> Json:
        """All but ``id`` and ``status``, spelled out as OpenAI's lists show items."""

    def listed(self, new_id: Callable[[], str]) -> Json:
        """As it is kept and shown; the same item can be made of it again."""
        item_id = self.id_prefix + new_id() if self.id is None else self.id
        return {"id": item_id, **self.content_members(), "status": self.status or "completed"}


class MessageItem(ItemFields):
    id_prefix = "msg_"

    type: Literal["message"] | None = None
    role: Literal["user", "system", "developer", "assistant"]
    content: str | ListOf[Part]
    phase: None = None

    @model_validator(mode="after")
    def _check_parts(self) -> Self:
        """What the model says is told apart from what it is told."""
        if self.role != "assistant" and not isinstance(self.content, str):
            for part in self.content:
                if part.type != "input_text":
                    raise refusal("content", f"a message of role '{self.role}' cannot hold '{part.type}'")
        return self

    def message(self) -> Json:
        return {"role": self.role, "content": _text(self.content)}

    def content_members(self) -> Json:
        content: list[Json]
        if not isinstance(self.content, str):
            content = [part.model_dump(exclude={"parsed"}, exclude_none=True) for part in self.content]
        elif self.role == "assistant":
            content = [{"type": "output_text", "text": self.content}]
        else:
            content = [{"type": "input_text", "text": self.content}]
        for part in content:
            if part["type"] == "output_text":
                part.setdefault("annotations", [])
        return {"type": "message", "role": self.role, "content": content}


class FunctionCallItem(ItemFields):
    id_prefix = "fc_"

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str

    def message(self) -> Json:
        function = {"name": self.name, "arguments": self.arguments}
        return {"role": "assistant", "tool_calls": [{"id": self.call_id, "type": "function", "function": function}]}

    def content_members(self) -> Json:
        return {"type": self.type, "call_id": self.call_id, "name": self.name, "arguments": self.arguments}


class FunctionOutputItem(ItemFields):
    id_prefix = "fco_"

    type: Literal["function_call_output"]
    call_id: str
    output: str | ListOf[InputPart]

    def message(self) -> Json:
        return {"role": "tool", "tool_call_id": self.call_id, "content": _text(self.output)}

    def content_members(self) -> Json:
        output = self.output if isinstance(self.output, str) else [part.model_dump() for part in self.output]
        return {"type": self.type, "call_id": self.call_id, "output": output}


class ReasoningItem(ItemFields):
    """A summary stands for the reasoning itself where another server did not tell that."""

    id_prefix = "rs_"

    type: Literal["reasoning"]
    summary: ListOf[SummaryText] | None = None
    content: ListOf[ReasoningText] | None = None
    encrypted_content: None = None

    def message(self) -> Json:
        text = _text((self.summary or ()) if self.content is None else self.content)
        return {"role": "assistant", "reasoning_content": text}

    def content_members(self) -> Json:
        return {"type": self.type, "summary": [], **self.model_dump(include={"summary", "content"}, exclude_none=True)}


Item = Annotated[
    Annotated[MessageItem, Tag("<message>")]
    | Annotated[FunctionCallItem, Tag("<function_call>")]
    | Annotated[FunctionOutputItem, Tag("<function_call_output>")]
    | Annotated[ReasoningItem, Tag("<reasoning>")],
    *one_of("message", "function_call", "function_call_output", "reasoning"),
]

_items = TypeAdapter(list[Item])


def read_items(listed: Sequence[Json]) -> list[Item]:
    """Items of the store."""
    return _items.validate_python(listed)


# --- messages ----------------------------------------------------------------------------------

TURN = ("reasoning_content", "content", "tool_calls")
"""What one turn of the model holds, in the order in which it comes."""


def chat_messages(items: Iterable[ItemFields], instructions: str | None) -> list[Json]:
    """The conversation as a chat: items of one turn of the model become one message."""
    messages: list[Json] = [] if instructions is None else [{"role": "system", "content": instructions}]
    for item in items:
        message = item.message()
        if messages and _continues(message, messages[-1]):
            before = messages[-1]
            if "tool_calls" in before:
                _calls(before).extend(_calls(message))
            else:
                before |= message
        else:
            messages.append(message)
    return [
        message if message.keys() & {"content", "tool_calls"} else {**message, "content": ""} for message in messages
    ]


def _continues(message: Json, before: Json) -> bool:
    """Whether both are of one turn of the model."""
    if message["role"] != "assistant" or before["role"] != "assistant":
        return False
    first = min(TURN.index(name) for name in message if name in TURN)
    last = max(TURN.index(name) for name in before if name in TURN)
    return last < first or first == TURN.index("tool_calls")


def _calls(message: Json) -> list[object]:
    calls = message["tool_calls"]
    assert isinstance(calls, list)
    return calls


def _text(content: str | Sequence[HasText]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)
