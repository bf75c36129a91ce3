"""Calls told apart from content, for each family's spelling, however the text is cut."""

import json
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.router.parsing.call_parser import CallParser
from crossdock.router.parsing.deltas import CallStart, ParsedText, whole_calls
from crossdock.router.parsing.hermes import HermesCalls
from crossdock.router.parsing.llama3 import Llama3Calls
from crossdock.router.parsing.mistral import MistralCalls

NAMES = frozenset({"f", "weather"})
Calls = list[tuple[str, str]]

FAMILIES: list[type[CallParser]] = [HermesCalls, Llama3Calls, MistralCalls]


def fed(parser: CallParser, pieces: Sequence[str]) -> list[ParsedText]:
    return [*(parser.feed(piece) for piece in pieces), parser.flush()]


def told(outputs: Sequence[ParsedText]) -> tuple[str, Calls]:
    """Content and calls."""
    calls = [call for output in outputs for call in output.calls]
    return "".join(output.content for output in outputs), [(c.name, c.arguments) for c in whole_calls(calls)]


def read(family: type[CallParser], text: str, is_stream: bool = True) -> tuple[str, Calls]:
    return told(fed(family(NAMES, is_stream), [text]))


def both(family: type[CallParser], text: str) -> tuple[str, Calls]:
    """A body and a stream must agree."""
    streamed = read(family, text)
    assert streamed == read(family, text, is_stream=False)
    return streamed


TWO_CALLS = (
    '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\\""}}</tool_call>\n'
    '<tool_call>\n{"name": "weather", "arguments": {"city": ["Köln"]}}\n</tool_call>'
)
HERMES: list[tuple[str, str, Calls]] = [
    ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', "", [("f", '{"a": 1}')]),
    ('Let me see.\n<tool_call>{"name":"f","arguments":{}}</tool_call>', "Let me see.", [("f", "{}")]),
    (
        TWO_CALLS,
        "",
        [("f", '{"a": "}</tool_call>\\""}'), ("weather", '{"city": ["Köln"]}')],
    ),
    ('<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a":1}')]),
    ('<tool_call>{"name": "f"}</tool_call> done', " done", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a":1}')]),
    ('<tool_call>{"name": "f", "arguments": {}, "id": {"x": 1}}</tool_call>', "", [("f", "{}")]),
    ('<tool_call>{"name": "f", "arguments": {}</tool_call>', "", [("f", "{}")]),
    (
        '<tool_call>{"name": "f", "arguments": {}}<tool_call>{"name": "f", "arguments": {}}',
        "",
        [("f", "{}"), ("f", "{}")],
    ),
    ('<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
]
LLAMA3: list[tuple[str, str, Calls]] = [
    ('{"name": "f", "parameters": {"a": 1}}', "", [("f", '{"a": 1}')]),
    ('\n{"type": "function", "name": "f", "parameters": {}}', "", [("f", "{}")]),
    ('<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    ('See:<|python_tag|>{"name": "f", "parameters": {}}', "See:", [("f", "{}")]),
    ('{"name": "f", "parameters": {}}; {"name": "weather", "parameters": {}}', "", [("f", "{}"), ("weather", "{}")]),
    ('{"name": "f", "parameters": {}}\n{"name": "f", "parameters": {}}', "", [("f", "{}"), ("f", "{}")]),
    ('{"parameters": {"a": [1]}, "name": "f"}', "", [("f", '{"a":[1]}')]),
]
MISTRAL: list[tuple[str, str, Calls]] = [
    ('[TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]', "", [("f", '{"a": 1}')]),
    (
        'Hm.[TOOL_CALLS][{"name": "f", "arguments": {}, "id": "123456789"}, {"name": "weather", "arguments": {}}]',
        "Hm.",
        [("f", "{}"), ("weather", "{}")],
    ),
    ('[TOOL_CALLS]f[ARGS]{"a": "[TOOL_CALLS]"}', "", [("f", '{"a": "[TOOL_CALLS]"}')]),
    ("[TOOL_CALLS]f[CALL_ID]1a[ARGS]{}[TOOL_CALLS]weather{}", "", [("f", "{}"), ("weather", "{}")]),
    ('[TOOL_CALLS] {"name": "f", "arguments": {}}', "", [("f", "{}")]),
]
SPELLINGS = [
    *((HermesCalls, *case) for case in HERMES),
    *((Llama3Calls, *case) for case in LLAMA3),
    *((MistralCalls, *case) for case in MISTRAL),
]


@pytest.mark.parametrize(("family", "text", "content", "calls"), SPELLINGS)
def test_calls_are_read_in_all_spellings_of_a_family(
    family: type[CallParser], text: str, content: str, calls: Calls
) -> None:
    assert both(family, text) == (content, calls)


NO_CALLS = [
    *((family, text) for family in FAMILIES for text in ["", "Hello {you}!", " \n", '{"a": 1}', "[1] < 2 > 1 ["]),
    (HermesCalls, "The marker <tool_call> opens a call, </tool_call> ends it."),
    (HermesCalls, "a <tool_cal"),
    (HermesCalls, '<tool_call>\n{"name": "unknown", "arguments": {}}\n</tool_call>'),
    (HermesCalls, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
    (HermesCalls, '<tool_call>{"name": "f", arguments}</tool_call>'),
    (HermesCalls, '<tool_call>{"name": "f", "argu'),
    (HermesCalls, "<tool_call>"),
    (Llama3Calls, '{"name": "unknown", "parameters": {}} and more'),
    (Llama3Calls, 'So: {"name": "f", "parameters": {}}'),
    (Llama3Calls, "<|python_tag|>print(1)"),
    (Llama3Calls, "<|python"),
    (Llama3Calls, '{"name": "f"'),
    (MistralCalls, "[TOOL_CALLS] none"),
    (MistralCalls, "[TOOL_CALLS]f[ARG"),
    (MistralCalls, "[TOOL_CALLS]unknown[ARGS]{}"),
    (MistralCalls, "[TOOL_CALLS] [1, 2]"),
    (MistralCalls, '[TOOL_CALLS] [{"name": "unknown", "arguments": {}}]'),
]


@pytest.mark.parametrize(("family", "text"), NO_CALLS)
def test_what_is_no_call_is_content_to_the_last_character(family: type[CallParser], text: str) -> None:
    assert both(family, text) == (text, [])


INVALID = [
    (HermesCalls, '<tool_call>{"name": "f", "arguments": {"a": 1,}}</tool_call>'),
    (Llama3Calls, '{"name": "f", "parameters": {"a": True}}'),
    (MistralCalls, "[TOOL_CALLS]f[ARGS]{'a': 1}"),
]


@pytest.mark.parametrize(("family", "text"), INVALID)
def test_invalid_arguments_make_content_of_a_body_and_are_passed_on_in_a_stream(
    family: type[CallParser], text: str
) -> None:
    assert read(family, text, is_stream=False) == (text, [])
    content, [(name, arguments)] = read(family, text)
    assert (content, name, arguments in text) == ("", "f", True)


def test_a_failed_call_does_not_hide_the_next() -> None:
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    assert both(HermesCalls, f"<tool_call>oops{good}") == ("<tool_call>oops", [("f", "{}")])


# --- streams ------------------------------------------------------------------------------------


def test_a_call_begins_with_its_name_and_its_arguments_come_as_they_are_written() -> None:
    parser = HermesCalls(NAMES, is_stream=True)
    pieces = ['<tool_call>{"name": "f"', ', "arguments": {', '"a": ', '"x', '"}', "}</tool_call>"]
    outputs = fed(parser, pieces)
    start = outputs[1].calls[0]
    assert isinstance(start, CallStart)
    assert (start.index, start.name) == (0, "f")
    assert [whole_calls((start, *output.calls))[0].arguments for output in outputs[1:]] == [
        "{", '"a": ', '"x', '"}', "", ""
    ]  # fmt: skip


@pytest.mark.parametrize(("family", "text", "content", "calls"), SPELLINGS)
def test_no_half_marker_is_ever_shown(family: type[CallParser], text: str, content: str, calls: Calls) -> None:
    parser = family(NAMES, is_stream=True)
    shown = ""
    for letter in text:
        shown += parser.feed(letter).content
        assert content.startswith(shown)


@pytest.mark.parametrize("said", ['{"answer":', '{"name": "Ada"'])
def test_an_object_that_is_no_call_is_shown_as_soon_as_that_is_clear(said: str) -> None:
    assert Llama3Calls(NAMES, is_stream=True).feed(said).content == said


def test_ids_are_unique() -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 3
    deltas = [call for _ in range(3) for output in fed(HermesCalls(NAMES, True), [text]) for call in output.calls]
    ids = [delta.id for delta in deltas if isinstance(delta, CallStart)]
    assert len(set(ids)) == 9
    assert all(call_id.startswith("call_") for call_id in ids)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-99, 99) | st.text('a"\\{}[]<>é', max_size=6),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab]}", max_size=3), inner, max_size=2),
    max_leaves=5,
)
arguments = st.dictionaries(st.text("ab", max_size=2), json_values, max_size=3)


def hermes(name: str, given: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {given}}}\n</tool_call>'


def llama3(name: str, given: str) -> str:
    return f'<|python_tag|>{{"name": "{name}", "parameters": {given}}}'


def mistral(name: str, given: str) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{given}"


SPELL: list[tuple[type[CallParser], Callable[[str, str], str]]] = [
    (HermesCalls, hermes),
    (Llama3Calls, llama3),
    (MistralCalls, mistral),
]
spelled = st.tuples(st.sampled_from(sorted(NAMES)), arguments.map(json.dumps))


@given(st.sampled_from(SPELL), st.lists(spelled, min_size=1, max_size=3), st.data())
def test_calls_come_back_whole_from_any_cut(
    family: tuple[type[CallParser], Callable[[str, str], str]], calls: Calls, data: st.DataObject
) -> None:
    kind, spell = family
    text = "\n".join(spell(name, given) for name, given in calls)
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=12).map(sorted))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    for is_stream in (True, False):
        assert told(fed(kind(NAMES, is_stream), pieces)) == ("", calls)


scraps = st.lists(
    st.sampled_from(
        [
            *(
                "<tool_call>",
                "</tool_call>",
                "[TOOL_CALLS]",
                "[ARGS]",
                "[CALL_ID]",
                "<|python_tag|>",
                "<tool_",
                "[TOOL",
            ),
            *(
                '{"name": "f", ',
                '"arguments": {',
                '"parameters": {',
                "{",
                "}",
                "}}",
                "[",
                "]",
                ",",
                ";",
                '"',
                "\\",
                ":",
            ),
            *(" ", "\n", "f", "weather", "é", "1", '{"name": "f", "arguments": {"a": "'),
        ]
    ),
    max_size=14,
).map("".join)


@settings(max_examples=400)
@given(st.sampled_from(FAMILIES), st.booleans(), scraps, st.data())
def test_no_cut_changes_what_is_read(family: type[CallParser], is_stream: bool, text: str, data: st.DataObject) -> None:
    whole = read(family, text, is_stream)
    assert told(fed(family(NAMES, is_stream), list(text))) == whole
    cuts = data.draw(st.lists(st.integers(0, len(text)), max_size=6).map(sorted))
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    assert told(fed(family(NAMES, is_stream), pieces)) == whole
