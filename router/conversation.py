"""The messages of a chat as its template wants them: content is a string, absent fields are absent.

What a template has no place for is written into the text: tools into the system message, calls and their results in the
spelling of the model's family.
"""

from collections.abc import Sequence
from itertools import groupby

import orjson

from .chat_template import NO_CONTENT, CallArguments, ChatMessage
from .openai_api import Function, Message, ToolCall
from .parsing.families import CallSpelling
from .text import TextModel
from .tools import tool_offers

SHORT_ID_CHARS = 9
"""Of the only ids of calls that the templates of Mistral's models accept."""


def template_messages(messages: Sequence[Message], text: TextModel, offered: Sequence[Function]) -> list[ChatMessage]:
    """``offered`` are told to the model here unless its template does."""
    made = [_template_message(message, text) for message in messages]
    if not _knows(text, "tool_calls"):
        made = _with_results_of_users(made)
    if offered and not text.syntax.template_offers:
        shows_system = text.template is not None and text.template.shows_system
        made = _with_offer(made, _offer_text(offered, text.syntax.calls.spelling), "system" if shows_system else "user")
    return made


def _knows(text: TextModel, word: str) -> bool:
    return text.template is not None and text.template.knows(word)


def _template_message(message: Message, text: TextModel) -> ChatMessage:
    """``developer`` is OpenAI's newer word for ``system``, which most templates do not know."""
    is_unknown_role = message.role == "developer" and not _knows(text, "developer")
    made: ChatMessage = {"role": "system" if is_unknown_role else message.role, "content": _content(message)}
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id and _call_id(message.tool_call_id, text),
        "reasoning_content": message.reasoning_content or message.reasoning,
    }
    made |= {key: value for key, value in optional.items() if value is not None}
    if message.tool_calls and _knows(text, "tool_calls"):
        made["tool_calls"] = [_template_call(call, text) for call in message.tool_calls]
    elif message.tool_calls:
        spelled = _spelled_calls(message.tool_calls, text.syntax.calls.spelling)
        made["content"] = "\n".join(filter(None, [_content(message), spelled]))
    return made


def _content(message: Message) -> str:
    """Parts follow each other without anything between them, as templates that know parts write them."""
    if isinstance(message.content, list):
        return "".join(part.text for part in message.content)
    content = message.content or message.refusal
    return NO_CONTENT if not content and message.tool_calls else content or ""


def _template_call(call: ToolCall, text: TextModel) -> dict[str, object]:
    function = {"name": call.function.name, "arguments": _arguments(call)}
    made: dict[str, object] = {"type": call.type, "function": function}
    return made if call.id is None else {**made, "id": _call_id(call.id, text)}


def _call_id(call_id: str, text: TextModel) -> str:
    """Its end is as unique as the whole where a template insists on nine characters."""
    return call_id[-SHORT_ID_CHARS:] if _knows(text, f"length != {SHORT_ID_CHARS}") else call_id


def _arguments(call: ToolCall) -> object:
    """Templates expect an object; what a model wrote that is none stays as it is."""
    try:
        arguments = orjson.loads(call.function.arguments)
    except orjson.JSONDecodeError:
        return call.function.arguments
    return CallArguments(arguments, call.function.arguments) if isinstance(arguments, dict) else call.function.arguments


# --- for templates that know nothing of tools ----------------------------------------------------


def _offer_text(functions: Sequence[Function], spelling: CallSpelling) -> str:
    """What a model without a template for tools is told of them."""
    offers = "\n".join(orjson.dumps(offer).decode() for offer in tool_offers(functions))
    name, arguments = "<name of the function>", "<its arguments as a JSON object>"
    example = _spelled([(name, arguments)], spelling)
    return (
        "You can call functions. Each line is one of them, with a JSON schema of its arguments:\n"
        f"<tools>\n{offers}\n</tools>\n"
        "To call a function, answer with its name and arguments in this form, once for each call, and with nothing "
        f"else:\n{example}\nYou then get the results. When no function helps, answer as usual."
    )


def _spelled_calls(calls: Sequence[ToolCall], spelling: CallSpelling) -> str:
    return _spelled([(call.function.name, call.function.arguments) for call in calls], spelling)


def _spelled(calls: Sequence[tuple[str, str]], spelling: CallSpelling) -> str:
    written = [f"{spelling.before_name}{name}{spelling.before_arguments}{args}{spelling.after}" for name, args in calls]
    return spelling.opening + spelling.separator.join(written) + spelling.closing


def _with_offer(messages: Sequence[ChatMessage], offer: str, role: str) -> list[ChatMessage]:
    """At the end of the first message if that is of this role, else in a message before it."""
    first = messages[0]
    if first["role"] != role:
        return [{"role": role, "content": offer}, *messages]
    return [{**first, "content": f"{first['content']}\n\n{offer}"}, *messages[1:]]


def _with_results_of_users(messages: Sequence[ChatMessage]) -> list[ChatMessage]:
    """Results of calls as a turn of the user, one turn for those that follow each other."""
    made: list[ChatMessage] = []
    for are_results, group in groupby(messages, lambda message: message["role"] == "tool"):
        if are_results:
            results = (f"<tool_response>\n{message['content']}\n</tool_response>" for message in group)
            made.append({"role": "user", "content": "\n".join(results)})
        else:
            made += group
    return made
