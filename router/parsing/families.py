"""The spellings of calls and reasoning, by family; others are added with `register_calls` and `register_thoughts`."""

from collections.abc import Callable, Container
from dataclasses import dataclass
from typing import TypeVar

from . import hermes, llama3, mistral, reasoning
from .deltas import TextParser


@dataclass(frozen=True, slots=True)
class CallSpelling:
    """How a family writes calls, piece by piece; with it a grammar makes a model write nothing else.

    One call is ``before_name``, the name, ``before_arguments``, a JSON object, ``after``.
    """

    before_name: str
    before_arguments: str
    after: str
    opening: str = ""
    """Before the first call."""
    separator: str = ""
    closing: str = ""
    """After the last call."""


@dataclass(frozen=True, slots=True)
class CallSyntax:
    """One family of models that call tools. ``name`` is what ``--tool-parser`` takes.

    ``parser`` makes a reader of one answer from the names of the functions that may be called, and whether the answer
    is streamed. ``markers`` are the texts it looks for that may be special tokens. A chat template that holds
    one of ``hints`` has been written for this family.
    """

    name: str
    parser: Callable[[Container[str], bool], TextParser]
    markers: tuple[str, ...]
    hints: tuple[str, ...]
    spelling: CallSpelling


@dataclass(frozen=True, slots=True)
class ThoughtSyntax:
    """One family of models that think. ``name`` is what ``--reasoning-parser`` takes.

    ``parser`` makes a reader of one answer from that of what follows the thought, and whether the prompt has begun the
    thought. A thought stands between ``begin`` and ``end``; a model whose chat template or vocabulary has ``begin``
    thinks in this way.
    """

    name: str
    parser: Callable[[TextParser, bool], TextParser]
    begin: str
    end: str

    def is_open(self, prompt: str, is_continued: bool = False) -> bool:
        """Whether the prompt ends inside a thought.

        What is not the model's own words so far, ``is_continued``, must end in the mark to begin one.
        """
        _, mark, after = prompt.rpartition(self.begin)
        return bool(mark) and self.end not in after and (is_continued or not after.strip())


class UnknownFamily(ValueError):
    """There is no parser of this name; the text says which there are."""


_calls: dict[str, CallSyntax] = {}
_thoughts: dict[str, ThoughtSyntax] = {}


def register_calls(syntax: CallSyntax) -> None:
    """From now on it can be chosen by its name, and by its hints if no earlier one fits."""
    _calls[syntax.name] = syntax


def register_thoughts(syntax: ThoughtSyntax) -> None:
    """Likewise."""
    _thoughts[syntax.name] = syntax


def calls_named(name: str) -> CallSyntax:
    """Raises `UnknownFamily`."""
    return _named(name, _calls)


def thoughts_named(name: str) -> ThoughtSyntax:
    """Raises `UnknownFamily`."""
    return _named(name, _thoughts)


def calls_of(template: str) -> CallSyntax | None:
    """Of the models that a chat template was written for; ``None`` where it is no family known here."""
    return next((syntax for syntax in _calls.values() if any(hint in template for hint in syntax.hints)), None)


def thoughts_of(template: str, tokens: Container[str]) -> ThoughtSyntax | None:
    """Likewise, of the models that have these tokens."""
    return next((s for s in _thoughts.values() if s.begin in template or s.begin in tokens), None)


Syntax = TypeVar("Syntax")


def _named(name: str, known: dict[str, Syntax]) -> Syntax:
    if name not in known:
        raise UnknownFamily(f"there is no parser {name!r}; there are {', '.join(known)}")
    return known[name]


HERMES = CallSyntax(
    "hermes",
    hermes.HermesCalls,
    markers=(hermes.BEGIN, hermes.END),
    hints=(hermes.BEGIN,),
    spelling=CallSpelling(
        before_name=hermes.BEGIN + '\n{"name": "',
        before_arguments='", "arguments": ',
        after="}\n" + hermes.END,
        separator="\n",
    ),
)

register_calls(
    CallSyntax(
        "mistral_args",
        mistral.MistralCalls,
        markers=(mistral.BEGIN, mistral.ARGS, mistral.CALL_ID),
        hints=(mistral.ARGS,),
        spelling=CallSpelling(before_name=mistral.BEGIN, before_arguments=mistral.ARGS, after=""),
    )
)
register_calls(
    CallSyntax(
        "mistral",
        mistral.MistralCalls,
        markers=(mistral.BEGIN, mistral.ARGS, mistral.CALL_ID),
        hints=(mistral.BEGIN,),
        spelling=CallSpelling(
            opening=mistral.BEGIN + " [",
            before_name='{"name": "',
            before_arguments='", "arguments": ',
            after="}",
            separator=", ",
            closing="]",
        ),
    )
)
register_calls(HERMES)
register_calls(
    CallSyntax(
        "llama3_json",
        llama3.Llama3Calls,
        markers=(llama3.PYTHON_TAG,),
        hints=(llama3.PYTHON_TAG, '"parameters": dictionary of argument name'),
        spelling=CallSpelling(
            before_name='{"name": "', before_arguments='", "parameters": ', after="}", separator="; "
        ),
    )
)
register_thoughts(ThoughtSyntax("think", reasoning.ThinkParser, reasoning.BEGIN, reasoning.END))
