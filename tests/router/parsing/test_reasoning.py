"""Reasoning told apart from the answer."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.router.parsing.deltas import ParsedText, PlainText, whole_calls
from crossdock.router.parsing.hermes import HermesCalls
from crossdock.router.parsing.reasoning import ThinkParser


def read(pieces: Sequence[str], is_open: bool) -> tuple[str, str]:
    parser = ThinkParser(PlainText(), is_open)
    outputs = [*(parser.feed(piece) for piece in pieces), parser.flush()]
    return "".join(output.reasoning for output in outputs), "".join(output.content for output in outputs)


@pytest.mark.parametrize(
    ("text", "is_open", "reasoning", "content"),
    [
        ("<think>\nHm. So.\n</think>\n\nParis.", False, "Hm. So.", "Paris."),
        ("Hm. So.\n</think>\n\nParis.", True, "Hm. So.", "Paris."),
        ("<think>\nHm.</think>Paris.", True, "Hm.", "Paris."),
        ("\n<think>Hm.</think>Paris.", False, "Hm.", "Paris."),
        ("<think>\n\n</think>\n\nParis.", False, "", "Paris."),
        ("Paris. <think>is content here</think>", False, "", "Paris. <think>is content here</think>"),
        ("  Paris.", False, "", "  Paris."),
        ("<thin", False, "", "<thin"),
        ("<think>Hm </thin", False, "Hm </thin", ""),
        ("Hm. \n", True, "Hm. \n", ""),
        ("a </think> b </think> c", True, "a", "b </think> c"),
        ("", True, "", ""),
    ],
)
def test_a_thought_is_reasoning_and_the_rest_content(text: str, is_open: bool, reasoning: str, content: str) -> None:
    assert read([text], is_open) == (reasoning, content)
    assert read(list(text), is_open) == (reasoning, content)


def test_calls_are_read_behind_the_thought_and_not_in_it() -> None:
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parser = ThinkParser(HermesCalls({"f"}, is_stream=True), is_open=True)
    parsed = parser.feed(f"maybe {call}\n</think>\n\n{call}") + parser.flush()
    assert (parsed.reasoning, parsed.content) == (f"maybe {call}", "")
    assert [(made.name, made.arguments) for made in whole_calls(parsed.calls)] == [("f", "{}")]


def test_no_half_mark_is_ever_shown() -> None:
    parser = ThinkParser(PlainText(), is_open=False)
    outputs = [parser.feed(letter) for letter in "<think>a</thi b</think>c"]
    shown = [output for output in outputs if output != ParsedText()]
    assert shown == [ParsedText("a"), ParsedText("</thi"), ParsedText(" b"), ParsedText(content="c")]


scraps = st.lists(st.sampled_from(["<think>", "</think>", "<thi", "</", "a", " ", "\n", "é"]), max_size=10)


@given(scraps.map("".join), st.booleans(), st.lists(st.integers(0, 40), max_size=6).map(sorted))
def test_no_cut_changes_what_is_read(text: str, is_open: bool, cuts: list[int]) -> None:
    pieces = [text[start:end] for start, end in pairwise([0, *cuts, len(text)])]
    assert read(pieces, is_open) == read([text], is_open) == read(list(text), is_open)
