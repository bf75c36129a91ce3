"""What models may write where calls are demanded, or a form of the answer besides a thought and calls."""

import json
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from crossdock.core.grammar import GrammarCompiler
from crossdock.router.openai_errors import ApiError
from crossdock.router.parsing.deltas import whole_calls
from crossdock.router.parsing.families import thoughts_named
from crossdock.router.text import TextModel

from .chat_templates import DEEPSEEK, LLAMA, MISTRAL, MISTRAL_ARGS, PLAIN, QWEN, QWEN_THINKING
from .test_tools import choice, model

Json = dict[str, Any]

CITY: Json = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Json = {"name": "weather", "parameters": CITY}
NOW: Json = {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}}
ROME, NONE = '{"city": "Rome"}', "{}"


def tools(*functions: Json) -> Json:
    return {"tools": [{"type": "function", "function": function} for function in functions]}


BOTH = tools(WEATHER, NOW)
STRICT = tools({**WEATHER, "strict": True}, NOW)
REQUIRED: Json = {**BOTH, "tool_choice": "required"}
NAMED: Json = {**BOTH, "tool_choice": {"type": "function", "function": {"name": "now"}}}
ONE: Json = {"parallel_tool_calls": False}
FORM: Json = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": CITY}}}


def allows(text: TextModel, written: str, **fields: Any) -> bool:
    """Whether this may be a whole answer."""
    grammar = choice(text, **fields).params.grammar
    if not grammar:
        return True
    matcher = GrammarCompiler(text.vocabulary).compile(grammar)
    token_ids = text.encode_chat(written).ids
    return bool(matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting())


def hermes(*calls: tuple[str, str]) -> str:
    return "\n".join(f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>' for name, given in calls)


def llama(*calls: tuple[str, str]) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {given}}}' for name, given in calls)


def mistral(*calls: tuple[str, str]) -> str:
    written = ", ".join(f'{{"name": "{name}", "arguments": {given}}}' for name, given in calls)
    return f"[TOOL_CALLS] [{written}]"


def mistral_args(*calls: tuple[str, str]) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{given}" for name, given in calls)


FAMILIES = [(QWEN, hermes), (PLAIN, hermes), (LLAMA, llama), (MISTRAL, mistral), (MISTRAL_ARGS, mistral_args)]


@pytest.mark.parametrize(("template", "write"), FAMILIES)
def test_required_calls_are_calls_of_the_functions_offered_with_valid_arguments(template: str, write: Any) -> None:
    text = model(template)
    assert allows(text, write(("weather", ROME)), **REQUIRED)
    assert allows(text, write(("now", NONE), ("weather", ROME), ("now", NONE)), **REQUIRED)
    assert not allows(text, write(("now", NONE), ("weather", ROME)), **REQUIRED, **ONE)
    assert allows(text, write(("now", NONE)), **REQUIRED, **ONE)
    for wrong in ("", "hello", write(("now", ROME)), write(("weather", '{"city": "Bonn"}')), write(("then", NONE))):
        assert not allows(text, wrong, **REQUIRED)


@pytest.mark.parametrize(("template", "write"), FAMILIES)
def test_a_named_function_is_called_once(template: str, write: Any) -> None:
    text = model(template)
    assert allows(text, write(("now", NONE)), **NAMED)
    assert not allows(text, write(("weather", ROME)), **NAMED)
    assert not allows(text, write(("now", NONE), ("now", NONE)), **NAMED)


@pytest.mark.parametrize(("template", "write"), FAMILIES)
def test_a_strict_function_is_called_with_valid_arguments_if_it_is_called(template: str, write: Any) -> None:
    text = model(template)
    for free in ("", "Hello!", "Hello!\n\nbye", write(("weather", ROME)), write(("now", ROME))):
        assert allows(text, free, **STRICT)
    for wrong in (write(("weather", NONE)), write(("then", NONE))):
        assert allows(text, wrong, **BOTH)
        assert not allows(text, wrong, **STRICT)


@pytest.mark.parametrize(("template", "write"), FAMILIES)
def test_calls_come_one_at_a_time_where_they_may_not_be_parallel(template: str, write: Any) -> None:
    text = model(template)
    assert allows(text, "Hello", **BOTH, **ONE)
    assert allows(text, write(("now", NONE)), **BOTH, **ONE)
    assert not allows(text, write(("now", NONE), ("now", NONE)), **BOTH, **ONE)


@pytest.mark.parametrize(("template", "write"), [FAMILIES[0], FAMILIES[3], FAMILIES[4]])
def test_prose_may_stand_before_a_strict_call(template: str, write: Any) -> None:
    text = model(template)
    assert allows(text, "I look. " + write(("weather", ROME)), **STRICT)
    assert not allows(text, "I look. " + write(("weather", NONE)), **STRICT)


@pytest.mark.parametrize(("template", "write"), FAMILIES)
def test_an_answer_of_a_given_form_may_be_calls_instead(template: str, write: Any) -> None:
    text = model(template)
    call = ("<|python_tag|>" if template == LLAMA else "") + write(("now", NONE))
    for written in (ROME, call):
        assert allows(text, written, **BOTH, **FORM)
    assert not allows(text, "Rome", **BOTH, **FORM)
    assert allows(text, write(("now", NONE)), **REQUIRED, **FORM)
    assert not allows(text, ROME, **REQUIRED, **FORM)
    assert not allows(text, call, **FORM)


def babble(text: TextModel, grammar: str, random: Random) -> str:
    """An answer drawn at random from all that the grammar allows."""
    matcher = GrammarCompiler(text.vocabulary).compile(grammar)
    token_ids: list[int] = []
    while not matcher.is_stopped():
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [token_id for token_id in range(len(text.vocabulary.pieces)) if mask >> token_id & 1]
        token_ids.append(random.choice(allowed))
        assert matcher.consume_token(token_ids[-1])
    return text.decode([token_id for token_id in token_ids if token_id not in text.eos_ids], skips_special=False)


@pytest.mark.parametrize("thought", ["", "<think>\nHm.\n</think>\n\n"])
@pytest.mark.parametrize("template", [template for template, _ in FAMILIES])
def test_whatever_is_allowed_where_calls_are_required_is_read_as_valid_calls(template: str, thought: str) -> None:
    text = model(template)
    if thought:
        text = replace(text, syntax=replace(text.syntax, thoughts=thoughts_named("think")))
    asked = choice(text, **REQUIRED)
    for seed in range(5):
        written = babble(model(template), choice(model(template), **REQUIRED).params.grammar, Random(seed))
        parser = asked.syntax.parser()
        parsed = parser.feed(thought + written) + parser.flush()
        calls = whole_calls(parsed.calls)
        assert (parsed.reasoning, parsed.content, len(calls) > 0) == ("Hm." if thought else "", "", True)
        for call in calls:
            wanted = [{"city": "Rome"}, {"city": "Oslo"}] if call.name == "weather" else [{}]
            assert json.loads(call.arguments) in wanted


def test_a_thought_comes_before_the_form_and_before_calls() -> None:
    call = hermes(("now", NONE))
    for fields, written in ((REQUIRED, call), (FORM, ROME)):
        thinks, begun = model(QWEN_THINKING), model(DEEPSEEK)
        assert allows(thinks, written, **fields)
        assert allows(thinks, f"<think>\nHm. {{\n</think>\n\n{written}", **fields)
        assert not allows(thinks, f"Hm.</think>{written}", **fields)
        assert allows(begun, f"Hm.</think>{written}", **fields)
        assert not allows(begun, written, **fields)
        silent = {"chat_template_kwargs": {"enable_thinking": False}}
        assert allows(thinks, written, **fields, **silent)


@pytest.mark.parametrize(
    "form", [{"guided_regex": "[a-c]+"}, {"guided_choice": ["a", "cab"]}, {"guided_grammar": 'start: "cab"'}]
)
def test_every_kind_of_form_may_follow_a_thought_or_give_way_to_calls(form: Json) -> None:
    thinks = model(QWEN_THINKING)
    assert allows(thinks, "<think>Hm.</think>cab", **form)
    assert not allows(thinks, "<think>Hm.</think>dab", **form)
    assert allows(thinks, hermes(("now", NONE)), **form, **BOTH)
    with pytest.raises(ApiError, match="guided_regex"):
        choice(thinks, guided_regex="(", **REQUIRED)


def test_the_marks_of_a_thought_may_be_special_tokens() -> None:
    marked = replace(thoughts_named("think"), begin="[ARGS]", end="<|python_tag|>")
    text = model(QWEN)
    text = replace(text, syntax=replace(text.syntax, thoughts=marked))
    assert allows(text, f"[ARGS]Hm.<|python_tag|>\n{hermes(('now', NONE))}", **REQUIRED)
    assert not allows(text, f"[ARGS]Hm.{hermes(('now', NONE))}", **REQUIRED)


@pytest.mark.parametrize("choice_of_tools", [{"tool_choice": "required"}, {"strict": True}])
def test_a_schema_that_is_none_is_refused_where_it_stands(choice_of_tools: Json) -> None:
    bad = {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "nonsense"}}}}
    strict = {"strict": choice_of_tools.pop("strict", None)}
    with pytest.raises(ApiError) as caught:
        choice(**tools(NOW, {**bad, **strict}), **choice_of_tools)
    assert (caught.value.status, caught.value.param) == (400, "tools.1.function.parameters")
    assert choice(**tools(bad)).params.grammar == ""
