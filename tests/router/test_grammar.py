"""Structured output at the door: what is let in, what is refused and in which words, and that nobody waits for it."""

import json
import threading
from collections.abc import Sequence
from typing import Any

import pytest

from crossdock.core.grammar import MAX_GRAMMAR_BYTES, BadGrammar, GrammarCompiler
from crossdock.router.grammar import (
    NUM_COMPILING,
    GrammarDoor,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    lark_grammar,
    regex_grammar,
    wanted_grammar,
)
from crossdock.router.openai_api import ChatCompletionRequest, CompletionFields, CompletionRequest
from crossdock.router.openai_errors import ApiError
from crossdock.router.text import TextModel

Json = dict[str, Any]
PERSON: Json = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def compiler(text: TextModel) -> GrammarCompiler:
    return GrammarCompiler(text.vocabulary)


def conforms(said: str, grammar: str, compiler: GrammarCompiler, text: TextModel) -> bool:
    """Whether the text is all that the grammar wants."""
    matcher, ids = compiler.compile(grammar).deep_copy(), text.encode(said).ids
    return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()


# --- what grammars mean --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("grammar", "conforming", "others"),
    [
        (json_object_grammar(), ["{}", '{"a": [1, null, {"b": "c"}]}'], ["[]", '{"a":1}', '{"a": 1} ', "1"]),
        (json_schema_grammar(True), ["1", '"x"', "[1, 2]"], ["", "x"]),
        (json_schema_grammar(PERSON), ['{"name": "é", "age": 3}'], ["{}", '{"age": 3, "name": "é"}']),
        (regex_grammar("a+/b"), ["aa/b"], ["a/bb", "/b"]),
        (regex_grammar("^a$"), ["a"], ["^a$"]),
        (choice_grammar(["a b", "(c|d)*\\", "é😀\n"]), ["a b", "(c|d)*\\", "é😀\n"], ["a", "c", "é"]),
        (choice_grammar(["yes", ""]), ["yes", ""], ["y"]),
        (lark_grammar('start: "<" /[a-z]+/ ">"'), ["<ab>"], ["<>", "<ab"]),
    ],
)
def test_a_grammar_takes_what_conforms_and_nothing_else(
    grammar: str, conforming: Sequence[str], others: Sequence[str], compiler: GrammarCompiler, text: TextModel
) -> None:
    assert [said for said in conforming if not conforms(said, grammar, compiler, text)] == []
    assert [said for said in others if conforms(said, grammar, compiler, text)] == []


def test_a_clients_own_options_do_not_make_llguidance_lenient(compiler: GrammarCompiler) -> None:
    schema: Json = {"x-guidance": {"lenient": True}, "not": {"type": "string"}}
    with pytest.raises(BadGrammar, match="not"):
        compiler.compile(json_schema_grammar(schema))


@pytest.mark.parametrize(
    "keyword",
    [
        "not",
        "if",
        "contains",
        "uniqueItems",
        "propertyNames",
        "dependentRequired",
        "unevaluatedProperties",
        "$dynamicRef",
    ],
)
def test_a_keyword_that_can_not_be_honoured_is_refused_by_name(keyword: str, compiler: GrammarCompiler) -> None:
    value: Any = {"not": {}, "uniqueItems": True, "dependentRequired": {"a": ["b"]}, "$dynamicRef": "#a"}.get(
        keyword, {}
    )
    with pytest.raises(BadGrammar, match=keyword.replace("$", r"\$")):
        compiler.compile(json_schema_grammar({keyword: value}))


# --- what a body may say -------------------------------------------------------------------------


def chat(**fields: object) -> CompletionFields:
    return ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "Hi"}], **fields})


def schema_format(schema: object) -> Json:
    return {"type": "json_schema", "json_schema": {"name": "it", "schema": schema, "strict": True}}


SPELLINGS: list[tuple[Json, str, str]] = [
    ({"response_format": {"type": "json_object"}}, json_object_grammar(), "response_format"),
    ({"response_format": schema_format(PERSON)}, json_schema_grammar(PERSON), "response_format"),
    ({"guided_json": PERSON}, json_schema_grammar(PERSON), "guided_json"),
    ({"guided_json": json.dumps(PERSON)}, json_schema_grammar(PERSON), "guided_json"),
    ({"guided_regex": "a+"}, regex_grammar("a+"), "guided_regex"),
    ({"guided_choice": ["a", "b"]}, choice_grammar(["a", "b"]), "guided_choice"),
    ({"guided_grammar": 'start: "a"'}, lark_grammar('start: "a"'), "guided_grammar"),
    ({"structured_outputs": {"json": PERSON}}, json_schema_grammar(PERSON), "structured_outputs.json"),
    ({"structured_outputs": {"json": "true"}}, json_schema_grammar(True), "structured_outputs.json"),
    ({"structured_outputs": {"regex": "a+"}}, regex_grammar("a+"), "structured_outputs.regex"),
    ({"structured_outputs": {"choice": ["a"]}}, choice_grammar(["a"]), "structured_outputs.choice"),
    ({"structured_outputs": {"grammar": 'start: "a"'}}, lark_grammar('start: "a"'), "structured_outputs.grammar"),
    ({"structured_outputs": {"json_object": True}}, json_object_grammar(), "structured_outputs.json_object"),
]


@pytest.mark.parametrize(("fields", "grammar", "field"), SPELLINGS)
def test_every_spelling_leads_to_its_grammar_on_both_endpoints(fields: Json, grammar: str, field: str) -> None:
    for body in (chat(**fields), CompletionRequest.model_validate({"prompt": "Hi", **fields})):
        wanted = wanted_grammar(body)
        assert wanted is not None and (wanted.grammar, wanted.field) == (grammar, field)
        assert body.has_grammar


@pytest.mark.parametrize("fields", [{}, {"response_format": None}, {"response_format": {"type": "text"}}])
def test_text_is_free(fields: Json) -> None:
    assert wanted_grammar(chat(**fields)) is None


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"response_format": {"type": "json_object"}, "guided_json": {}}, "guided_json"),
        ({"structured_outputs": {"regex": "a", "json_object": True}}, "structured_outputs.json_object"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"json_object": False}}, "structured_outputs"),
        ({"guided_json": "{"}, "guided_json"),
        ({"guided_json": '{"items":' * 300 + "{}" + "}" * 300}, "guided_json"),
    ],
)
def test_a_body_that_says_two_things_or_none_is_refused(fields: Json, field: str) -> None:
    with pytest.raises(ApiError) as refused:
        wanted_grammar(chat(**fields))
    assert (refused.value.status, refused.value.param) == (400, field)


# --- what is refused -----------------------------------------------------------------------------

BAD: list[tuple[str, str]] = [
    (json_schema_grammar({"type": "nonsense"}), "Invalid type: nonsense"),
    (json_schema_grammar({"type": "string", "pattern": "("}), "unclosed group"),
    (json_schema_grammar({"pattern": "("}), "unclosed group"),
    (json_schema_grammar(False), "schema is false"),
    (json_schema_grammar({"type": "string", "format": "nonsense"}), "Unknown format: nonsense"),
    (json_schema_grammar({"$ref": "https://example.com/schema"}), "does not fetch"),
    (json_schema_grammar({"$ref": "#"}), "no text conforms"),
    (json_schema_grammar({"type": "integer", "multipleOf": 1_000_003}), "common multiple 1000003"),
    (json_schema_grammar({"allOf": [{"multipleOf": 7.01}, {"multipleOf": 11.9}, {"multipleOf": 13}]}), "multiple"),
    (json_schema_grammar({"enum": ["v" * 100] * 2000}), f"the most is {MAX_GRAMMAR_BYTES}"),
    (regex_grammar("("), "unclosed group"),
    (regex_grammar("(?=a)"), "look-around"),
    (regex_grammar("(" * 2000 + "a" + ")" * 2000), "invalid regex"),
    (lark_grammar("start: foo"), "unknown name"),
    (lark_grammar('start: %json {"type": "nonsense"}'), "Invalid type"),
    (lark_grammar('start: %json {"multiple\\u004ff": 1000003}'), "common multiple"),
    (lark_grammar('start: %json {"multipleOf": 1e9999999}'), "common multiple"),
    (lark_grammar("start: /a/" + "".join(f'\n// "multipleOf": {n}{"0" * 20}' for n in range(1000, 1300))), "common"),
    (lark_grammar('start: x "."\nx[capture, temperature=0.5]: /.*/'), "'temperature' is not supported"),
    (regex_grammar("a?" * 9000), "has 18009 characters, the most is 16384"),
    (
        json_schema_grammar({"patternProperties": {"a" * 5000: {"pattern": "b" * 5000}}}),
        "patterns have 10000 characters",
    ),
    ("{}", "grammars"),
]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_fault_in_a_compilation_is_told_at_once(text: TextModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(compiler: GrammarCompiler, grammar: str) -> None:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(GrammarCompiler, "compile", fail)
    with pytest.raises(RuntimeError, match="could not be compiled"):
        text.grammars.admit(regex_grammar("no one else asks for this"), "guided_regex")
    for thread in threading.enumerate():
        if thread.name == "grammar":
            thread.join()


def test_whoever_waits_too_long_for_the_compilations_of_others_is_told_to_come_again(
    text: TextModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossdock.router.grammar.COMPILE_SECONDS", 0.3)
    begun, released = threading.Semaphore(0), threading.Event()

    def wait(compiler: GrammarCompiler, grammar: str) -> None:
        begun.release()
        released.wait()

    monkeypatch.setattr(GrammarCompiler, "compile", wait)
    door = GrammarDoor(text.vocabulary)
    for n in range(NUM_COMPILING):
        with pytest.raises(ApiError, match="too long to compile"):
            door.admit(f"slow {n}", "guided_regex")
        begun.acquire()
    for _ in range(2):
        with pytest.raises(ApiError, match="too many grammars wait") as refused:
            door.admit("good", "guided_regex")
        assert refused.value.status == 503
    released.set()
    monkeypatch.setattr("crossdock.router.grammar.COMPILE_SECONDS", 10.0)
    assert door.admit("good", "guided_regex") == "good"


@pytest.mark.parametrize(("grammar", "reason"), BAD)
def test_what_does_not_compile_is_a_400_that_says_why(grammar: str, reason: str, text: TextModel) -> None:
    with pytest.raises(ApiError, match=reason) as refused:
        text.grammars.admit(grammar, "guided_json")
    assert (refused.value.status, refused.value.param) == (400, "guided_json")
    assert len(refused.value.message) < 700


@pytest.mark.parametrize("link", ["allOf", "anyOf", "properties"])
def test_a_long_chain_of_references_is_followed_without_a_crash(link: str, text: TextModel) -> None:
    """llguidance follows it by recursion, which the stack of an ordinary thread does not hold."""

    def to(reference: str) -> Json:
        if link == "properties":
            return {"type": "object", "properties": {"a": {"$ref": reference}}, "required": ["a"]}
        return {link: [{"$ref": reference}]}

    length = 1400
    definitions: Json = {f"d{n}": to(f"#/$defs/d{n + 1}") for n in range(length)}
    definitions[f"d{length}"] = {"type": "null"}
    text.grammars.admit(json_schema_grammar({"$defs": definitions, "$ref": "#/$defs/d0"}), "guided_json")


def test_many_long_choices_are_let_in(text: TextModel) -> None:
    text.grammars.admit(choice_grammar([f"the choice of number {n}" for n in range(1000)]), "guided_choice")
