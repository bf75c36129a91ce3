"""Structured output at the door: from what a client asks for to a grammar that is known to compile.

What JSON Schema and regular expressions mean here is llguidance's affair: what it can't honour it refuses by name. JSON
has one way of white space, that of Python's ``json.dumps``: given the choice, a small model hardly ever ends it.
"""

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from functools import cached_property

import orjson
from llguidance import LLMatcher
from pydantic import JsonValue

from ..core.grammar import BadGrammar, GrammarCompiler, Vocabulary
from .openai_api import CompletionFields, JsonSchema
from .openai_errors import ApiError

COMPILE_SECONDS = 10.0
"""Who takes longer is refused; llguidance's own limits, and those of `core.grammar`, end nearly all within two."""
NUM_COMPILING = 2
MAX_REMEMBERED = 256

_JSON_OPTIONS: dict[str, JsonValue] = {
    "whitespace_flexible": False,
    "item_separator": ", ",
    "key_separator": ": ",
    "lenient": False,
    "coerce_one_of": False,
}


def json_schema_grammar(schema: JsonValue) -> str:
    """JSON that a schema validates. Whether it is a schema is seen when it is compiled.

    Raises `BadGrammar` for one that can't be written down.
    """
    if isinstance(schema, dict) or schema is True:
        # where llguidance looks for options: ours, whatever the client put there
        schema = {**(schema if isinstance(schema, dict) else {}), "x-guidance": _JSON_OPTIONS}
    try:
        return orjson.dumps({"grammars": [{"json_schema": schema}]}).decode()
    except orjson.JSONEncodeError as error:
        raise BadGrammar(f"it can't be encoded ({error})") from None


def json_object_grammar() -> str:
    """Any JSON object."""
    return json_schema_grammar({"type": "object"})


def regex_grammar(pattern: str) -> str:
    """All of the output matches; the syntax is that of https://docs.rs/regex, which has no look-around."""
    return LLMatcher.grammar_from_regex(pattern)


def choice_grammar(choices: Sequence[str]) -> str:
    """One of the texts, as it is."""
    return regex_grammar("|".join(map(_literally, choices)))


def _literally(text: str) -> str:
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def lark_grammar(grammar: str) -> str:
    """Lark, in the dialect of https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md."""
    return orjson.dumps({"grammars": [{"lark_grammar": grammar}]}).decode()


@dataclass(frozen=True, slots=True)
class WantedGrammar:
    """A grammar and the field that asks for it."""

    grammar: str
    field: str


def wanted_grammar(body: CompletionFields) -> WantedGrammar | None:
    """What the body says of the form of its output; raises `ApiError` where it says several things."""
    wanted = list(_all_wanted(body))
    if len(wanted) > 1:
        fields = ", ".join(f"'{one.field}'" for one in wanted)
        raise ApiError.invalid(wanted[1].field, f"Only one of these may say what the output looks like: {fields}.")
    return wanted[0] if wanted else None


def _all_wanted(body: CompletionFields) -> Iterator[WantedGrammar]:
    if (format := body.response_format) is not None:
        if format.json_schema is not None:
            yield wanted_json(format.json_schema.json_schema, "response_format")
        elif format.type == "json_object":
            yield WantedGrammar(json_object_grammar(), "response_format")
    yield from _all_spelled("guided_", body.guided_json, body.guided_regex, body.guided_choice, body.guided_grammar)
    if (wanted := body.structured_outputs) is not None:
        kinds = (wanted.json_schema, wanted.regex, wanted.choice, wanted.grammar)
        spelled = list(_all_spelled("structured_outputs.", *kinds))
        if wanted.json_object:
            spelled.append(WantedGrammar(json_object_grammar(), "structured_outputs.json_object"))
        if not spelled:
            raise ApiError.invalid("structured_outputs", "'structured_outputs' says nothing of the output.")
        yield from spelled


def _all_spelled(
    prefix: str, schema: JsonSchema | str | None, regex: str | None, choices: list[str] | None, lark: str | None
) -> Iterator[WantedGrammar]:
    if schema is not None:
        yield wanted_json(schema, prefix + "json")
    if regex is not None:
        yield WantedGrammar(regex_grammar(regex), prefix + "regex")
    if choices is not None:
        yield WantedGrammar(choice_grammar(choices), prefix + "choice")
    if lark is not None:
        yield WantedGrammar(lark_grammar(lark), prefix + "grammar")


def wanted_json(schema: JsonSchema | str, field: str) -> WantedGrammar:
    """JSON that a schema validates, for the field that has the schema; raises `ApiError`."""
    try:
        return WantedGrammar(json_schema_grammar(orjson.loads(schema) if isinstance(schema, str) else schema), field)
    except (BadGrammar, orjson.JSONDecodeError) as error:
        raise ApiError.invalid(field, f"Invalid '{field}': {error}.") from None


class GrammarDoor:
    """Lets in grammars that compile over the model's vocabulary. One for a router; from any thread.

    Outcomes are remembered, the good and the bad. A compilation runs in a thread of its own, at most `NUM_COMPILING` at
    a time, which nobody waits for longer than `COMPILE_SECONDS`; one that has not begun by then never does.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._outcomes: OrderedDict[bytes, Future[None]] = OrderedDict()
        self._lock = threading.Lock()
        self._may_compile = threading.BoundedSemaphore(NUM_COMPILING)

    def admit(self, grammar: str, field: str) -> str:
        """The grammar itself. Raises `ApiError`, which names ``field``, for one that does not compile in time."""
        outcome = self._outcome(grammar)
        try:
            outcome.result(COMPILE_SECONDS)
        except BadGrammar as error:
            raise ApiError.invalid(field, f"Invalid '{field}': {error}.") from None
        except (TimeoutError, CancelledError):
            if outcome.cancel():
                raise ApiError.overloaded("too many grammars wait to be compiled") from None
            raise ApiError.invalid(field, f"Invalid '{field}': it takes too long to compile.") from None
        return grammar

    def _outcome(self, grammar: str) -> "Future[None]":
        key = hashlib.blake2b(grammar.encode(), digest_size=32).digest()
        with self._lock:
            outcome = self._outcomes.get(key)
            if outcome is None or outcome.cancelled():
                outcome = self._outcomes[key] = Future()
                if len(self._outcomes) > MAX_REMEMBERED:
                    self._outcomes.popitem(last=False)
                threading.Thread(target=self._compile, args=(grammar, outcome), name="grammar", daemon=True).start()
            self._outcomes.move_to_end(key)
        return outcome

    def _compile(self, grammar: str, outcome: "Future[None]") -> None:
        with self._may_compile:
            if not outcome.set_running_or_notify_cancel():
                return
            try:
                self._compiler.compile(grammar)
            except BadGrammar as error:
                outcome.set_exception(error)
            else:
                outcome.set_result(None)
            finally:
                if not outcome.done():  # the fault is ours, or a panic of llguidance; its traceback is in the log
                    outcome.set_exception(RuntimeError("a grammar could not be compiled"))

    @cached_property
    def _compiler(self) -> GrammarCompiler:
        return GrammarCompiler(self._vocabulary)
