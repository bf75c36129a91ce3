"""How deep a body nests, without parsing it."""

import json
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.router.access.body import nests_deeper


def nested(depth: int, opening: str = "[", closing: str = "]") -> bytes:
    return (opening * depth + closing * depth).encode()


@pytest.mark.parametrize(("opening", "closing"), [("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
def test_the_limit_itself_is_allowed_and_one_more_is_not(opening: str, closing: str) -> None:
    text = nested(50, opening, closing)
    depth = 100 if opening.startswith("[{") else 50
    assert not nests_deeper(text, depth)
    assert nests_deeper(text, depth - 1)


def test_brackets_within_strings_do_not_count() -> None:
    assert not nests_deeper(json.dumps({"a": "[" * 1000, '{"{[' * 50: '\\"[[[' * 50}).encode(), 10)
    assert nests_deeper(json.dumps({"a": "\\"}).encode() + nested(11), 10)


@pytest.mark.parametrize("piece_bytes", [1, 2, 3, 7])
def test_strings_that_cross_the_pieces_of_a_body_are_strings(monkeypatch: pytest.MonkeyPatch, piece_bytes: int) -> None:
    monkeypatch.setattr("crossdock.router.access.body.PIECE_BYTES", piece_bytes)
    assert not nests_deeper(json.dumps([{"[" * n: "{" * n} for n in range(9)]).encode(), 2)
    assert nests_deeper(json.dumps([{"[" * n: ["]" * n]} for n in range(9)]).encode(), 2)


def test_many_neighbours_are_not_deep() -> None:
    assert not nests_deeper(json.dumps([[{"a": [n]}] for n in range(5000)]).encode(), 4)
    assert nests_deeper(json.dumps([[{"a": [n]}] for n in range(5000)]).encode(), 3)


def test_what_a_parser_would_descend_into_is_deep_even_if_it_never_closes() -> None:
    assert nests_deeper(b"[" * 1000, 100)
    assert nests_deeper(b'{"a":' * 1000, 100)
    assert not nests_deeper(b"]" * 1000 + b"[" * 100, 100)


@pytest.mark.parametrize(
    "text", [b"[" * 4_000_000, b"[]" * 4_000_000, b'"\\' * 4_000_000, b'"[' * 4_000_000, b"[{]}" * 10**6]
)
def test_megabytes_of_nonsense_take_no_time(text: bytes) -> None:
    began = time.process_time()
    nests_deeper(b"[" * 200 + text, 100)
    assert time.process_time() - began < 1.5


values = st.recursive(
    st.none() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=25,
)


def depth_of(value: object) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


@given(values, st.booleans())
def test_it_is_the_depth_that_a_parser_finds(value: object, is_ascii: bool) -> None:
    text = json.dumps(value, ensure_ascii=is_ascii).encode()
    depth = depth_of(value)
    assert not nests_deeper(text, depth)
    assert depth == 0 or nests_deeper(text, depth - 1)
