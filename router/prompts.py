"""The prompts of a request, in tokens: messages through the model's chat template, texts and ids as they are."""

from collections.abc import Mapping

from .chat_template import ChatTemplate, TemplateRefused
from .conversation import template_messages
from .openai_api import ChatCompletionRequest, Prompt
from .openai_errors import ApiError, shown
from .output import PreparedPrompt
from .sampling import check_ids
from .text import TextModel
from .tools import tool_offers, tool_use

MAX_PROMPTS = 1024
"""Of one request."""

TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
"""Variables of a chat template that ``chat_template_kwargs`` may not set."""


def chat_prompt(body: ChatCompletionRequest, text: TextModel) -> PreparedPrompt:
    """Raises `ApiError`, with the template's own words where it refuses the messages."""
    variables = _template_variables(body, text.template)
    continues = bool(body.continue_final_message)
    opens_turn = not continues if body.add_generation_prompt is None else body.add_generation_prompt
    use = tool_use(body)
    offered = use.offered if use is not None else ()
    messages = template_messages(body.messages, text, offered)
    offers = tool_offers(offered) if offered and text.syntax.template_offers else None
    try:
        rendered = text.render_chat(messages, opens_turn, continues, variables, offers)
    except TemplateRefused as refusal:
        raise ApiError.invalid("messages", str(refusal)) from None
    return PreparedPrompt(text.encode_chat(rendered).ids, rendered)


def _template_variables(body: ChatCompletionRequest, template: ChatTemplate | None) -> Mapping[str, object]:
    """Raises `ApiError` for a variable that is set elsewhere, and for one that the template does not look at."""
    known = frozenset() if template is None else template.variables
    variables = body.chat_template_kwargs or {}
    if taken := sorted(TEMPLATE_NAMES & variables.keys()):
        raise ApiError.invalid("chat_template_kwargs", f"'chat_template_kwargs' may not set {', '.join(taken)}.")
    for name in variables.keys() - known:
        raise ApiError.invalid("chat_template_kwargs", f"The chat template of this model does not know {shown(name)}.")
    if body.reasoning_effort is None:
        return variables
    if "reasoning_effort" not in known:
        raise ApiError.invalid(
            "reasoning_effort", "'reasoning_effort' is not supported: the chat template of this model does not know it."
        )
    return {"reasoning_effort": body.reasoning_effort, **variables}


def prompts_of(prompt: Prompt, field: str, text: TextModel, vocab_size: int) -> list[PreparedPrompt]:
    """A text, ids, or a list of either. Raises `ApiError` naming ``field`` for too many of them and for unknown ids."""
    if isinstance(prompt, str):
        return [text_prompt(prompt, text)]
    ids = [item for item in prompt if isinstance(item, int)]
    if ids or not prompt:
        return [ids_prompt(ids, text, vocab_size, field)]
    if len(prompt) > MAX_PROMPTS:
        raise ApiError.invalid(field, f"Invalid '{field}': there are {len(prompt)}, the most is {MAX_PROMPTS}.")
    return [
        text_prompt(item, text) if isinstance(item, str) else ids_prompt(item, text, vocab_size, field)
        for item in prompt
        if not isinstance(item, int)
    ]


def text_prompt(prompt: str, text: TextModel) -> PreparedPrompt:
    encoded = text.encode(prompt)
    return PreparedPrompt(encoded.ids, prompt, encoded.num_added)


def ids_prompt(ids: list[int], text: TextModel, vocab_size: int, field: str = "prompt") -> PreparedPrompt:
    """Whoever sends ids sees all of them in an echo, special ones too."""
    check_ids(field, ids, vocab_size)
    return PreparedPrompt(ids, text.decode(ids, skips_special=False))
