"""The prompts of a request, in tokens: messages through the model's chat template, texts and ids as they are."""

from collections.abc import Sequence

import orjson

from .chat_template import ChatMessage, ChatTemplate, TemplateRefused
from .openai_api import ChatCompletionRequest, CompletionRequest, Message, ToolCall
from .openai_errors import ApiError
from .output import PreparedPrompt
from .sampling import check_ids
from .text import TextModel

MAX_PROMPTS = 1024
"""Of one request."""

TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables of a chat template that ``chat_template_kwargs`` may not set."""


def chat_prompt(body: ChatCompletionRequest, text: TextModel) -> PreparedPrompt:
    """Raises `ApiError`, with the template's own words where it refuses the messages."""
    variables = body.chat_template_kwargs or {}
    taken = sorted(TEMPLATE_NAMES & variables.keys())
    if taken:
        raise ApiError.invalid("chat_template_kwargs", f"'chat_template_kwargs' may not set {', '.join(taken)}.")
    continues = bool(body.continue_final_message)
    opens_turn = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    try:
        rendered = text.render_chat(template_messages(body.messages, text.template), opens_turn, continues, variables)
    except TemplateRefused as refusal:
        raise ApiError.invalid("messages", str(refusal)) from None
    return PreparedPrompt(text.encode_chat(rendered).ids, rendered)


def template_messages(messages: Sequence[Message], template: ChatTemplate | None) -> list[ChatMessage]:
    """The messages as templates expect them: content is a string, absent fields are absent."""
    return [_template_message(message, template) for message in messages]


def _template_message(message: Message, template: ChatTemplate | None) -> ChatMessage:
    """``developer`` is OpenAI's newer word for ``system``, which most templates do not know."""
    is_unknown_role = message.role == "developer" and not (template and template.knows("developer"))
    made: ChatMessage = {"role": "system" if is_unknown_role else message.role, "content": _content(message)}
    optional = {
        "name": message.name,
        "tool_call_id": message.tool_call_id,
        "reasoning_content": message.reasoning_content,
    }
    made |= {key: value for key, value in optional.items() if value is not None}
    if message.tool_calls and template and template.knows("tool_calls"):
        made["tool_calls"] = [_template_call(call) for call in message.tool_calls]
    elif message.tool_calls:
        made["content"] = "\n".join(filter(None, [_content(message), *map(_spelled_call, message.tool_calls)]))
    return made


def _content(message: Message) -> str:
    """Parts follow each other without anything between them, as templates that know parts write them."""
    if isinstance(message.content, list):
        return "".join(part.text for part in message.content)
    return message.content or message.refusal or ""


def _template_call(call: ToolCall) -> dict[str, object]:
    function = {"name": call.function.name, "arguments": _arguments(call)}
    made: dict[str, object] = {"type": call.type, "function": function}
    return made if call.id is None else {**made, "id": call.id}


def _spelled_call(call: ToolCall) -> str:
    """How a call appears where the template has no place for it (the spelling of the Hermes models)."""
    function = {"name": call.function.name, "arguments": _arguments(call)}
    return f"<tool_call>\n{orjson.dumps(function).decode()}\n</tool_call>"


def _arguments(call: ToolCall) -> object:
    """Templates expect an object; what a model wrote that is none stays as it is."""
    try:
        arguments = orjson.loads(call.function.arguments)
    except orjson.JSONDecodeError:
        return call.function.arguments
    return arguments if isinstance(arguments, dict) else call.function.arguments


def completion_prompts(body: CompletionRequest, text: TextModel, vocab_size: int) -> list[PreparedPrompt]:
    """A text, ids, or a list of either. Raises `ApiError` for too many of them and for unknown ids."""
    prompt = body.prompt
    if isinstance(prompt, str):
        return [text_prompt(prompt, text)]
    ids = [item for item in prompt if isinstance(item, int)]
    if ids or not prompt:
        return [ids_prompt(ids, text, vocab_size)]
    if len(prompt) > MAX_PROMPTS:
        raise ApiError.invalid("prompt", f"Invalid 'prompt': {len(prompt)} prompts, the most is {MAX_PROMPTS}.")
    return [
        text_prompt(item, text) if isinstance(item, str) else ids_prompt(item, text, vocab_size)
        for item in prompt
        if not isinstance(item, int)
    ]


def text_prompt(prompt: str, text: TextModel) -> PreparedPrompt:
    encoded = text.encode(prompt)
    return PreparedPrompt(encoded.ids, prompt, encoded.num_added)


def ids_prompt(ids: list[int], text: TextModel, vocab_size: int) -> PreparedPrompt:
    """Whoever sends ids sees all of them in an echo, special ones too."""
    check_ids("prompt", ids, vocab_size)
    return PreparedPrompt(ids, text.decode(ids, skips_special=False))
