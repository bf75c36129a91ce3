"""Structured output with real processes: it conforms in every mode and through preemption, and hurts nobody."""

import json
import re
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator, FormatChecker

from .answers import Answer, Json, ask, ask_all, refusal
from .models import chat_model
from .schemas import RandomSchema, random_schema
from .server import Server, serving

MODES = {"mixed": ("--mixed", "1"), "1P1D": ()}
CRAMPED = ("--num-blocks", "12", "--max-model-len", "160")
HELLO: Json = {"messages": [{"role": "user", "content": "say hello"}], "max_tokens": 80, "temperature": 1.0}
SCHEMA: Json = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "size": {"type": "integer", "minimum": 0, "maximum": 999},
        "kinds": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "size", "kinds"],
    "additionalProperties": False,
}
SPELLINGS: list[Json] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA, "strict": True}}},
    {"structured_outputs": {"json": SCHEMA}},
    {"guided_regex": "[a-z]{40}-[0-9]{30}"},
    {"guided_choice": ["yes", "no", "may be, or may be not; who would know, if not the one who asked all that"]},
    {"guided_grammar": 'start: "<" WORD ("," WORD)~7 ">"\nWORD: /[a-z]{5}/'},
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module", params=MODES)
def cramped(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Twelve blocks of sixteen tokens."""
    log = tmp_path_factory.mktemp("logs") / "log"
    with serving(model, log, *CRAMPED, *MODES[request.param]) as server:
        yield server


def wishes() -> list[Json]:
    """Every spelling three times, and as many free neighbours."""
    free: list[Json] = [{**HELLO, "seed": seed, "ignore_eos": True} for seed in range(15)]
    bound = [{**HELLO, **spelling, "seed": seed} for seed in range(3) for spelling in SPELLINGS]
    return [wish for pair in zip(free, bound, strict=True) for wish in pair]


@pytest.fixture(scope="module")
def alone(model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """What is right: each of the wishes by itself, with all the room there is."""
    with serving(model, tmp_path_factory.mktemp("logs") / "log", "--mixed", "1", "--no-prefix-cache") as server:
        return [ask(server, **wish) for wish in wishes()]


def ends(answers: list[Answer]) -> list[tuple[str, str | None]]:
    return [(answer.text, answer.only.finish_reason) for answer in answers]


def test_constrained_and_free_requests_get_what_they_get_alone_also_through_preemption(
    cramped: Server, alone: list[Answer]
) -> None:
    before = cramped.settled()
    assert ends(ask_all(cramped, wishes())) == ends(alone)
    assert cramped.settled().changes_since(before)("preemptions_total") > 0


def test_what_is_said_conforms(alone: list[Answer]) -> None:
    for answer in [answer for wish, answer in zip(wishes(), alone, strict=True) if wish["seed"] < 3][:6]:
        assert answer.only.finish_reason in {"stop", "length"}
    bound = alone[1::2]
    assert [answer.only.finish_reason for answer in bound] == ["stop"] * 15
    for answer in [*bound[0::5], *bound[1::5]]:
        Draft202012Validator(SCHEMA).validate(json.loads(answer.text))
    assert {answer.text for answer in bound[3::5]} <= set(SPELLINGS[3]["guided_choice"])


def test_a_grammar_that_is_complete_ends_the_request_whatever_eos_and_min_tokens_say(cramped: Server) -> None:
    answer = ask(cramped, **{**HELLO, "guided_regex": "ab", "ignore_eos": True, "min_tokens": 20})
    assert (answer.text, answer.only.finish_reason) == ("ab", "stop")


def test_all_choices_of_a_prompt_conform(cramped: Server) -> None:
    answer = ask(cramped, **{**HELLO, "n": 3, "seed": 1, "guided_regex": "[a-z]{20}AB"})
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 3
    assert [re.fullmatch("[a-z]{20}AB", choice.text) is None for choice in answer.choices] == [False] * 3
    assert len({choice.text for choice in answer.choices}) == 3


def test_a_stream_is_cut_at_max_tokens_in_the_midst_of_its_grammar(cramped: Server) -> None:
    wish = {**HELLO, "guided_regex": "[a-z]{200}", "max_tokens": 7, "stream": True}
    answer = ask(cramped, **wish)
    assert (answer.num_output, answer.only.finish_reason) == (7, "length")


BAD: list[tuple[Json, str]] = [
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}},
        "nonsense",
    ),
    (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"pattern": "("}}}},
        "unclosed",
    ),
    ({"guided_regex": "("}, "unclosed"),
    ({"guided_grammar": "start: foo"}, "unknown name"),
    ({"guided_json": {"enum": ["x" * 90 + str(n) for n in range(2000)]}}, "bytes"),
]


def test_bad_grammars_are_refused_while_a_neighbour_goes_on(cramped: Server) -> None:
    neighbour = {**HELLO, "seed": 1, "ignore_eos": True}
    right = ask(cramped, **neighbour).text
    with ThreadPoolExecutor(1) as thread:
        running = thread.submit(ask, cramped, **neighbour)
        for fields, reason in BAD:
            error = refusal(cramped, {**HELLO, **fields})
            assert (error["param"], reason in error["message"]) == (next(iter(fields)), True)
        assert running.result().text == right
    assert cramped.is_healthy


def test_a_compilation_that_takes_long_holds_nobody_up(cramped: Server) -> None:
    """Two of three quarters of a second each, at the door and again at the workers."""
    slow = [
        {
            **HELLO,
            "max_tokens": 2,
            "guided_json": {"properties": {f"{letter}{n}": {"type": "string"} for n in range(2000)}},
        }
        for letter in "ab"
    ]
    with ThreadPoolExecutor(2) as threads:
        running = [threads.submit(ask, cramped, **wish) for wish in slow]
        waits = []
        while not all(future.done() for future in running):
            begun = time.monotonic()
            ask(cramped, **{**HELLO, "max_tokens": 1})
            waits.append(time.monotonic() - begun)
    assert all(future.result().num_output == 2 for future in running)
    assert sorted(waits)[len(waits) // 2] < 0.4


# --- the demo model ----------------------------------------------------------------------------------

NUM_SCHEMAS, NUM_SCHEMAS_IN_FULL = 6, 500
MAX_TOKENS = 300
FORMATS = FormatChecker(formats=("date", "ipv4", "uuid"))
CROWDED = ("--num-blocks", "22", "--max-model-len", "340")
PROMPT: Json = {"prompt": "Here is an example, in JSON:\n", "temperature": 1.0, "stream": True}
NEIGHBOURS: list[Json] = [{**PROMPT, "seed": seed, "max_tokens": 200, "ignore_eos": True} for seed in range(2)]
"""Two that together need more than all blocks."""


@pytest.mark.timeout(3600)
def test_json_conforms_to_random_schemas_through_hand_over_and_preemption(tmp_path: Path, is_full: bool) -> None:
    """Sampled at temperature 1. What is cut at ``max_tokens`` is no JSON, and has a schema that sets no bound."""
    schemas = [random_schema(seed) for seed in range(NUM_SCHEMAS_IN_FULL if is_full else NUM_SCHEMAS)]
    wishes = [_asking(seed, made) for seed, made in enumerate(schemas)]
    with serving("demo", tmp_path / "log", *CROWDED) as server:
        server.client.timeout = 600  # those behind wait for those before
        answers = ask_all(server, [*NEIGHBOURS, *wishes], num_at_once=14)[len(NEIGHBOURS) :]
        num_preemptions = server.settled().worker("preemptions_total")
    ends = Counter(answer.only.finish_reason for answer in answers)
    assert num_preemptions > 0
    for made, answer in zip(schemas, answers, strict=True):
        if answer.only.finish_reason == "stop":
            Draft202012Validator(made.schema, format_checker=FORMATS).validate(json.loads(answer.text))
        else:
            assert not made.is_bounded
    assert ends["length"] <= len(schemas) // 10


def _asking(seed: int, made: RandomSchema) -> Json:
    schema_format = {"type": "json_schema", "json_schema": {"name": "it", "schema": made.schema}}
    return {**PROMPT, "max_tokens": MAX_TOKENS, "seed": seed, "response_format": schema_format}
