"""From the body of a response's request to what workers are asked for, through the chat that it amounts to.

So tools, grammars and reasoning mean the same at both endpoints. What the chat's door refuses is told in this
endpoint's words.
"""

import re
import uuid
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import orjson
from pydantic import ValidationError

from ..openai_api import ChatCompletionRequest, RequestFields
from ..openai_errors import ApiError, of_validation
from ..prepare import CONTEXT_EXCEEDED, DrawSeed, Limits, PreparedRequest, prepare_chat
from ..text import TextModel
from ..wire_format import Json
from .bodies import AllowedTools, FunctionTool, JsonObject, JsonSchema, NamedFunction, PlainText, ResponseRequest
from .format import ResponseFormat
from .items import ItemFields, MessageItem, chat_messages, read_items
from .store import ResponseStore, Turn, turns_to

CHAT_NAMES = {
    "messages": "input",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
}
"""Fields of a chat's request, and what they are called here."""

SHARED = set(RequestFields.model_fields)


def input_items(body: ResponseRequest) -> Sequence[ItemFields]:
    return [MessageItem(role="user", content=body.input)] if isinstance(body.input, str) else body.input


def items_before(last: Turn | None) -> list[ItemFields]:
    """The conversation that a response ends, its output included. Raises `ApiError` where that is not whole."""
    items: list[ItemFields] = []
    for turn in turns_to(last):
        response = orjson.loads(turn.body)
        if response["status"] == "failed":
            raise ApiError.invalid("previous_response_id", f"The response '{turn.id}' has failed.")
        items += read_items([*orjson.loads(turn.input_items), *response["output"]])
    return items


@dataclass(frozen=True, slots=True)
class Keeper:
    """Where the answer goes: after ``previous``, if it is to be kept at all."""

    store: ResponseStore
    tenant: str
    previous: Turn | None
    is_wanted: bool
    now: Callable[[], float]

    def keep(self, given: bytes, response_id: str, members: Json) -> bytes:
        """The response as JSON, which says whether it is kept. ``given`` are the items it answers, listed, as JSON."""
        body = orjson.dumps({**members, "store": True})
        turn = Turn(self.tenant, response_id, body, given, self.previous, self.now())
        if self.is_wanted and self.store.has_room_for(turn):
            self.store.keep(turn)
            return body
        return orjson.dumps({**members, "store": False})


def prepare_response(
    body: ResponseRequest, keeper: Keeper, text: TextModel, limits: Limits, draw_seed: DrawSeed
) -> PreparedRequest:
    """Raises `ApiError`."""
    given = input_items(body)
    items = [*items_before(keeper.previous), *given]
    prepare = partial(_prepare_items, body, text=text, limits=limits, draw_seed=draw_seed)
    prepared = _truncated(items, prepare) if body.truncation == "auto" else prepare(items)
    listed = orjson.dumps([item.listed(lambda: uuid.uuid4().hex) for item in given])
    return replace(prepared, format=partial(ResponseFormat, body, partial(keeper.keep, listed)))


def _prepare_items(
    body: ResponseRequest, items: Sequence[ItemFields], text: TextModel, limits: Limits, draw_seed: DrawSeed
) -> PreparedRequest:
    try:
        chat = ChatCompletionRequest.model_validate(chat_members(body, items))
        return prepare_chat(chat, text, limits, draw_seed)
    except ValidationError as error:
        raise _in_our_words(of_validation(error.errors())) from None
    except ApiError as error:
        raise _in_our_words(error) from None


def _truncated(
    items: Sequence[ItemFields], prepare: Callable[[Sequence[ItemFields]], PreparedRequest]
) -> PreparedRequest:
    """The longest end of the conversation that fits: all of it, or from some message of the user's on."""
    starts = [n for n, item in enumerate(items) if n > 0 and isinstance(item, MessageItem) and item.role == "user"]
    cuts = [0, *starts]
    prepared: dict[int, PreparedRequest] = {}

    def fits(cut: int) -> bool:
        try:
            prepared[cut] = prepare(items[cuts[cut] :])
        except ApiError as error:
            if error.code != CONTEXT_EXCEEDED:
                raise
            return False
        return True

    longest = 0 if fits(0) else bisect_left(range(len(cuts)), True, lo=1, key=fits)
    return prepared[longest] if longest in prepared else prepare(items[cuts[-1] :])


def chat_members(body: ResponseRequest, items: Sequence[ItemFields]) -> Json:
    """The body of the chat that this response continues."""
    members: Json = body.model_dump(include=SHARED, exclude_none=True)
    members["messages"] = chat_messages(items, body.instructions)
    members["max_completion_tokens"] = body.max_output_tokens
    if body.shows_logprobs:
        members |= {"logprobs": True, "top_logprobs": body.top_logprobs}
    if body.tools:
        members["tools"] = [{"type": "function", "function": _function(tool)} for tool in body.tools]
        members["parallel_tool_calls"] = body.parallel_tool_calls
    if body.tools or body.tool_choice != "auto":
        members["tool_choice"] = _tool_choice(body.tool_choice)
    if body.text is not None and body.text.format is not None:
        members["response_format"] = _response_format(body.text.format)
    if body.reasoning is not None:
        members["reasoning_effort"] = body.reasoning.effort
    return members


def _function(tool: FunctionTool) -> Json:
    return tool.model_dump(exclude={"type"})


def _tool_choice(choice: str | NamedFunction | AllowedTools | None) -> object:
    match choice:
        case NamedFunction(name=name):
            return {"type": "function", "function": {"name": name}}
        case AllowedTools(mode=mode, tools=tools):
            return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(_tool_choice, tools)]}}
        case _:
            return choice


def _response_format(form: PlainText | JsonObject | JsonSchema) -> Json:
    if not isinstance(form, JsonSchema):
        return {"type": form.type}
    return {"type": form.type, "json_schema": form.model_dump(by_alias=True, exclude={"type"})}


def _in_our_words(error: ApiError) -> ApiError:
    """What the chat's door says of a field, said of the field that the client has sent."""
    if error.param is None:
        return error
    head, _, _ = error.param.partition(".")
    message = error.message
    for name in (error.param, head):
        message = re.sub(rf"\b{re.escape(name)}\b", _our_name(name), message)
    return ApiError(error.status, message, type=error.type, param=_our_name(error.param), code=error.code)


def _our_name(param: str) -> str:
    head, _, rest = param.partition(".")
    if head == "messages":
        return "input"
    inner = [part for part in rest.split(".") if part not in ("", "function", "json_schema")]
    return ".".join([CHAT_NAMES.get(head, head), *inner])
