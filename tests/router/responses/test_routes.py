"""``/v1/responses`` over a whole router, whose workers are played, through the real client where it can say it."""

import asyncio
import json
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import openai as openai_package
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from crossdock.core.config import ResponsesConfig, RouterConfig
from crossdock.core.messages import RequestFailed, Role
from crossdock.core.request import Request, RequestId, TransferId, unpack_ids
from crossdock.router.responses.answers import ItemList, ResponseAnswer

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import Cluster, Wait

Json = dict[str, Any]
PAIR = (Role.PREFILL, Role.DECODE)
event_type: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


DEFAULTS: Json = {
    "object": "response",
    "status": "completed",
    "background": False,
    "conversation": None,
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "max_output_tokens": None,
    "max_tool_calls": None,
    "metadata": {},
    "model": "toy",
    "parallel_tool_calls": True,
    "previous_response_id": None,
    "prompt": None,
    "prompt_cache_key": None,
    "reasoning": {"effort": None, "summary": None},
    "safety_identifier": None,
    "service_tier": "default",
    "store": True,
    "temperature": 1.0,
    "text": {"format": {"type": "text"}, "verbosity": "medium"},
    "tool_choice": "auto",
    "tools": [],
    "top_logprobs": 0,
    "top_p": 1.0,
    "truncation": "disabled",
    "user": None,
}
"""What a response says that was asked for nothing but ``input``."""


class Prompts:
    """What the model reads, request by request, as text."""

    def __init__(self, cluster: "Cluster") -> None:
        self._cluster = cluster
        self.seen: list[str] = []

    def script(self, request: Request) -> list[int]:
        text = self._cluster.text.decode(unpack_ids(request.prompt).tolist(), skips_special=False)
        if text not in self.seen[-1:]:  # both legs ask
            self.seen.append(text)
        return self._cluster.script(request)


async def serving(cluster: "Cluster", *roles: Role) -> Prompts:
    prompts = Prompts(cluster)
    for worker in await cluster.add(*(roles or PAIR)):
        worker.behaviour.script = prompts.script
    return prompts


async def post(client: httpx.AsyncClient, **body: object) -> httpx.Response:
    return await client.post("/v1/responses", json=body)


def events_of(response: httpx.Response) -> list[Json]:
    assert response.headers["content-type"].startswith("text/event-stream")
    data = [block.split("\n")[1].removeprefix("data: ") for block in response.text.split("\n\n") if block]
    events = [json.loads(each) for each in data]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    for event in events:
        event_type.validate_python(event)
    return events


def error_of(response: httpx.Response) -> tuple[int, str | None, str | None]:
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]


# --- answers -----------------------------------------------------------------------------------


@pytest.mark.parametrize("roles", [PAIR, (Role.MIXED,)])
async def test_a_response_has_all_that_openai_documents(
    cluster: "Cluster", client: httpx.AsyncClient, roles: tuple[Role, ...]
) -> None:
    await cluster.add(*roles)
    answer = await post(
        client,
        model="toy",
        input="say hello",
        instructions="be brief",
        temperature=0.5,
        top_p=0.25,
        max_output_tokens=50,
        metadata={"a": "b"},
        user="u",
    )
    assert answer.status_code == 200
    response = answer.json()
    ResponseAnswer.model_validate(response)
    Response.model_validate(response)
    message = response["output"][0]
    usage = response["usage"]
    times = {key: response[key] for key in ("id", "created_at", "completed_at")}
    given = {"instructions": "be brief", "max_output_tokens": 50, "metadata": {"a": "b"}, "user": "u"}
    assert response == {
        **DEFAULTS,
        **times,
        **given,
        "temperature": 0.5,
        "top_p": 0.25,
        "output": [message],
        "usage": usage,
    }
    part = {"type": "output_text", "annotations": [], "logprobs": [], "text": "hello"}
    assert message == {
        "id": message["id"],
        "type": "message",
        "status": "completed",
        "role": "assistant",
        "content": [part],
    }
    assert usage == {
        "input_tokens": 33,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": 6,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 39,
    }
    assert response["id"].startswith("resp_")
    assert 0 <= response["completed_at"] - response["created_at"] <= 5


async def test_a_stream_tells_the_same_response_in_the_documented_order(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    await cluster.add(*PAIR)
    events = events_of(await post(client, input="say hello", stream=True))
    assert [event["type"] for event in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        *["response.output_text.delta"] * 5,
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    begun, last = events[0]["response"], events[-1]["response"]
    assert (begun["status"], begun["output"], begun["usage"]) == ("in_progress", [], None)
    whole = (await post(client, input="say hello")).json()
    differ = {key for key in whole if whole[key] != last[key]}
    assert differ <= {"id", "created_at", "completed_at", "output"}
    assert whole["output"][0]["content"] == last["output"][0]["content"]


async def test_the_client_accumulates_a_stream_to_what_is_kept(cluster: "Cluster", openai: AsyncOpenAI) -> None:
    await cluster.add(*PAIR)
    async with openai.responses.stream(model="toy", input="say hello") as stream:
        texts = [event.snapshot async for event in stream if event.type == "response.output_text.delta"]
        final = await stream.get_final_response()
    assert texts == ["h", "he", "hel", "hell", "hello"]
    assert final.output_text == "hello"
    kept = await openai.responses.retrieve(final.id)
    assert final.model_dump(exclude={"output"}) == kept.model_dump(exclude={"output"})
    assert [item.to_dict()["id"] for item in final.output] == [item.to_dict()["id"] for item in kept.output]


async def test_an_answer_that_was_cut_is_incomplete(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(*PAIR)
    whole = (await post(client, input="hi", max_output_tokens=3)).json()
    last = events_of(await post(client, input="hi", max_output_tokens=3, stream=True))[-1]
    assert last["type"] == "response.incomplete"
    for response in (whole, last["response"]):
        assert (response["status"], response["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
        assert response["completed_at"] is None
        assert response["output"][0]["status"] == "incomplete"
        assert response["output"][0]["content"][0]["text"] == "hel"
        assert response["usage"]["output_tokens"] == 3


async def test_logprobs_are_shown_where_they_are_included(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(*PAIR)
    include = ["message.output_text.logprobs"]
    response = (await post(client, input="hi", include=include, top_logprobs=2, max_output_tokens=1)).json()
    part = response["output"][0]["content"][0]
    assert part["logprobs"] == [{"token": "h", "logprob": -0.25, "bytes": [104], "top_logprobs": []}]
    assert response["top_logprobs"] == 2


# --- failures ----------------------------------------------------------------------------------


async def test_a_failure_before_the_first_token_is_an_http_error(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    (worker,) = await cluster.add(Role.MIXED)
    worker.behaviour.fails_with = RequestFailed(
        request_id=RequestId(""), transfer_id=TransferId(""), reason="it broke", is_retryable=False
    )
    for stream in (False, True):
        answer = await post(client, input="hi", stream=stream)
        assert (answer.status_code, answer.json()["error"]["message"]) == (400, "it broke")


async def test_a_failure_in_a_stream_is_an_error_and_a_failed_response_that_cannot_be_continued(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    for worker in await cluster.add(Role.MIXED, Role.MIXED):
        worker.behaviour.dies_after = 2
    events = events_of(await post(client, input="hi", stream=True))
    assert [event["type"] for event in events[-5:]] == [
        "error",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.failed",
    ]
    error, failed = events[-5], events[-1]["response"]
    assert (error["code"], error["param"]) == ("overloaded", None)
    assert (failed["status"], failed["error"]) == ("failed", {"code": "server_error", "message": error["message"]})
    assert failed["output"][0]["content"][0]["text"] == "he"
    assert (await client.get(f"/v1/responses/{failed['id']}")).json() == failed
    continued = await post(client, input="hi", previous_response_id=failed["id"])
    assert error_of(continued)[:2] == (400, "previous_response_id")


async def test_what_a_client_has_left_is_not_kept(cluster: "Cluster", client: httpx.AsyncClient, wait: "Wait") -> None:
    (worker,) = await cluster.add(Role.MIXED)
    worker.behaviour.seconds_a_token = 0.2
    asking = asyncio.create_task(post(client, input="hi"))
    await wait(lambda: worker.num_tasks == 1)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    await wait(cluster.is_empty)


# --- conversations -----------------------------------------------------------------------------


async def test_a_conversation_goes_on_as_if_it_had_been_sent_in_full(cluster: "Cluster", openai: AsyncOpenAI) -> None:
    prompts = await serving(cluster)
    first = await openai.responses.create(model="toy", input="one", instructions="be brief")
    second = await openai.responses.create(model="toy", input="two", previous_response_id=first.id)
    third = await openai.responses.create(
        model="toy", input=[{"role": "user", "content": "three"}], previous_response_id=second.id
    )
    said = [{"role": "user", "content": word} for word in ("one", "two", "three")]
    history: list[Any] = [said[0], *first.output, said[1], *second.output, said[2]]
    full = await openai.responses.create(model="toy", input=history, store=False)
    assert prompts.seen == [
        "system: be brief\nuser: one\n",
        "user: one\nassistant: hello\nuser: two\n",
        "user: one\nassistant: hello\nuser: two\nassistant: hello\nuser: three\n",
    ]
    assert third.previous_response_id == second.id
    assert full.usage is not None and third.usage is not None
    assert full.usage.input_tokens == third.usage.input_tokens


async def test_branches_of_one_conversation_know_nothing_of_each_other(cluster: "Cluster", openai: AsyncOpenAI) -> None:
    prompts = await serving(cluster)
    root = await openai.responses.create(model="toy", input="root")
    one = await openai.responses.create(model="toy", input="left", previous_response_id=root.id)
    await openai.responses.create(model="toy", input="right", previous_response_id=root.id)
    await openai.responses.create(model="toy", input="more", previous_response_id=one.id)
    start = "user: root\nassistant: hello\n"
    assert prompts.seen[1:] == [
        f"{start}user: left\n",
        f"{start}user: right\n",
        f"{start}user: left\nassistant: hello\nuser: more\n",
    ]


async def test_a_response_that_is_deleted_is_gone_but_its_branches_go_on(
    cluster: "Cluster", client: httpx.AsyncClient, openai: AsyncOpenAI
) -> None:
    prompts = await serving(cluster)
    root = await openai.responses.create(model="toy", input="root")
    branch = await openai.responses.create(model="toy", input="left", previous_response_id=root.id)
    deleted = await client.delete(f"/v1/responses/{root.id}")
    assert deleted.json() == {"id": root.id, "object": "response", "deleted": True}
    for method, path in [("GET", ""), ("DELETE", ""), ("GET", "/input_items"), ("POST", "/cancel")]:
        answer = await client.request(method, f"/v1/responses/{root.id}{path}")
        assert error_of(answer) == (404, "response_id", None)
    assert error_of(await post(client, input="x", previous_response_id=root.id)) == (
        400,
        "previous_response_id",
        "previous_response_not_found",
    )
    await openai.responses.create(model="toy", input="more", previous_response_id=branch.id)
    assert prompts.seen[-1] == "user: root\nassistant: hello\nuser: left\nassistant: hello\nuser: more\n"


async def test_input_items_are_those_of_the_conversation_page_by_page(cluster: "Cluster", openai: AsyncOpenAI) -> None:
    await serving(cluster)
    first = await openai.responses.create(model="toy", input="one")
    parts: list[Any] = [{"type": "input_text", "text": "two"}, {"type": "input_text", "text": "three"}]
    second = await openai.responses.create(
        model="toy",
        previous_response_id=first.id,
        input=[{"role": "user", "content": parts}, {"role": "user", "content": "four", "type": "message"}],
    )

    def texts(items: list[Any]) -> list[str]:
        return [part.text for item in items for part in item.content]

    newest = await openai.responses.input_items.list(second.id)
    assert texts(newest.data) == ["four", "two", "three", "hello", "one"]
    assert newest.has_next_page() is False
    pages = openai.responses.input_items.list(second.id, order="asc", limit=1)
    assert texts([item async for item in pages]) == ["one", "hello", "two", "three", "four"]
    assert [item.id async for item in pages] == [item.id for item in newest.data][::-1]


async def test_what_is_asked_of_a_list_is_checked(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await serving(cluster)
    path = f"/v1/responses/{(await post(client, input='one')).json()['id']}"
    page = (await client.get(f"{path}/input_items", params={"limit": 1})).json()
    ItemList.model_validate(page)
    after = await client.get(f"{path}/input_items", params={"after": page["last_id"]})
    assert after.json() == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}
    for query, param in [("limit=0", "limit"), ("order=up", "order"), ("after=msg_x", "after"), ("foo=1", "foo")]:
        assert error_of(await client.get(f"{path}/input_items?{query}"))[:2] == (400, param)
    for query, param in [
        ("stream=true", "stream"),
        ("include[]=a", "include[]"),
        ("starting_after=1", "starting_after"),
    ]:
        assert error_of(await client.get(f"{path}?{query}"))[:2] == (400, param)
    assert (await client.get(f"{path}?stream=false")).status_code == 200


async def test_a_response_that_was_not_made_in_the_background_cannot_be_cancelled(
    cluster: "Cluster", openai: AsyncOpenAI
) -> None:
    await serving(cluster)
    made = await openai.responses.create(model="toy", input="one")
    with pytest.raises(openai_package.BadRequestError, match="background"):
        await openai.responses.cancel(made.id)
    assert (await openai.responses.retrieve(made.id)).status == "completed"


# --- keeping -----------------------------------------------------------------------------------


async def test_what_is_not_to_be_stored_is_not(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await serving(cluster)
    made = (await post(client, input="one", store=False)).json()
    assert made["store"] is False
    assert error_of(await client.get(f"/v1/responses/{made['id']}")) == (404, "response_id", None)


@pytest.fixture
def config(config: RouterConfig, request: pytest.FixtureRequest) -> RouterConfig:
    """With the knobs that a test asks for."""
    knobs = getattr(request, "param", {})
    return replace(config, responses=ResponsesConfig(**knobs))


@pytest.mark.parametrize("config", [{"max_kept": 2}], indirect=True)
async def test_the_least_recently_used_response_makes_room(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await serving(cluster)
    ids = [(await post(client, input="one")).json()["id"] for _ in range(3)]
    statuses = [(await client.get(f"/v1/responses/{each}")).status_code for each in ids]
    assert statuses == [404, 200, 200]


@pytest.mark.parametrize("config", [{"max_bytes": 100}, {"max_kept": 0}], indirect=True)
async def test_a_response_says_that_it_is_not_kept_where_there_is_no_room(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    await serving(cluster)
    made = (await post(client, input="one")).json()
    assert made["store"] is False
    assert events_of(await post(client, input="one", stream=True))[-1]["response"]["store"] is False
    assert (await client.get(f"/v1/responses/{made['id']}")).status_code == 404


@pytest.mark.parametrize("config", [{"max_kept": 0}], indirect=True)
async def test_a_router_that_keeps_nothing_says_so_to_who_asks_for_it(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    await serving(cluster)
    assert error_of(await post(client, input="one", store=True)) == (400, "store", None)


# --- formats -----------------------------------------------------------------------------------


async def test_a_format_is_the_grammar_that_a_chat_with_it_has(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    seen: list[str] = []
    (worker,) = await cluster.add(Role.MIXED)

    def script(request: Request) -> list[int]:
        seen.append(request.params.grammar)
        return cluster.script(request)

    worker.behaviour.script = script
    schema = {"type": "object", "properties": {"a": {"type": ["integer", "null"], "default": None}}, "required": ["a"]}
    form = {"type": "json_schema", "name": "thing", "schema": schema, "strict": True}
    made = (await post(client, input="x", text={"format": form})).json()
    assert made["text"] == {"format": {**form, "description": None}, "verbosity": "medium"}
    await post(client, input="x", text={"format": {"type": "json_object"}})
    named = {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}
    for asked in (named, {"type": "json_object"}):
        body = {"messages": [{"role": "user", "content": "x"}], "response_format": asked}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
    assert seen[:2] == seen[2:] and all(seen)
    broken = {**form, "schema": {"type": "elephant"}}
    assert error_of(await post(client, input="x", text={"format": broken}))[:2] == (400, "text.format")


# --- truncation --------------------------------------------------------------------------------


async def test_truncation_drops_the_oldest_turns_until_the_rest_fits(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    prompts = await serving(cluster)
    turns = [{"role": "user", "content": f"{n}" * 100} for n in range(6)]
    body: Json = {"input": turns, "instructions": "short", "max_output_tokens": 10}
    refused = await post(client, **body)
    assert error_of(refused) == (400, "input", "context_length_exceeded")
    assert "in the input" in refused.json()["error"]["message"]
    made = (await post(client, **body, truncation="auto")).json()
    assert made["truncation"] == "auto"
    assert prompts.seen == ["system: short\n" + "".join(f"user: {str(n) * 100}\n" for n in (3, 4, 5))]
    huge = {"role": "user", "content": "x" * 500}
    assert error_of(await post(client, input=[huge], truncation="auto"))[2] == "context_length_exceeded"
    unlimited = await post(client, input=turns[:2], truncation="auto")
    assert unlimited.status_code == 200
    assert prompts.seen[-1].startswith("user: 000")
