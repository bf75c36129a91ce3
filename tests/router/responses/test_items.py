"""Items of a conversation: which are taken, which chat they become, and how they are listed."""

from collections.abc import Sequence
from typing import Any

import pytest
from openai.types.responses import ResponseItemList
from pydantic import BaseModel, ValidationError

from crossdock.router.openai_errors import ApiError, of_validation
from crossdock.router.responses.items import Item, chat_messages, read_items

Json = dict[str, Any]


def user(text: str) -> Json:
    return {"role": "user", "content": text}


def said(text: str, **more: object) -> Json:
    """A message as answers have it."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "id": "msg_1", "role": "assistant", "status": "completed", "content": [part], **more}


def thought(*texts: str, **more: object) -> Json:
    content = [{"type": "reasoning_text", "text": text} for text in texts]
    return {"type": "reasoning", "id": "rs_1", "summary": [], "content": content, **more}


def call(name: str) -> Json:
    return {"type": "function_call", "call_id": f"call_{name}", "name": name, "arguments": "{}"}


def result(name: str, output: object = "42") -> Json:
    return {"type": "function_call_output", "call_id": f"call_{name}", "output": output}


def chat(*items: Json, instructions: str | None = None) -> list[Json]:
    return chat_messages(read_items(items), instructions)


def chat_call(name: str) -> Json:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": "{}"}}


def listed(items: Sequence[Json]) -> list[Json]:
    ids = iter(range(1000))
    return [item.listed(lambda: f"new{next(ids)}") for item in read_items(items)]


def test_instructions_come_before_the_messages() -> None:
    assert chat(user("hi"), instructions="be brief") == [{"role": "system", "content": "be brief"}, user("hi")]


def test_parts_of_a_content_follow_each_other_without_anything_between_them() -> None:
    parts = [{"type": "input_text", "text": "one"}, {"type": "input_text", "text": " two"}]
    assert chat({"type": "message", "role": "developer", "content": parts}) == [
        {"role": "developer", "content": "one two"}
    ]
    assert chat(said("a", content=[{"type": "refusal", "refusal": "I will not"}])) == [
        {"role": "assistant", "content": "I will not"}
    ]


def test_reasoning_text_and_calls_of_one_turn_are_one_message() -> None:
    conversation = [user("hi"), thought("hm", "m"), said("let me see"), call("f"), call("g"), result("f"), result("g")]
    assert chat(*conversation) == [
        user("hi"),
        {
            "role": "assistant",
            "reasoning_content": "hmm",
            "content": "let me see",
            "tool_calls": [chat_call("f"), chat_call("g")],
        },
        {"role": "tool", "tool_call_id": "call_f", "content": "42"},
        {"role": "tool", "tool_call_id": "call_g", "content": "42"},
    ]


def test_what_cannot_be_of_one_turn_is_a_message_of_its_own() -> None:
    assert chat(said("one"), said("two"), thought("hm"), call("f"), said("three"), thought("more")) == [
        {"role": "assistant", "content": "one"},
        {"role": "assistant", "content": "two"},
        {"role": "assistant", "reasoning_content": "hm", "tool_calls": [chat_call("f")]},
        {"role": "assistant", "content": "three"},
        {"role": "assistant", "reasoning_content": "more", "content": ""},
    ]


def test_a_summary_stands_for_reasoning_that_was_not_told() -> None:
    item = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "thought about it"}]}
    assert chat(item, said("so"))[0]["reasoning_content"] == "thought about it"
    assert chat({**item, "content": [{"type": "reasoning_text", "text": "hm"}]})[0]["reasoning_content"] == "hm"


def test_the_output_of_a_function_may_be_parts() -> None:
    parts = [{"type": "input_text", "text": "4"}, {"type": "input_text", "text": "2"}]
    assert chat(call("f"), result("f", parts))[1]["content"] == "42"


CONVERSATION = [
    user("hi"),
    {"role": "system", "content": [{"type": "input_text", "text": "be brief"}]},
    {"role": "assistant", "content": "hello"},
    thought("hm"),
    said("so", id="msg_mine"),
    call("f"),
    result("f"),
    result("g", [{"type": "input_text", "text": "1"}]),
]


def test_listed_items_are_those_of_openai_and_become_the_same_chat_again() -> None:
    items = listed(CONVERSATION)
    page = {"object": "list", "data": items, "first_id": "", "last_id": "", "has_more": False}
    ResponseItemList.model_validate(page)
    kinds = [type(item) for item in ResponseItemList.model_validate(page).data]
    assert [kind.__name__ for kind in kinds] == [
        "ResponseInputMessageItem",
        "ResponseInputMessageItem",
        "ResponseOutputMessage",
        "ResponseReasoningItem",
        "ResponseOutputMessage",
        "ResponseFunctionToolCallItem",
        "ResponseFunctionToolCallOutputItem",
        "ResponseFunctionToolCallOutputItem",
    ]
    assert chat(*items) == chat(*CONVERSATION)
    assert listed(items) == items


def test_items_keep_their_ids_or_get_one() -> None:
    assert [item["id"] for item in listed(CONVERSATION)] == [
        "msg_new0",
        "msg_new1",
        "msg_new2",
        "rs_1",
        "msg_mine",
        "fc_new3",
        "fco_new4",
        "fco_new5",
    ]


class Input(BaseModel):
    input: str | list[Item]


@pytest.mark.parametrize(
    ("item", "param", "message"),
    [
        (
            {"type": "item_reference", "id": "msg_1"},
            "input.0.type",
            "'item_reference' is not supported by this server.",
        ),
        ({"type": ["message"]}, "input.0.type", "['message'] is not supported by this server."),
        (
            {"role": "user", "content": [{"type": "input_image", "image_url": "data:,"}]},
            "input.0.content.0.type",
            "'input_image' is not supported by this server.",
        ),
        (
            {"role": "user", "content": [{"type": "output_text", "text": "x"}]},
            "input.0.content",
            "a message of role 'user' cannot hold 'output_text'.",
        ),
        ({"role": "user"}, "input.0.content", "Missing required parameter: 'input.0.content'."),
        ({"type": "function_call"}, "input.0.call_id", "Missing required parameter: 'input.0.call_id'."),
        ({"role": "user", "content": [{"text": "x"}]}, "input.0.content.0.type", None),
        ({"role": "robot", "content": "x"}, "input.0.role", None),
        (
            result("f", [{"type": "input_file"}]),
            "input.0.output.0.type",
            "'input_file' is not supported by this server.",
        ),
        (thought("x", encrypted_content="gAAA"), "input.0.encrypted_content", None),
        (said("x", phase="commentary"), "input.0.phase", None),
        (said("x", mood="good"), "input.0.mood", "Unknown parameter: 'input.0.mood'."),
        (3, "input.0", None),
    ],
)
def test_what_is_not_taken_is_refused_by_its_place(item: object, param: str, message: str | None) -> None:
    with pytest.raises(ValidationError) as caught:
        Input.model_validate({"input": [item]})
    error: ApiError = of_validation(caught.value.errors())
    assert (error.status, error.param) == (400, param)
    assert message is None or error.message == message
