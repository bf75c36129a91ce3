"""Answers with calls and reasoning over a whole router, whose workers are played: bodies and streams."""

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from crossdock.core.config import ChatConfig
from crossdock.core.messages import Role
from crossdock.router.app import create_app
from crossdock.router.chat_syntax import chat_syntax
from crossdock.router.chat_template import ChatTemplate
from crossdock.router.openai_answers import ChatCompletion, ChatCompletionChunk
from crossdock.router.parsing.families import thoughts_named
from crossdock.router.text import TextModel

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import Cluster

Json = dict[str, Any]

WEATHER = {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}}
ASKED: Json = {
    "messages": [{"role": "user", "content": "How is it in Köln and Rome?"}],
    "tools": [{"type": "function", "function": WEATHER}],
    "max_tokens": 200,
}
KOELN, ROME = '{"city": "Köln"}', '{"city": "Rome"}'


TEMPLATE = (
    "{# <tool_call> #}{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}{{ m.content }}{{ m.tool_calls }}{% endfor %}"
)


@pytest.fixture(scope="module")
def text(text: TextModel) -> TextModel:
    """The toy model, with a template that offers tools in few bytes, of which a token each is made."""
    template = ChatTemplate(TEMPLATE, {})
    return replace(text, template=template, syntax=chat_syntax(ChatConfig(), template, ()))


def call(arguments: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>'


async def body_of(client: httpx.AsyncClient, asked: Json) -> Json:
    answer = await client.post("/v1/chat/completions", json=asked)
    assert answer.status_code == 200, answer.text
    ChatCompletion.model_validate_json(answer.content)
    (choice,) = answer.json()["choices"]
    return {"finish_reason": choice["finish_reason"], **choice["message"]}


async def chunks_of(client: httpx.AsyncClient, asked: Json) -> list[Json]:
    answer = await client.post("/v1/chat/completions", json={**asked, "stream": True})
    events = [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event]
    assert events.pop() == "[DONE]"
    for event in events:
        ChatCompletionChunk.model_validate_json(event)
    return [json.loads(event)["choices"][0] for event in events]


def joined(chunks: list[Json]) -> Json:
    """A stream as its body would be, but for the ids of calls, which are checked."""
    made: Json = {"content": "", "reasoning_content": "", "calls": []}
    for chunk in chunks:
        delta = chunk["delta"]
        for key in ("content", "reasoning_content"):
            made[key] += delta.get(key, "")
        for entry in delta.get("tool_calls", []):
            if "id" in entry:
                assert entry["id"].startswith("call_")
                assert entry["index"] == len(made["calls"])
                made["calls"].append([entry["function"]["name"], ""])
            made["calls"][entry["index"]][1] += entry["function"]["arguments"]
        made["finish_reason"] = chunk["finish_reason"]
    return made


@pytest.mark.parametrize("roles", [(Role.MIXED,), (Role.PREFILL, Role.DECODE)])
async def test_a_body_and_a_stream_hold_the_same_calls(
    cluster: "Cluster", client: httpx.AsyncClient, roles: tuple[Role, ...]
) -> None:
    await cluster.add(*roles)
    cluster.says = f"I look.\n{call(KOELN)}\n{call(ROME)}"
    body = await body_of(client, ASKED)
    assert (body["content"], body["finish_reason"]) == ("I look.", "tool_calls")
    assert [made["function"] for made in body["tool_calls"]] == [
        {"name": "weather", "arguments": arguments} for arguments in (KOELN, ROME)
    ]
    assert len({made["id"] for made in body["tool_calls"]}) == 2
    stream = joined(await chunks_of(client, ASKED))
    assert (stream["content"], stream["finish_reason"]) == ("I look.", "tool_calls")
    assert stream["calls"] == [["weather", KOELN], ["weather", ROME]]


async def test_arguments_are_streamed_as_they_come(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(Role.MIXED)
    cluster.says = call(ROME)
    chunks = await chunks_of(client, ASKED)
    pieces = [entry["function"]["arguments"] for chunk in chunks for entry in chunk["delta"].get("tool_calls", [])]
    assert pieces == list(ROME)  # a token is a character here
    assert await body_of(client, ASKED) | {"tool_calls": None} == {
        "role": "assistant",
        "content": None,
        "refusal": None,
        "tool_calls": None,
        "finish_reason": "tool_calls",
    }


@pytest.mark.parametrize(
    "said", ["<tool_call>oops", call('{"a": ]}'), call(ROME).replace("weather", "climate"), "<tool_cal", "no call"]
)
async def test_what_is_no_call_is_content_and_never_an_error(
    cluster: "Cluster", client: httpx.AsyncClient, said: str
) -> None:
    await cluster.add(Role.MIXED)
    cluster.says = said
    body = await body_of(client, ASKED)
    assert (body["content"], body["finish_reason"], "tool_calls" in body) == (said, "stop", False)


async def test_without_tools_or_with_the_choice_none_nothing_is_read_as_a_call(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    await cluster.add(Role.MIXED)
    cluster.says = call(ROME)
    for fields in ({"tool_choice": "none"}, {"tools": None}):
        body = await body_of(client, {**ASKED, **fields})
        assert (body["content"], body["finish_reason"]) == (call(ROME), "stop")


async def test_a_limit_in_the_middle_of_a_call_is_the_reason_and_what_came_is_given(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    await cluster.add(Role.MIXED)
    cluster.says = call(ROME)
    asked = {**ASKED, "max_tokens": call(ROME).index("Rome") + 2}
    body = await body_of(client, asked)
    assert (body["finish_reason"], body["tool_calls"][0]["function"]["arguments"]) == ("length", '{"city": "Ro')
    assert joined(await chunks_of(client, asked))["calls"] == [["weather", '{"city": "Ro']]


async def test_a_stop_string_ends_a_call_and_logprobs_count_every_token(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    await cluster.add(Role.MIXED)
    cluster.says = call(ROME)
    chunks = await chunks_of(client, {**ASKED, "logprobs": True, "stop": ["</tool_call>"]})
    assert joined(chunks)["calls"] == [["weather", ROME]]
    assert joined(chunks)["finish_reason"] == "tool_calls"
    entries = [entry for chunk in chunks for entry in (chunk["logprobs"] or {"content": []})["content"]]
    assert "".join(entry["token"] for entry in entries).encode("latin1").decode() == call(ROME)


async def test_reasoning_has_fields_of_its_own(cluster: "Cluster") -> None:
    await cluster.add(Role.MIXED)
    syntax = replace(cluster.text.syntax, thoughts=thoughts_named("think"))
    cluster.router.text = replace(cluster.text, syntax=syntax)
    async with client_of(cluster) as client:
        cluster.says = f"<think>\nHm.\n</think>\n\n{call(ROME)}"
        body = await body_of(client, ASKED)
        assert (body["reasoning_content"], body["reasoning"], body["content"]) == ("Hm.", "Hm.", None)
        assert len(body["tool_calls"]) == 1
        stream = joined(await chunks_of(client, ASKED))
        assert (stream["reasoning_content"], stream["content"]) == ("Hm.", "")
        assert stream["calls"] == [["weather", ROME]]
        del body["finish_reason"]
        back = {**ASKED, "messages": [*ASKED["messages"], body], "max_tokens": 2}
        assert (await body_of(client, back))["finish_reason"] == "length"


def client_of(cluster: "Cluster") -> httpx.AsyncClient:
    transport = httpx.ASGITransport(create_app(cluster.router), raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://router")
