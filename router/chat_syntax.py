"""How one model is told of tools, and how its answers are read: settled once, when the model is loaded."""

from collections.abc import Container
from dataclasses import dataclass

from ..core.config import ChatConfig
from .chat_template import ChatTemplate
from .parsing.families import (
    HERMES,
    CallSyntax,
    ThoughtSyntax,
    calls_named,
    calls_of,
    thoughts_named,
    thoughts_of,
)


@dataclass(frozen=True, slots=True)
class ChatSyntax:
    """``thoughts`` is ``None`` for models that do not think.

    ``template_offers`` says that the chat template itself tells the model of tools, shows calls and their results.
    Else conversation.py does so in the spelling of ``calls``, whatever the model was trained on.
    """

    calls: CallSyntax = HERMES
    thoughts: ThoughtSyntax | None = None
    template_offers: bool = False


def chat_syntax(config: ChatConfig, template: ChatTemplate | None, tokens: Container[str]) -> ChatSyntax:
    """A template that offers tools to be called in a way which no parser here can read is not asked to.

    Raises `UnknownFamily`.
    """
    source = template.source if template is not None else ""
    has_tools = template is not None and "tools" in template.variables
    if config.tool_parser != "auto":
        calls: CallSyntax | None = calls_named(config.tool_parser)
    else:
        calls = calls_of(source) if has_tools else None
    return ChatSyntax(calls or HERMES, _thoughts(config, source, tokens), has_tools and calls is not None)


def _thoughts(config: ChatConfig, template: str, tokens: Container[str]) -> ThoughtSyntax | None:
    match config.reasoning_parser:
        case "none":
            return None
        case "auto":
            return thoughts_of(template, tokens)
        case name:
            return thoughts_named(name)
