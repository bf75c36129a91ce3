"""From tokens to what the client reads: deltas, stop strings, logprobs, usage and the bytes on the wire."""

import functools
import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from crossdock.core.messages import TokenDelta
from crossdock.core.request import RequestId, SamplingParams, TokenLogprobs
from crossdock.core.sequence import FinishReason
from crossdock.router.output import Choice, OutputAssembler, OutputDelta, OutputSyntax, PreparedPrompt
from crossdock.router.parsing.deltas import CallArguments, CallStart, ParsedText
from crossdock.router.prepare import PreparedRequest
from crossdock.router.text import TextModel
from crossdock.router.tokenizer import TokenizerParts
from crossdock.router.wire_format import DONE, ChatFormat, ChoicesFormat, CompletionFormat

BOS, EOS = 256, 257
STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


@functools.cache
def model() -> TextModel:
    """Its tokens are the 256 bytes, ``<s>`` and ``</s>``."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return TextModel.of(TokenizerParts(tokenizer, {}, frozenset({EOS}), None))


def ids(text: str) -> list[int]:
    return model().encode(text).ids


def choice(
    prompt: str = "Q:",
    stop: Sequence[str] = (),
    index: int = 0,
    echo: bool = False,
    is_stream: bool = False,
    **params: Any,
) -> Choice:
    sampling = SamplingParams(**{"max_tokens": 100, "seed": 1, "stop_token_ids": (EOS,), **params})
    return Choice(index, PreparedPrompt(ids(prompt), prompt), sampling, tuple(stop), echo, is_stream)


def deltas(
    token_ids: Sequence[int | None], finish: FinishReason | None = LENGTH, logprob: float | None = None, cached: int = 0
) -> list[TokenDelta]:
    """One message a token, the last with ``finish``; its second-best alternative is always the letter z."""
    (z,) = ids("z")
    return [
        TokenDelta(
            request_id=RequestId("r"),
            index=index,
            token_id=token_id,
            finish=finish if index == len(token_ids) - 1 else None,
            logprobs=None
            if logprob is None or token_id is None
            else TokenLogprobs(logprob, [token_id, z], [logprob, -9.0]),
            cached_tokens=cached if index == 0 else 0,
        )
        for index, token_id in enumerate(token_ids)
    ]


def fed(assembler: OutputAssembler, arrived: Sequence[TokenDelta]) -> list[OutputDelta]:
    """As the router does it: what comes after the end is not fed."""
    return [assembler.feed(delta) for delta in arrived if assembler.finish is None]


def assembled(of: Choice, arrived: Sequence[TokenDelta]) -> OutputAssembler:
    assembler = OutputAssembler(model(), of)
    fed(assembler, arrived)
    return assembler


def format_of(kind: type[ChoicesFormat], includes_usage: bool = False) -> ChoicesFormat:
    prepared = PreparedRequest("toy", (), False, includes_usage, kind)
    return kind(prepared, "1", 1_796_000_000, "fp_1")


def events(stream: bytes) -> list[Any]:
    """The objects of server-sent events."""
    assert stream.endswith(b"\n\n")
    lines = stream.decode().removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


# --- one choice --------------------------------------------------------------------------------


def test_text_comes_as_soon_as_a_character_is_whole_and_eos_is_not_shown() -> None:
    assembler = OutputAssembler(model(), choice())
    outputs = fed(assembler, deltas([*ids("né"), EOS], STOP))
    assert [output.text for output in outputs] == ["n", "", "é", ""]
    assert [output.is_empty for output in outputs] == [False, True, False, False]
    assert (assembler.finish, assembler.num_output) == (STOP, 4)


def test_a_stop_token_of_the_client_is_not_shown_either() -> None:
    (dot,) = ids(".")
    assert assembled(choice(stop_token_ids=(dot, EOS)), deltas(ids("so."), STOP)).output == OutputDelta("so", (), STOP)
    assert assembled(choice(), deltas(ids("so."), LENGTH)).output == OutputDelta("so.", (), LENGTH)


def test_the_end_flushes_what_was_held_back() -> None:
    half_a_character = ids("é")[:1]
    assert assembled(choice(stop=["END"]), deltas([*ids("no EN"), *half_a_character])).output.text == "no EN\ufffd"
    assert assembled(choice(stop=["END"]), deltas([*ids("no EN"), EOS], STOP)).output.text == "no EN"
    assert assembled(choice(stop=["END"]), deltas([*ids("no EN"), None])).output.text == "no EN"


def test_a_stop_string_ends_the_choice_before_the_worker_does_and_counts_its_tokens() -> None:
    assembler = OutputAssembler(model(), choice(stop=["END"]))
    outputs = fed(assembler, deltas(ids("so EEND and more")))
    assert [output.text for output in outputs] == ["s", "o", " ", "", "E", "", ""]
    assert (assembler.finish, assembler.num_output) == (STOP, 7)


def test_a_stop_string_in_the_last_token_wins_over_the_length() -> None:
    assert assembled(choice(stop=["!"]), deltas(ids("so!"), LENGTH)).output == OutputDelta("so", (), STOP)


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (2, ""), (3, "END"), (5, "END"), (6, "ENDEND")])
def test_a_stop_string_complete_below_min_tokens_does_not_end(min_tokens: int, text: str) -> None:
    output = assembled(choice(stop=["END"], min_tokens=min_tokens), deltas(ids("ENDEND"))).output
    assert output == OutputDelta(text, (), LENGTH if text == "ENDEND" else STOP)


def test_first_token_after_a_prompt_that_ends_inside_a_character_completes_it() -> None:
    first, second = ids("é")
    prompt = PreparedPrompt([first], "\ufffd")
    unfinished = Choice(0, prompt, SamplingParams(max_tokens=9, seed=1))
    assert assembled(unfinished, deltas([second, *ids("t")])).output.text == "ét"


@given(st.text(max_size=8), st.text(max_size=8), st.sampled_from([(), ("a",), ("ab", "é"), ("aaa",)]))
def test_streamed_deltas_join_to_the_body(prompt: str, text: str, stop: tuple[str, ...]) -> None:
    token_ids = [*ids(text), EOS]
    whole = assembled(choice(prompt, stop, echo=True), deltas(token_ids, STOP)).output.text
    streamed = fed(OutputAssembler(model(), choice(prompt, stop, echo=True, is_stream=True)), deltas(token_ids, STOP))
    assert "".join(output.text for output in streamed) == whole
    starts = [text.find(one) for one in stop if one in text]
    assert whole == prompt + text[: min(starts, default=len(text))]


# --- logprobs ----------------------------------------------------------------------------------


def test_scoring_a_prompt_gives_a_logprob_to_every_token_but_the_first() -> None:
    scored = choice("Yes", echo=True, max_tokens=0, logprobs=1, prompt_logprobs=1)
    assembler = OutputAssembler(model(), scored)
    e, s = ids("es")
    assembler.add_prompt_logprobs(1, [TokenLogprobs(-0.5, [e], [-0.5])])
    assembler.add_prompt_logprobs(2, [TokenLogprobs(-2.0, [e], [-0.25])])
    fed(assembler, deltas([None]))
    (body,) = json.loads(format_of(CompletionFormat).body([assembler]))["choices"]
    assert body == {
        "index": 0,
        "text": "Yes",
        "logprobs": {
            "tokens": ["Y", "e", "s"],
            "token_logprobs": [None, -0.5, -2.0],
            "top_logprobs": [None, {"e": -0.5}, {"e": -0.25, "s": -2.0}],
            "text_offset": [0, 1, 2],
        },
        "finish_reason": "length",
    }
    assert (assembler.num_output, model().token_text(s)) == (0, "s")


def test_an_echo_with_output_lists_prompt_and_output_at_their_places_in_the_text() -> None:
    prompt = PreparedPrompt([BOS, *ids("é")], "é", num_added=1)
    params = SamplingParams(max_tokens=9, seed=1, logprobs=0, prompt_logprobs=0, stop_token_ids=(EOS,))
    assembler = OutputAssembler(model(), Choice(0, prompt, params, echo=True, is_stream=True))
    assembler.add_prompt_logprobs(1, [TokenLogprobs(-1.0), TokenLogprobs(-2.0)])
    first, second = fed(assembler, deltas([*ids("x"), EOS], STOP, logprob=-3.0))
    assert (first.text, second.text) == ("éx", "")
    entries = [*first.entries, *second.entries]
    assert [entry.text for entry in entries] == ["<s>", "bytes:\\xc3", "bytes:\\xa9", "x", "</s>"]
    assert [entry.offset for entry in entries] == [0, 0, 0, 1, 2]
    assert [entry.logprob for entry in entries] == [None, -1.0, -2.0, -3.0, -3.0]


def test_an_echo_without_logprobs_is_the_text_alone() -> None:
    assert assembled(choice("Yes", echo=True), deltas([None])).output == OutputDelta("Yes", (), LENGTH)


def test_there_is_one_logprob_for_each_token_counted_also_while_text_is_held_back() -> None:
    assembler = OutputAssembler(model(), choice(stop=["END"], logprobs=1))
    outputs = fed(assembler, deltas(ids("aEND"), logprob=-0.5))
    assert [len(output.entries) for output in outputs] == [1, 1, 1, 1]
    assert [entry.offset for entry in assembler.output.entries] == [0, 1, 2, 3]
    assert len(assembler.output.entries) == assembler.num_output == 4


def test_chat_logprobs_have_text_bytes_and_alternatives() -> None:
    assembler = assembled(choice(logprobs=2), deltas(ids("é")[:1], logprob=float("-inf")))
    (body,) = json.loads(format_of(ChatFormat).body([assembler]))["choices"]
    token = {"token": "bytes:\\xc3", "logprob": -9999.0, "bytes": [0xC3]}
    other = {"token": "z", "logprob": -9.0, "bytes": [0x7A]}
    assert body["logprobs"] == {"content": [{**token, "top_logprobs": [token, other]}], "refusal": None}


# --- bodies ------------------------------------------------------------------------------------


def test_a_chat_body_is_openais() -> None:
    assembler = assembled(choice("Q: x", stop=["!"]), deltas(ids('"A"!'), cached=3))
    assert json.loads(format_of(ChatFormat).body([assembler])) == {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1_796_000_000,
        "model": "toy",
        "system_fingerprint": "fp_1",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": '"A"', "refusal": None},
                "logprobs": None,
                "finish_reason": "stop",
            }
        ],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 4,
            "total_tokens": 8,
            "prompt_tokens_details": {"cached_tokens": 3},
            "completion_tokens_details": {"reasoning_tokens": 0},
        },
    }


def test_a_body_has_every_choice_whole_and_counts_each_prompt_once() -> None:
    first = [choice("ab", index=index) for index in (0, 1)]
    first[1] = Choice(1, first[0].prompt, first[1].params)
    second = choice("abc", index=2)
    assemblers = [
        assembled(of, deltas(ids(text), cached=cached))
        for of, text, cached in zip([*first, second], ["x", "yyyy", "zz"], [0, 2, 1], strict=True)
    ]
    body = json.loads(format_of(CompletionFormat).body(assemblers))
    assert (body["id"], body["object"]) == ("cmpl-1", "text_completion")
    assert [(made["index"], made["text"], made["finish_reason"]) for made in body["choices"]] == [
        (0, "x", "length"),
        (1, "yyyy", "length"),
        (2, "zz", "length"),
    ]
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 1},
        "completion_tokens_details": {"reasoning_tokens": 0},
    }


def test_a_body_is_not_built_from_an_unfinished_choice() -> None:
    with pytest.raises(AssertionError, match="whole outputs"):
        format_of(ChatFormat).body([assembled(choice(), deltas(ids("x"), finish=None))])


# --- streams -----------------------------------------------------------------------------------


def stream_of(form: ChoicesFormat, of: Choice, arrived: Sequence[TokenDelta]) -> bytes:
    outputs = fed(OutputAssembler(model(), of), arrived)
    return form.opening(of.index) + b"".join(form.chunk(of.index, output) for output in outputs)


def test_a_chat_stream_opens_with_the_role_and_ends_with_the_reason() -> None:
    stream = stream_of(format_of(ChatFormat), choice(index=1, is_stream=True), deltas([*ids('"é\n'), EOS], STOP))
    chunks = events(stream)
    head = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1_796_000_000,
        "model": "toy",
        "system_fingerprint": "fp_1",
    }
    made = [chunk.pop("choices") for chunk in chunks]
    assert chunks == [head] * 5
    contents: list[dict[str, str]] = [{"role": "assistant", "content": ""}, *({"content": text} for text in '"é\n'), {}]
    assert made == [
        [{"index": 1, "delta": delta, "logprobs": None, "finish_reason": reason}]
        for delta, reason in zip(contents, [None, None, None, None, "stop"], strict=True)
    ]


def test_a_completion_stream_has_no_opening_and_text_in_each_chunk() -> None:
    stream = stream_of(format_of(CompletionFormat), choice(is_stream=True), deltas(ids("ab"), LENGTH))
    assert [chunk["choices"] for chunk in events(stream)] == [
        [{"index": 0, "text": "a", "logprobs": None, "finish_reason": None}],
        [{"index": 0, "text": "b", "logprobs": None, "finish_reason": "length"}],
    ]
    assert {chunk["object"] for chunk in events(stream)} == {"text_completion"}


def test_streamed_logprobs_come_with_their_token() -> None:
    chat = stream_of(format_of(ChatFormat), choice(is_stream=True, logprobs=1), deltas(ids("é"), logprob=-0.5))
    entries = [chunk["choices"][0]["logprobs"] for chunk in events(chat)]
    assert [entry and [token["bytes"] for token in entry["content"]] for entry in entries] == [None, [[0xC3]], [[0xA9]]]
    legacy = stream_of(format_of(CompletionFormat), choice(is_stream=True, logprobs=1), deltas(ids("ab"), logprob=-0.5))
    assert [chunk["choices"][0]["logprobs"]["text_offset"] for chunk in events(legacy)] == [[0], [1]]


@pytest.mark.parametrize("kind", [ChatFormat, CompletionFormat])
def test_usage_is_null_in_every_chunk_but_the_last_and_absent_unless_asked_for(kind: type[ChoicesFormat]) -> None:
    arrived = deltas(ids("ab"), LENGTH, cached=1)
    plain = stream_of(format_of(kind), choice(is_stream=True), arrived)
    assert all("usage" not in chunk and chunk["choices"] for chunk in events(plain))
    form = format_of(kind, includes_usage=True)
    assert [chunk["usage"] for chunk in events(stream_of(form, choice(is_stream=True), arrived))][-1] is None
    (last,) = events(form.ending([assembled(choice(), arrived)]).removesuffix(DONE))
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"], last["usage"]["total_tokens"]) == (
        2,
        2,
        4,
    )
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 1}
    assert DONE == b"data: [DONE]\n\n"


# --- reasoning and calls -----------------------------------------------------------------------


class Spelled:
    """Reads ``?`` as the start of reasoning, ``!name`` as that of a call, letter by letter."""

    def __init__(self) -> None:
        self._num_calls = 0
        self._is_reasoning = False

    def feed(self, text: str) -> ParsedText:
        return functools.reduce(ParsedText.__add__, map(self._letter, text), ParsedText())

    def _letter(self, letter: str) -> ParsedText:
        if letter in "?.":
            self._is_reasoning = letter == "?"
            return ParsedText()
        if letter == "!":
            self._num_calls += 1
            return ParsedText(calls=(CallStart(self._num_calls - 1, f"call_{self._num_calls}", "f"),))
        if self._num_calls:
            return ParsedText(calls=(CallArguments(self._num_calls - 1, letter),))
        return ParsedText(letter) if self._is_reasoning else ParsedText(content=letter)

    def flush(self) -> ParsedText:
        return ParsedText()


def spelled(is_stream: bool = False, ends_in_calls: bool = True, **params: Any) -> Choice:
    return replace(choice(is_stream=is_stream, **params), syntax=OutputSyntax(Spelled, ends_in_calls=ends_in_calls))


def test_a_body_has_reasoning_calls_and_no_content_where_the_model_said_nothing_else() -> None:
    assembler = assembled(spelled(), deltas([*ids("?so.!{}!1"), EOS], STOP))
    (body,) = json.loads(format_of(ChatFormat).body([assembler]))["choices"]
    assert body == {
        "index": 0,
        "message": {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "reasoning_content": "so",
            "reasoning": "so",
            "tool_calls": [
                {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}},
                {"id": "call_2", "type": "function", "function": {"name": "f", "arguments": "1"}},
            ],
        },
        "logprobs": None,
        "finish_reason": "tool_calls",
    }


@pytest.mark.parametrize(("said", "num_reasoning"), [("?so.!{}", 3), ("?so", 3), ("hi", 0), ("a?b.c?d", 4)])
def test_usage_tells_the_tokens_of_reasoning_with_the_marks_that_open_it(said: str, num_reasoning: int) -> None:
    assembler = assembled(spelled(), deltas([*ids(said), EOS], STOP))
    usage = json.loads(format_of(ChatFormat).body([assembler]))["usage"]
    assert usage["completion_tokens_details"] == {"reasoning_tokens": num_reasoning}
    assert usage["completion_tokens"] == len(said) + 1


def test_a_stream_has_them_in_pieces_one_entry_a_call() -> None:
    stream = stream_of(format_of(ChatFormat), spelled(is_stream=True), deltas([*ids("?s.a!{"), EOS], STOP))
    made = [chunk["choices"][0] for chunk in events(stream)]
    start = {"index": 0, "id": "call_1", "type": "function", "function": {"name": "f", "arguments": ""}}
    assert [choice["delta"] for choice in made[1:]] == [
        {"reasoning_content": "s", "reasoning": "s"},
        {"content": "a"},
        {"tool_calls": [start]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
        {},
    ]
    assert [choice["finish_reason"] for choice in made] == [None] * 5 + ["tool_calls"]
    both = OutputDelta("x", calls=(CallStart(0, "call_1", "f"), CallArguments(0, "{"), CallArguments(0, "}")))
    (chunk,) = events(format_of(ChatFormat).chunk(0, both))
    started = {**start, "function": {"name": "f", "arguments": "{}"}}
    assert chunk["choices"][0]["delta"] == {"content": "x", "tool_calls": [started]}


@pytest.mark.parametrize(
    ("said", "finish", "ends_in_calls", "reason"),
    [
        ("!{}", STOP, True, "tool_calls"),
        ("!{}", STOP, False, "stop"),
        ("!{", LENGTH, True, "length"),
        ("hello", STOP, True, "stop"),
    ],
)
def test_calls_are_the_reason_to_stop_unless_the_client_named_the_function(
    said: str, finish: FinishReason, ends_in_calls: bool, reason: str
) -> None:
    end = [EOS] if finish is STOP else []
    assembler = assembled(spelled(ends_in_calls=ends_in_calls), deltas([*ids(said), *end], finish))
    (body,) = json.loads(format_of(ChatFormat).body([assembler]))["choices"]
    assert body["finish_reason"] == reason


def test_logprobs_count_every_token_whatever_its_text_becomes() -> None:
    assembler = assembled(spelled(logprobs=0), deltas([*ids("?s.a!{"), EOS], STOP, logprob=-0.5))
    (body,) = json.loads(format_of(ChatFormat).body([assembler]))["choices"]
    assert [entry["token"] for entry in body["logprobs"]["content"]] == [*"?s.a!{", "</s>"]


def test_a_parser_sees_the_special_tokens_that_are_its_markers() -> None:
    seen = OutputSyntax(markers=frozenset({BOS}))
    assert assembled(replace(choice(), syntax=seen), deltas([BOS, *ids("a"), EOS])).output.text == "<s>a"
    assert assembled(choice(), deltas([BOS, *ids("a"), EOS])).output.text == "a"
