"""The demo model calls tools, as OpenAI's own client library sees it, in both modes.

It is small: what it says is not always sensible, but where a call is demanded it must be one.
"""

import json
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from openai import BadRequestError, OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletion, ChatCompletionMessageParam
from pydantic import BaseModel

from .server import Server, serving

MODES = {"mixed": ("--mixed", "1"), "1P1D": ()}
CITIES = ["Paris", "Rome", "Oslo"]
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather in a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": CITIES}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}}}}
QUESTION: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the weather in Rome for 3 days?"}]
ASKED: dict[str, Any] = {"model": "demo", "messages": QUESTION, "tools": [WEATHER, CLOCK], "max_tokens": 120}


class Trip(BaseModel):
    """Where to go, and for how long."""

    city: Literal["Paris", "Rome"]
    days: Literal[1, 2, 3]


@pytest.fixture(scope="module", params=MODES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("demo", tmp_path_factory.mktemp("logs") / "server.log", *MODES[request.param]) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def ask(client: OpenAI, **fields: Any) -> ChatCompletion:
    asked: dict[str, Any] = {**ASKED, **fields}
    answer: ChatCompletion = client.chat.completions.create(**asked)
    return answer


def calls_of(answer: ChatCompletion) -> list[tuple[str, str]]:
    calls = answer.choices[0].message.tool_calls or []
    return [(call.function.name, call.function.arguments) for call in calls if call.type == "function"]


def check_weather(arguments: str) -> None:
    given = json.loads(arguments)
    assert given.keys() == {"city", "days"}
    assert given["city"] in CITIES and 1 <= given["days"] <= 9


def test_a_named_function_is_called_with_arguments_that_its_type_takes(client: OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="demo",
        messages=QUESTION,
        tools=[pydantic_function_tool(Trip)],
        tool_choice={"type": "function", "function": {"name": "Trip"}},
        temperature=1,
        seed=1,
        max_tokens=120,
    )
    [choice] = answer.choices
    assert choice.message.tool_calls is not None
    [call] = choice.message.tool_calls
    assert isinstance(call.function.parsed_arguments, Trip)
    assert (choice.finish_reason, choice.message.content) == ("stop", None)


def test_the_result_of_a_call_goes_back_to_the_model(client: OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "get_time", "arguments": "{}"}}
    result = {"role": "tool", "tool_call_id": "call_1", "content": "It is noon."}
    turns = [*QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}, result]
    said = ask(client, messages=turns, tool_choice="none", temperature=0, max_tokens=8)
    assert said.choices[0].message.content
    assert calls_of(said) == []


def test_a_required_call_is_made_and_a_stream_says_the_same(client: OpenAI) -> None:
    asking: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "temperature": 0}
    asking["tools"] = [WEATHER]
    answer = ask(client, **asking)
    [(name, arguments)] = calls_of(answer)
    check_weather(arguments)
    assert (name, answer.choices[0].finish_reason) == ("get_weather", "tool_calls")
    with client.chat.completions.stream(**{**ASKED, **asking}) as stream:
        pieces = [event for event in stream if event.type == "tool_calls.function.arguments.delta"]
        final = stream.get_final_completion()
    assert calls_of(final) == [(name, arguments)]
    assert "".join(piece.arguments_delta for piece in pieces) == arguments
    assert final.choices[0].finish_reason == "tool_calls"


def test_a_bad_schema_is_a_400_that_names_the_function(client: OpenAI) -> None:
    bad = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"x": {"type": "nonsense"}}}}}
    with pytest.raises(BadRequestError) as caught:
        ask(client, tools=[CLOCK, bad], tool_choice="required")
    assert caught.value.param == "tools.1.function.parameters"
