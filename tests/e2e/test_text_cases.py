"""Text on its way to clients: characters and stop strings cut by token borders, and where an answer ends."""

from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from crossdock.router.text import load_text

from .answers import Answer, Json, ask, ask_all
from .models import reciting_model
from .server import Server, serving

MODES = {"mixed": ("--mixed", "1"), "1P1D": ()}
TEXTS = {
    "A": "삼겹살 👩‍👩‍👧 naïve “q” 🙂🙃 end",
    "B": "  a    b\n\n  x \t hello  world ",
    "C": "one STO two STOP three",
}
"""What the model recites after each of these keys, and then ``<|end|>``."""


def cut(text: str, known: set[bytes], seed: int) -> list[bytes]:
    """Pieces of a text, also of its characters, cut at random so that none is in ``known``, where they are put."""
    random = Random(seed)
    data, pieces = text.encode(), list[bytes]()
    while data:
        lengths = [n for n in range(1, 9) if data[:n] not in known and (n > 1 or data[0] > 127)]
        pieces.append(data[: random.choice(lengths[:4])])
        known.add(pieces[-1])
        data = data[len(pieces[-1]) :]
    return pieces


@pytest.fixture(scope="module")
def pieces() -> dict[str, list[bytes]]:
    known = {key.encode() for key in TEXTS}
    return {key: cut(text, known, seed=3) for key, text in TEXTS.items()}


@pytest.fixture(scope="module")
def model(pieces: dict[str, list[bytes]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reciting_model(tmp_path_factory.mktemp("recital"), pieces)


@pytest.fixture(scope="module")
def ids(model: Path, pieces: dict[str, list[bytes]]) -> dict[str, list[int]]:
    """Of the pieces."""
    known = load_text(model).token_bytes.pieces
    return {key: [known.index(piece) for piece in said] for key, said in pieces.items()}


@pytest.fixture(scope="module", params=MODES)
def server(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("logs") / "log", *MODES[request.param]) as server:
        yield server


def recite(server: Server, key: str, **more: object) -> Answer:
    return ask(server, **{"prompt": key, "temperature": 0, "max_tokens": 64, **more})


# --- characters (B1, B3) and ends (H1) -------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("key", TEXTS)
def test_a_text_arrives_whole_and_ends_unseen(
    server: Server, pieces: dict[str, list[bytes]], key: str, stream: bool
) -> None:
    for more in ({}, {"logprobs": 1}, {"temperature": 1.0}, {"prompt": "é🙂 " + key}):
        answer = recite(server, key, stream=stream, **more)
        assert (answer.text, answer.only.finish_reason) == (TEXTS[key], "stop")
        assert answer.num_output == len(pieces[key]) + 1
        assert all("\ufffd" not in delta for delta in answer.only.deltas)
    assert not stream or len(answer.only.deltas) > 5
    echoed = recite(server, key, stream=stream, echo=True, prompt="é🙂 " + key)
    assert echoed.text == f"é🙂 {key}{TEXTS[key]}"


@pytest.mark.parametrize("key", TEXTS)
def test_a_prompt_may_end_within_a_character(
    server: Server, pieces: dict[str, list[bytes]], ids: dict[str, list[int]], key: str
) -> None:
    for border in range(1, len(pieces[key])):
        num_whole = len(b"".join(pieces[key][:border]).decode(errors="ignore"))
        answer = recite(server, key, stream=True, prompt=[ord(key), *ids[key][:border]])
        assert answer.text == TEXTS[key][num_whole:]


def test_a_limit_may_come_within_a_character(server: Server, pieces: dict[str, list[bytes]]) -> None:
    for limit in range(1, len(pieces["A"])):
        right = b"".join(pieces["A"][:limit]).decode(errors="replace")
        for stream in (False, True):
            answer = recite(server, "A", stream=stream, max_tokens=limit)
            assert (answer.text, answer.only.finish_reason) == (right, "length")


# --- stop strings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("key", TEXTS)
def test_nothing_of_a_stop_string_is_shown_wherever_it_stands(server: Server, key: str, stream: bool) -> None:
    text = TEXTS[key]
    stops = {text[start : start + length] for start in range(len(text)) for length in (1, 2, 3, 6)}
    bodies: list[Json] = [
        {"prompt": key, "temperature": 0, "max_tokens": 64, "stop": stop, "stream": stream} for stop in sorted(stops)
    ]
    for stop, answer in zip(sorted(stops), ask_all(server, bodies), strict=True):
        assert (answer.text, answer.only.finish_reason) == (text[: text.index(stop)], "stop")


@pytest.mark.parametrize("stream", [False, True])
def test_of_several_stop_strings_the_one_complete_first_ends_the_text(server: Server, stream: bool) -> None:
    for stop, said in (
        (["STOP three", "two"], "one STO "),
        (["two STOP", "STO tw"], "one "),
        (["STOP", "TOP t", "P"], "one STO two "),
        (["TOP t", "OP"], "one STO two ST"),
        (["three!", "four"], TEXTS["C"]),
        (["ONE", "STOp"], TEXTS["C"]),
    ):
        assert recite(server, "C", stop=stop, stream=stream).text == said
    assert recite(server, "C", stop=["C"], echo=True, stream=stream).text == "C" + TEXTS["C"]


def test_tokens_are_counted_to_the_one_that_completes_the_stop_string(
    server: Server, pieces: dict[str, list[bytes]]
) -> None:
    for stop in ("one", "two", "STOP", "three"):
        end = TEXTS["C"].index(stop) + len(stop)
        num_tokens = next(n for n in range(99) if len(b"".join(pieces["C"][:n])) >= end)
        for stream in (False, True):
            answer = recite(server, "C", stop=stop, logprobs=0, stream=stream)
            assert (answer.num_output, len(answer.only.tokens)) == (num_tokens, num_tokens)


# --- the first of limit and stop (F1) --------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_ends_at_the_first_of_stop_and_limit(
    server: Server, pieces: dict[str, list[bytes]], ids: dict[str, list[int]], stream: bool
) -> None:
    said, own_ids = pieces["B"], ids["B"]
    for limit in (3, 5, 64):
        for place in range(1, len(said)):
            text = b"".join(said[: min(place, limit)]).decode()
            by_id = recite(server, "B", stop_token_ids=[own_ids[place]], max_tokens=limit, stream=stream)
            is_stopped = place < limit
            assert (by_id.text, by_id.num_output) == (text, place + 1 if is_stopped else limit)
            assert by_id.only.finish_reason == ("stop" if is_stopped else "length")
    whole = recite(server, "B", max_tokens=len(said), stream=stream)
    assert (whole.text, whole.only.finish_reason) == (TEXTS["B"], "length")
    ended = recite(server, "B", max_tokens=len(said) + 1, stream=stream)
    assert (ended.text, ended.only.finish_reason) == (TEXTS["B"], "stop")


def test_an_ignored_end_is_gone_past(server: Server, pieces: dict[str, list[bytes]]) -> None:
    answer = recite(server, "C", ignore_eos=True, max_tokens=20, logprobs=0)
    assert (answer.text, answer.only.finish_reason, answer.num_output) == (TEXTS["C"], "length", 20)
    assert answer.only.tokens[len(pieces["C"]) :] == ["<|end|>"] * (20 - len(pieces["C"]))
