"""The tools of a request: which the model may call, how it is told of them, and how its answer is read."""

from collections.abc import Sequence
from dataclasses import dataclass

from .chat_template import ToolOffer
from .openai_api import AllowedToolsChoice, ChatCompletionRequest, Function, NamedTool, chosen_names
from .output import PLAIN, OutputSyntax, PreparedPrompt
from .parsing.deltas import PlainText, TextParser
from .parsing.families import ThoughtSyntax
from .text import TextModel


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``offered`` are told to the model, ``callable`` those of them that it may call."""

    offered: tuple[Function, ...]
    callable: tuple[Function, ...]
    must_call: bool
    is_named: bool
    is_parallel: bool

    @property
    def is_bound(self) -> bool:
        """Whether the client demands something of the calls that only a grammar makes sure of."""
        return self.must_call or not self.is_parallel or any(function.strict for function in self.callable)

    def binds(self, function: Function) -> bool:
        """Whether the arguments of a call must conform to the function's schema."""
        return self.must_call or bool(function.strict)


def tool_use(body: ChatCompletionRequest) -> ToolUse | None:
    """``None`` where the model is told of no tools: there are none, or the choice is ``none``."""
    choice = body.tool_choice
    offered = tuple(tool.function for tool in body.tools or ())
    if not offered or choice == "none":
        return None
    names = chosen_names(choice)
    callable_ = tuple(function for function in offered if not names or function.name in names)
    is_named = isinstance(choice, NamedTool)
    mode = choice.allowed_tools.mode if isinstance(choice, AllowedToolsChoice) else choice
    is_parallel = body.parallel_tool_calls is not False and not is_named
    return ToolUse(offered, callable_, is_named or mode == "required", is_named, is_parallel)


def tool_offers(functions: Sequence[Function]) -> list[ToolOffer]:
    """As templates show them: what is said only to the server, ``strict``, is left out."""
    return [{"type": "function", "function": _offer(function)} for function in functions]


def _offer(function: Function) -> dict[str, object]:
    description = {} if function.description is None else {"description": function.description}
    return {"name": function.name, **description, "parameters": function.arguments_schema}


def thought_begun(body: ChatCompletionRequest, text: TextModel, prompt: PreparedPrompt) -> bool:
    """Whether the answer goes on with a thought that the prompt has begun."""
    thoughts = text.syntax.thoughts
    if thoughts is None:
        return False
    last = body.messages[-1].content
    if body.continue_final_message and isinstance(last, str):
        return thoughts.is_open(last, is_continued=True)
    return thoughts.is_open(prompt.text)


def answer_syntax(body: ChatCompletionRequest, text: TextModel, prompt: PreparedPrompt) -> OutputSyntax:
    """How the answers to this request are read."""
    use, thoughts, calls = tool_use(body), text.syntax.thoughts, text.syntax.calls
    if use is None and thoughts is None:
        return PLAIN
    names = frozenset(function.name for function in use.callable) if use is not None else frozenset()
    is_open = thought_begun(body, text, prompt)

    def parser() -> TextParser:
        answer = PlainText() if use is None else calls.parser(names, bool(body.stream))
        return answer if thoughts is None else thoughts.parser(answer, is_open)

    marks = (*(calls.markers if use is not None else ()), *_marks(thoughts))
    return OutputSyntax(parser, text.ids_of(marks), ends_in_calls=use is None or not use.is_named)


def _marks(thoughts: ThoughtSyntax | None) -> tuple[str, ...]:
    return () if thoughts is None else (thoughts.begin, thoughts.end)
