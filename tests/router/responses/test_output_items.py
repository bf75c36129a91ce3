"""Output items and their events, whatever the model says."""

import json
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from openai.types.responses import ResponseOutputItem, ResponseStreamEvent
from pydantic import TypeAdapter

from crossdock.core.sequence import FinishReason
from crossdock.router.output import OutputDelta, ScoredToken, TokenEntry
from crossdock.router.parsing.deltas import CallArguments, CallStart
from crossdock.router.responses.items import Status, read_items
from crossdock.router.responses.output_items import EventLog, OutputItems

Json = dict[str, Any]
event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
item_type: TypeAdapter[Any] = TypeAdapter(ResponseOutputItem)


def events_of(stream: bytes) -> list[Json]:
    """What a client reads, with the name of each event as its type, numbered without a gap."""
    made: list[Json] = []
    for block in stream.decode().removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event.pop("sequence_number") == len(made)
        event_type.validate_python({**event, "sequence_number": len(made)})
        made.append(event)
    return made


def written(deltas: Sequence[OutputDelta], status: Status = "completed") -> tuple[list[Json], list[Json]]:
    """The events and the items that these deltas become; the items are OpenAI's, and can be sent back."""
    ids = count(1)
    output = OutputItems(EventLog(), lambda: str(next(ids)))
    stream = b"".join([output.feed(delta) for delta in deltas]) + output.end(status)
    for item in output.items:
        item_type.validate_python(item)
    read_items(output.items)
    return events_of(stream), output.items


def types(events: Sequence[Json]) -> list[str]:
    return [event["type"].removeprefix("response.") for event in events]


def entry(text: str) -> TokenEntry:
    return TokenEntry(text, text.encode(), -0.5, (ScoredToken("x", b"x", -0.75),), 0)


def logprob(text: str) -> Json:
    top = {"token": "x", "logprob": -0.75, "bytes": [120]}
    return {"token": text, "logprob": -0.5, "bytes": list(text.encode()), "top_logprobs": [top]}


END = OutputDelta(finish=FinishReason.STOP)


def test_a_text_is_a_message() -> None:
    events, items = written([OutputDelta("hel"), OutputDelta('"lo'), END])
    part = {"type": "output_text", "annotations": [], "logprobs": [], "text": 'hel"lo'}
    message = {"id": "msg_1", "type": "message", "status": "completed", "role": "assistant", "content": [part]}
    place = {"item_id": "msg_1", "output_index": 0, "content_index": 0}
    assert items == [message]
    assert events == [
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**message, "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **place, "part": {**part, "text": ""}},
        {"type": "response.output_text.delta", **place, "delta": "hel", "logprobs": []},
        {"type": "response.output_text.delta", **place, "delta": '"lo', "logprobs": []},
        {"type": "response.output_text.done", **place, "text": 'hel"lo', "logprobs": []},
        {"type": "response.content_part.done", **place, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": message},
    ]


def test_reasoning_is_an_item_before_the_message() -> None:
    events, items = written([OutputDelta(reasoning="h"), OutputDelta(reasoning="m"), OutputDelta("so"), END])
    reasoning = {
        "id": "rs_1",
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "hm"}],
    }
    assert [item["type"] for item in items] == ["reasoning", "message"]
    assert items[0] == reasoning
    place = {"item_id": "rs_1", "output_index": 0, "content_index": 0}
    assert events[:7] == [
        {
            "type": "response.output_item.added",
            "output_index": 0,
            "item": {**reasoning, "status": "in_progress", "content": []},
        },
        {"type": "response.content_part.added", **place, "part": {"type": "reasoning_text", "text": ""}},
        {"type": "response.reasoning_text.delta", **place, "delta": "h"},
        {"type": "response.reasoning_text.delta", **place, "delta": "m"},
        {"type": "response.reasoning_text.done", **place, "text": "hm"},
        {"type": "response.content_part.done", **place, "part": {"type": "reasoning_text", "text": "hm"}},
        {"type": "response.output_item.done", "output_index": 0, "item": reasoning},
    ]
    assert events[7]["item"]["id"] == "msg_2"
    assert {event["output_index"] for event in events[7:]} == {1}


def test_calls_are_items_one_after_the_other() -> None:
    events, items = written(
        [
            OutputDelta("ok"),
            OutputDelta(calls=(CallStart(0, "call_a", "f"), CallArguments(0, '{"x":'))),
            OutputDelta(calls=(CallArguments(0, "1}"), CallStart(1, "call_b", "g"))),
            OutputDelta(calls=(CallArguments(1, "{}"),), finish=FinishReason.STOP, ends_in_calls=True),
        ]
    )
    f = {
        "id": "fc_2",
        "type": "function_call",
        "status": "completed",
        "call_id": "call_a",
        "name": "f",
        "arguments": '{"x":1}',
    }
    assert items[1:] == [f, {**f, "id": "fc_3", "call_id": "call_b", "name": "g", "arguments": "{}"}]
    place = {"item_id": "fc_2", "output_index": 1}
    assert events[6:11] == [
        {
            "type": "response.output_item.added",
            "output_index": 1,
            "item": {**f, "status": "in_progress", "arguments": ""},
        },
        {"type": "response.function_call_arguments.delta", **place, "delta": '{"x":'},
        {"type": "response.function_call_arguments.delta", **place, "delta": "1}"},
        {"type": "response.function_call_arguments.done", **place, "arguments": '{"x":1}'},
        {"type": "response.output_item.done", "output_index": 1, "item": f},
    ]
    assert types(events[11:]) == [
        "output_item.added",
        "function_call_arguments.delta",
        "function_call_arguments.done",
        "output_item.done",
    ]


def test_one_delta_may_hold_reasoning_text_and_a_call() -> None:
    _, items = written([OutputDelta("so", reasoning="hm", calls=(CallStart(0, "call_a", "f"),)), END])
    assert [item["type"] for item in items] == ["reasoning", "message", "function_call"]


def test_text_after_a_call_is_another_message() -> None:
    _, items = written([OutputDelta("a"), OutputDelta(calls=(CallStart(0, "c", "f"),)), OutputDelta("b"), END])
    assert [item["type"] for item in items] == ["message", "function_call", "message"]


@pytest.mark.parametrize(
    ("deltas", "statuses"),
    [
        ([OutputDelta("ab")], ["incomplete"]),
        ([OutputDelta(reasoning="ab")], ["incomplete"]),
        ([OutputDelta(reasoning="ab"), OutputDelta("c")], ["completed", "incomplete"]),
        ([OutputDelta("a"), OutputDelta(calls=(CallStart(0, "c", "f"),))], ["completed", "incomplete"]),
    ],
)
def test_only_the_last_item_of_an_answer_that_was_cut_is_incomplete(
    deltas: list[OutputDelta], statuses: list[str]
) -> None:
    events, items = written(deltas, "incomplete")
    assert [item["status"] for item in items] == statuses
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == items


def test_an_answer_that_shows_nothing_is_an_empty_message() -> None:
    events, items = written([END])
    assert items[0]["content"] == [{"type": "output_text", "annotations": [], "logprobs": [], "text": ""}]
    assert types(events) == [
        "output_item.added",
        "content_part.added",
        "output_text.done",
        "content_part.done",
        "output_item.done",
    ]


def test_logprobs_come_with_the_text_of_messages_and_are_told_once_more_at_its_end() -> None:
    held_back, shown = OutputDelta(entries=(entry("a"),)), OutputDelta("ab", entries=(entry("b"),))
    events, items = written([held_back, shown, OutputDelta(entries=(entry("</s>"),), finish=FinishReason.STOP)])
    tokens = [logprob("a"), logprob("b"), logprob("</s>")]
    assert [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"] == [
        tokens[:2],
        tokens[2:],
    ]
    assert items[0]["content"][0]["logprobs"] == events[4]["logprobs"] == events[5]["part"]["logprobs"] == tokens


def test_reasoning_and_calls_show_no_logprobs() -> None:
    _, items = written(
        [
            OutputDelta(entries=(entry("<think>"),)),
            OutputDelta(reasoning="a", entries=(entry("a"),)),
            OutputDelta(entries=(entry("</think>"),)),
            OutputDelta("b", entries=(entry("b"),)),
            OutputDelta(calls=(CallStart(0, "c", "f"),), entries=(entry("{"),)),
            OutputDelta(entries=(entry("</s>"),), finish=FinishReason.STOP),
        ]
    )
    assert items[1]["content"][0]["logprobs"] == [logprob("b")]
