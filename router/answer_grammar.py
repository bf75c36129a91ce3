"""The grammar of a whole answer: a thought, calls that conform to their functions' schemas, the form of the rest.

It is Lark in llguidance's dialect; each schema is a grammar of its own that the Lark refers to.
"""

import re
from collections.abc import Iterator, Mapping

import orjson

from .grammar import WantedGrammar, wanted_grammar, wanted_json
from .openai_api import ChatCompletionRequest
from .text import TextModel
from .tools import ToolUse, tool_use

_TERMINALS = r"""
TEXT: /(.|\n)*/
PROSE: /[ \t\r\n]*([^{ \t\r\n](.|\n)*)?/
GAP: /[ \t\r\n]{0,8}/
"""
"""``PROSE`` is what nobody takes for a call that opens the answer without a marker."""


def answer_grammar(body: ChatCompletionRequest, text: TextModel, thought_begun: bool) -> WantedGrammar | None:
    """What the answer must conform to, ``None`` if it is free. Schemas and the like have passed the model's door.

    Raises `ApiError`, which names the field at fault.
    """
    wanted, use = wanted_grammar(body), tool_use(body)
    is_free = wanted is None and (use is None or not use.is_bound)
    if is_free or (use is None and text.syntax.thoughts is None):
        return wanted
    parts = _schemas(use, text) if use is not None else {}
    if wanted is not None:
        parts["form"] = text.grammars.admit(wanted.grammar, wanted.field)
    rules = _Rules(text)
    lark = "\n".join([*rules.start(thought_begun), *rules.answer(use, has_form=wanted is not None)]) + _TERMINALS
    return WantedGrammar(_joined(lark, parts), "tools" if wanted is None else wanted.field)


def _schemas(use: ToolUse, text: TextModel) -> dict[str, str]:
    """A grammar of the arguments of each function that may be called."""
    wanted = [
        wanted_json(
            function.arguments_schema if use.binds(function) else {"type": "object"},
            f"tools.{use.offered.index(function)}.function.parameters",
        )
        for function in use.callable
    ]
    return {f"arguments{n}": text.grammars.admit(one.grammar, one.field) for n, one in enumerate(wanted)}


def _joined(lark: str, parts: Mapping[str, str]) -> str:
    """One grammar that refers to the parts by their names."""
    named = [{**orjson.loads(grammar)["grammars"][0], "name": name} for name, grammar in parts.items()]
    return orjson.dumps({"grammars": [{"lark_grammar": lark}, *named]}).decode()


class _Rules:
    """The Lark rules for one model, some of whose markers are special tokens, which no text can spell."""

    def __init__(self, text: TextModel) -> None:
        self._calls, self._thoughts = text.syntax.calls, text.syntax.thoughts
        marks = [*self._calls.markers, *((self._thoughts.begin, self._thoughts.end) if self._thoughts else ())]
        ids = {mark: text.tokenizer.token_to_id(mark) for mark in marks}
        self._special = {mark: i for mark, i in ids.items() if i in text.token_bytes.special_ids}
        self._cut = re.compile(f"({'|'.join(map(re.escape, self._special))})") if self._special else None

    def start(self, thought_begun: bool) -> Iterator[str]:
        """A thought need not be begun, but once it is it must end."""
        if self._thoughts is None:
            yield "start: answer"
            return
        begin = self._written(self._thoughts.begin)
        yield "start: thought GAP answer" if thought_begun else f"start: ({begin} thought GAP)? answer"
        yield self._until("thought", self._thoughts.end)

    def answer(self, use: ToolUse | None, has_form: bool) -> Iterator[str]:
        if use is None:
            yield "answer: @form"
            return
        spelling = self._calls.spelling
        opening = spelling.opening + spelling.before_name
        marker = next(filter(opening.startswith, self._calls.markers), "")
        yield from self._call(use)
        yield f"calls: {self._written(opening)} rest"
        if use.must_call:
            yield "answer: calls"
        elif has_form:  # a mark, if only one that is left out elsewhere, tells calls from JSON that looks like one
            yield f"answer: {'' if marker else self._written(self._calls.markers[0])} calls | @form"
        elif not marker:
            yield "answer: calls | PROSE"
        else:
            yield self._until("until_call", marker)
            yield f"marked: until_call {self._written(opening.removeprefix(marker))} rest"
            yield "answer: marked* TEXT" if use.is_parallel else "answer: marked | TEXT"

    def _call(self, use: ToolUse) -> Iterator[str]:
        """``rest`` is all that follows the opening of calls: one call, further ones, and what closes them."""
        spelling = self._calls.spelling
        middle, after = self._written(spelling.before_arguments), self._written(spelling.after)
        written = [
            f"{self._written(function.name)} {middle} @arguments{number} {after}"
            for number, function in enumerate(use.callable)
        ]
        yield f"call: {' | '.join(written)}"
        more = f"({self._written(spelling.separator + spelling.before_name)} call)*" if use.is_parallel else ""
        yield f"rest: call {more} {self._written(spelling.closing)}"

    def _until(self, rule: str, mark: str) -> str:
        """A rule for text up to and with the first such mark."""
        return f"{rule}: TEXT {self._written(mark)}" if mark in self._special else f"{rule}[lazy]: TEXT {_quoted(mark)}"

    def _written(self, text: str) -> str:
        pieces = [text] if self._cut is None else self._cut.split(text)
        return " ".join(f"<[{self._special[p]}]>" if p in self._special else _quoted(p) for p in pieces if p)


def _quoted(text: str) -> str:
    return orjson.dumps(text).decode()
