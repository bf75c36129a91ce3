"""When tokens came, read from streams as different servers write them, with a clock that ticks at every read."""

from collections.abc import Iterator

import pytest

from crossdock.benchmarks.report import Outcome
from crossdock.benchmarks.sse_client import EventLines
from crossdock.benchmarks.stream_meter import StreamMeter

USAGE = b'data: {"choices":[],"usage":{"prompt_tokens":4,"completion_tokens":3,"prompt_tokens_details":%s}}\n\n'


def event(text: str, finish: str = "null") -> bytes:
    return f'data: {{"choices":[{{"index":0,"text":"{text}","finish_reason":{finish}}}]}}\n\n'.encode()


def chat_event(delta: str, finish: str = "null") -> bytes:
    return f'data: {{"choices":[{{"delta":{{{delta}}},"finish_reason":{finish}}}]}}\n\n'.encode()


def measured(*pieces: bytes, status: int = 200) -> Outcome:
    """Piece ``i`` arrives ``i + 1`` seconds after the request."""
    ticks: Iterator[float] = iter(range(1, 100))
    meter = StreamMeter(0.0, lambda: next(ticks))
    for piece in pieces:
        meter.feed(piece)
    return meter.outcome(status)


def test_first_token_last_token_gaps_and_usage() -> None:
    details = USAGE % b'{"cached_tokens":2}'
    stream = (event("a"), event("b"), event("c"), event("", '"length"'), details + b"data: [DONE]\n\n")
    assert measured(*stream) == Outcome(
        prompt_tokens=4,
        cached_tokens=2,
        output_tokens=3,
        ttft_seconds=1.0,
        e2e_seconds=4.0,
        gaps_seconds=(1.0, 1.0),
    )


def test_the_role_that_opens_a_chat_is_no_token() -> None:
    stream = (chat_event('"role":"assistant","content":""'), chat_event('"content":"hi"'), chat_event("", '"stop"'))
    assert (measured(*stream).ttft_seconds, measured(*stream).output_tokens) == (2.0, 1)


@pytest.mark.parametrize("delta", ['"reasoning_content":"hm"', '"tool_calls":[{"index":0}]'])
def test_reasoning_and_tool_calls_are_tokens_too(delta: str) -> None:
    assert measured(chat_event(delta), chat_event("", '"stop"')).ttft_seconds == 1.0


def test_an_answer_without_visible_text_counts_from_its_end() -> None:
    outcome = measured(event("", '"stop"'), USAGE % b"null")
    assert (outcome.ttft_seconds, outcome.e2e_seconds, outcome.cached_tokens) == (1.0, 1.0, 0)


def test_events_may_be_cut_anywhere_and_lines_may_end_in_any_way() -> None:
    stream = (event("a") + b": a comment\r\n\r\n" + event("b", '"stop"')).replace(b"\n\n", b"\r\n\r\n")
    whole = EventLines().feed(stream)
    lines = EventLines()
    cut = [payload for i in range(len(stream)) for payload in lines.feed(stream[i : i + 1])]
    assert cut == whole
    assert len(whole) == 2


def test_an_error_in_mid_stream_is_the_outcome() -> None:
    assert measured(event("a"), b'data: {"error":{"message":"worker died"}}\n\n') == Outcome(error="worker died")


def test_a_stream_that_just_ends_has_failed() -> None:
    assert measured(event("a")).error == "the stream ended without a finish_reason"


def test_a_refusal_is_told_with_its_words() -> None:
    refusal = b'{"error":{"message":"full"}}'
    assert measured(refusal, status=503).error == 'HTTP 503: {"error":{"message":"full"}}'
