"""The HTTP endpoints over a whole router, whose workers are played on real mailboxes."""

import asyncio
import json
from typing import TYPE_CHECKING

import httpx
import pytest

from crossdock.core.messages import RequestFailed, Role
from crossdock.core.request import Request, RequestId, TransferId

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import Cluster, Wait

Json = dict[str, object]


def failure(is_retryable: bool) -> RequestFailed:
    return RequestFailed(
        request_id=RequestId(""), transfer_id=TransferId(""), reason="it broke", is_retryable=is_retryable
    )


def events_of(response: httpx.Response) -> list[str]:
    assert response.headers["content-type"].startswith("text/event-stream")
    return [event.removeprefix("data: ") for event in response.text.split("\n\n") if event]


def chunks_of(response: httpx.Response) -> list[Json]:
    events = events_of(response)
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def text_of(chunks: list[Json], index: int = 0) -> str:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]  # type: ignore[attr-defined]
    mine = [choice for choice in choices if choice["index"] == index]
    return "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in mine)


def finishes_of(chunks: list[Json]) -> list[str]:
    choices = [choice for chunk in chunks for choice in chunk["choices"]]  # type: ignore[attr-defined]
    return [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]


def chat(**more: object) -> Json:
    return {"model": "toy", "messages": [{"role": "user", "content": "say hello"}], **more}


def completion(**more: object) -> Json:
    return {"model": "toy", "prompt": "say hello", **more}


def bodies(**more: object) -> list[tuple[str, Json]]:
    return [("/v1/chat/completions", chat(**more)), ("/v1/completions", completion(**more))]


PAIR = (Role.PREFILL, Role.DECODE)
YES = (("68", -1.0, "e"), ("82", -2.0, "s"))
"""Ids of the second and third token of "yes", what workers score them with, and their texts."""


# --- answers ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("roles", [PAIR, (Role.MIXED,)])
async def test_both_endpoints_answer_whole_and_streamed(
    cluster: "Cluster", client: httpx.AsyncClient, roles: tuple[Role, ...]
) -> None:
    await cluster.add(*roles)
    for path, body in bodies():
        whole = (await client.post(path, json=body)).json()
        assert text_of([{"choices": [{**c, "delta": c.get("message", {})} for c in whole["choices"]]}]) == "hello"
        assert whole["choices"][0]["finish_reason"] == "stop"
        assert whole["usage"]["completion_tokens"] == 6
        chunks = chunks_of(await client.post(path, json={**body, "stream": True}))
        assert (text_of(chunks), finishes_of(chunks)) == ("hello", ["stop"])
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert chunks[0]["id"] != whole["id"]
    assert cluster.is_empty()


@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {}}])
async def test_usage_is_streamed_only_to_those_who_ask(
    cluster: "Cluster", client: httpx.AsyncClient, options: Json
) -> None:
    await cluster.add(Role.MIXED)
    for path, body in bodies(stream=True, **options):
        chunks = chunks_of(await client.post(path, json=body))
        assert all(chunk.get("usage") is None and chunk["choices"] for chunk in chunks)
    for path, body in bodies(stream=True, stream_options={"include_usage": True}):
        chunks = chunks_of(await client.post(path, json=body))
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 6  # type: ignore[index]
    for path, body in bodies(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True}):
        chunks = chunks_of(await client.post(path, json=body))
        told = [chunk["usage"]["completion_tokens"] for chunk in chunks]  # type: ignore[index]
        assert told[0] == 1 and told == sorted(told) and told[-2:] == [6, 6]
    for path, body in bodies(stream=True, stream_options={"continuous_usage_stats": True}):
        refused = await client.post(path, json=body)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options.continuous_usage_stats")
    for path, body in bodies(stream=False, stream_options={"include_usage": True}):
        assert (await client.post(path, json=body)).status_code == 400


@pytest.mark.parametrize("roles", [PAIR, (Role.MIXED,)])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_limit_of_one_token_gives_one_token(
    cluster: "Cluster", client: httpx.AsyncClient, roles: tuple[Role, ...], stream: bool
) -> None:
    workers = await cluster.add(*roles)
    for limit, said, reason in ((1, "h", "length"), (2, "he", "length"), (20, "hello", "stop")):
        body = completion(max_tokens=limit, stream=stream)
        response = await client.post("/v1/completions", json=body)
        answer = chunks_of(response) if stream else [response.json()]
        assert (text_of(answer), finishes_of(answer)) == (said, [reason])
        assert cluster.is_empty()
    assert sum(worker.num_sent for worker in workers) == 1 + 2 + 6
    assert all(worker.aborted == [] for worker in workers)


async def test_a_first_token_that_ends_the_answer_is_the_whole_answer(
    cluster: "Cluster", client: httpx.AsyncClient, wait: "Wait"
) -> None:
    workers = await cluster.add(*PAIR)
    for worker in workers:
        worker.behaviour.seconds_a_token = 0.02
    cluster.says = ""
    whole = (await client.post("/v1/completions", json=completion())).json()
    assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == ("", "stop")
    assert whole["usage"]["completion_tokens"] == 1
    cluster.says = "x and more"
    whole = (await client.post("/v1/completions", json=completion(stop="x"))).json()
    assert (whole["choices"][0]["text"], whole["choices"][0]["finish_reason"]) == ("", "stop")
    await wait(lambda: all(worker.aborted for worker in workers))
    assert cluster.is_empty()


@pytest.mark.parametrize("stream", [False, True])
async def test_every_one_of_n_choices_is_complete(cluster: "Cluster", client: httpx.AsyncClient, stream: bool) -> None:
    [worker] = await cluster.add(Role.MIXED)
    lengths = {seed: 1 + seed % 7 for seed in range(1000)}
    seen: list[int] = []

    def unequal(request: Request) -> list[int]:
        seen.append(int(request.request_id.split("-")[2].split(".")[0]))
        return [*cluster.text.encode("x" * lengths[seen[-1]]).ids, 256]

    worker.behaviour.script = unequal
    requests = [client.post("/v1/completions", json=completion(n=4, stream=stream)) for _ in range(12)]
    for response in await asyncio.gather(*requests):
        answer = chunks_of(response) if stream else [response.json()]
        assert [text_of(answer, index) for index in range(4)] == ["x" * lengths[index] for index in range(4)]
        assert finishes_of(answer) == ["stop"] * 4
    assert cluster.is_empty()


async def test_repeated_messages_change_no_answer(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    for worker in await cluster.add(*PAIR):
        worker.behaviour.repeats_tokens = True
    whole = (await client.post("/v1/completions", json=completion())).json()
    assert (whole["choices"][0]["text"], whole["usage"]["completion_tokens"]) == ("hello", 6)


async def test_many_tokens_in_one_message_all_arrive(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    cluster.says = "abcdefghij" * 30
    for worker in await cluster.add(*PAIR):
        worker.behaviour.bundles_tokens = True
    chunks = chunks_of(await client.post("/v1/completions", json=completion(stream=True, max_tokens=390)))
    assert (text_of(chunks), finishes_of(chunks)) == (cluster.says, ["stop"])


async def test_a_prompt_is_scored_without_making_a_token(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(*PAIR)
    body = completion(prompt="yes", echo=True, logprobs=1, max_tokens=0)
    whole = (await client.post("/v1/completions", json=body)).json()
    assert whole["choices"][0]["text"] == "yes"
    assert whole["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0]
    assert whole["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("num_choices", [1, 3])
async def test_prompts_are_scored_by_token_id_as_vllm_does(
    cluster: "Cluster", client: httpx.AsyncClient, num_choices: int
) -> None:
    await cluster.add(*PAIR)
    scores = [None, *({token: {"logprob": p, "rank": None, "decoded_token": t}} for token, p, t in YES)]
    asking = {"prompt_logprobs": 0, "n": num_choices}
    whole = (await client.post("/v1/completions", json=completion(prompt=["yes", "yes"], **asking))).json()
    assert [choice["prompt_logprobs"] for choice in whole["choices"]] == [scores] * 2 * num_choices
    assert [choice["logprobs"] for choice in whole["choices"]] == [None] * 2 * num_choices
    echoed = (await client.post("/v1/completions", json=completion(prompt="yes", echo=True, **asking))).json()
    assert [(choice["text"][:3], choice["logprobs"]) for choice in echoed["choices"]] == [("yes", None)] * num_choices
    assert echoed["choices"][0]["prompt_logprobs"] == scores
    talk = (await client.post("/v1/chat/completions", json=chat(**asking))).json()
    assert len(talk["prompt_logprobs"]) == talk["usage"]["prompt_tokens"]
    assert "prompt_logprobs" not in talk["choices"][0]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"stream": True}, "'prompt_logprobs' is not allowed when 'stream' is true."),
        ({"echo": True, "logprobs": 2}, "'prompt_logprobs' differs from 'logprobs', which 'echo' shows."),
        ({"prompt_logprobs": 21}, "Invalid 'prompt_logprobs': Input should be less than or equal to 20. Got 21."),
        ({"prompt_logprobs": -1}, "Invalid 'prompt_logprobs': Input should be greater than or equal to 0. Got -1."),
    ],
)
async def test_scores_of_prompts_are_refused_where_they_cannot_be_shown(
    cluster: "Cluster", client: httpx.AsyncClient, more: Json, message: str
) -> None:
    await cluster.add(Role.MIXED)
    error = (await client.post("/v1/completions", json=completion(**{"prompt_logprobs": 1, **more}))).json()["error"]
    assert (error["param"], error["message"]) == ("prompt_logprobs", message)


# --- refusals --------------------------------------------------------------------------------------


async def test_without_a_pair_the_router_is_not_healthy_and_says_when_to_come_back(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    await cluster.add(Role.DECODE)
    assert (await client.get("/health")).status_code == 503
    for path, body in bodies():
        response = await client.post(path, json=body)
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.json()["error"]["message"] == "no pair of workers is ready"
    await cluster.add(Role.PREFILL)
    assert (await client.get("/health")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_more_requests_than_the_router_takes_are_refused(
    cluster: "Cluster", client: httpx.AsyncClient, stream: bool
) -> None:
    [worker] = await cluster.add(Role.MIXED)
    worker.behaviour.seconds_a_token = 0.05
    posts = [client.post("/v1/completions", json=completion(n=16, stream=stream)) for _ in range(6)]
    responses = await asyncio.gather(*posts)
    assert sorted(response.status_code for response in responses) == [200] * 4 + [503] * 2
    refused = next(response for response in responses if response.status_code == 503)
    assert refused.json()["error"]["message"] == "64 requests are open, the most is 64"
    assert cluster.is_empty()


async def test_more_choices_than_the_router_ever_takes_are_the_client_s_mistake(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    await cluster.add(Role.MIXED)
    response = await client.post("/v1/completions", json=completion(n=65))
    assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


async def test_a_body_beyond_the_limit_is_refused_in_openai_s_form(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    await cluster.add(Role.MIXED)
    response = await client.post("/v1/completions", json=completion(prompt="x" * 10_000))
    assert response.status_code == 413
    assert response.json()["error"]["message"] == "the request body is longer than 10000 bytes"


async def test_bad_requests_never_reach_a_worker(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    [worker] = await cluster.add(Role.MIXED)
    for path, body in bodies(stream=True, n=0):
        response = await client.post(path, json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")
    response = await client.post("/v1/completions", json=completion(model="other"))
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    response = await client.post("/v1/completions", json=completion(max_tokens=400))
    assert response.status_code == 400
    response = await client.post("/v1/completions", content=b"{", headers={"content-type": "application/json"})
    assert (response.status_code, response.json()["error"]["type"]) == (400, "invalid_request_error")
    assert worker.num_tasks == 0
    assert cluster.is_empty()


async def test_unknown_paths_and_methods_answer_in_openai_s_form(client: httpx.AsyncClient) -> None:
    assert (await client.get("/v1/nothing")).json()["error"]["type"] == "invalid_request_error"
    assert (await client.get("/v1/completions")).status_code == 405


async def test_a_method_that_is_not_there_hears_of_all_that_are(client: httpx.AsyncClient) -> None:
    for path, allowed in {
        "/v1/completions": "POST",
        "/v1/responses/x": "GET, HEAD, DELETE",
        "/health": "GET, HEAD",
    }.items():
        assert (await client.request("PATCH", path)).headers["allow"] == allowed


async def test_models_are_listed_and_found_by_name(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(Role.MIXED)
    listed = (await client.get("/v1/models")).json()
    [card] = listed["data"]
    assert (listed["object"], card["id"], card["object"], card["max_model_len"]) == ("list", "toy", "model", 400)
    assert (await client.get("/v1/models/toy")).json() == card
    missing = await client.get("/v1/models/org/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_metrics_tell_of_requests_and_workers(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(*PAIR)
    await client.post("/v1/completions", json=completion())
    lines = (await client.get("/metrics")).text.splitlines()
    assert 'vllm:generation_tokens_total{model_name="toy"} 6.0' in lines
    assert 'vllm:num_requests_running{model_name="toy"} 0.0' in lines
    assert sum(line.startswith('crossdock:worker_blocks{role="prefill",state="free"') for line in lines) == 1


# --- failures --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failing_pair_is_replaced_unseen(cluster: "Cluster", client: httpx.AsyncClient, stream: bool) -> None:
    broken, sound = await cluster.add(Role.MIXED, Role.MIXED)
    broken.behaviour.fails_with = failure(is_retryable=True)
    for _ in range(4):
        response = await client.post("/v1/completions", json=completion(stream=stream))
        answer = chunks_of(response) if stream else [response.json()]
        assert text_of(answer) == "hello"
    assert broken.num_tasks > 0
    assert sound.num_tasks == 4


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("is_retryable", "status", "num_tasks"), [(True, 503, 3), (False, 400, 1)])
async def test_a_failure_before_the_first_token_has_its_own_status(
    cluster: "Cluster", client: httpx.AsyncClient, stream: bool, is_retryable: bool, status: int, num_tasks: int
) -> None:
    [worker] = await cluster.add(Role.MIXED)
    worker.behaviour.fails_with = failure(is_retryable)
    response = await client.post("/v1/completions", json=completion(stream=stream))
    assert (response.status_code, response.json()["error"]["message"]) == (status, "it broke")
    assert worker.num_tasks == num_tasks
    assert cluster.is_empty()


async def test_a_decode_worker_that_dies_in_mid_stream_ends_it_with_an_error_event(
    cluster: "Cluster", client: httpx.AsyncClient, wait: "Wait"
) -> None:
    prefill, decode = await cluster.add(*PAIR)
    decode.behaviour.dies_after = 3
    events = events_of(await client.post("/v1/completions", json=completion(stream=True)))
    assert text_of([json.loads(event) for event in events[:-1]]) == "hel"
    assert json.loads(events[-1])["error"]["message"] == f"worker {decode.mailbox.peer.address} died"
    assert all(json.loads(event)["choices"][0]["finish_reason"] is None for event in events[:-1])
    assert (await client.get("/health")).status_code == 503
    await wait(lambda: len(prefill.aborted) == 1)
    decode.active.clear()
    assert cluster.is_empty()


async def test_a_decode_worker_that_dies_is_not_noticed_in_a_whole_answer_while_there_is_another(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    await cluster.add(Role.PREFILL)
    mortal, other = await cluster.add(Role.DECODE, Role.DECODE)
    mortal.behaviour.dies_after = 3
    answers = await asyncio.gather(*(client.post("/v1/completions", json=completion()) for _ in range(2)))
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["hello", "hello"]
    assert mortal.is_silent
    assert not other.is_silent


async def test_a_draining_worker_finishes_what_it_has_and_gets_no_more(
    cluster: "Cluster", client: httpx.AsyncClient, wait: "Wait"
) -> None:
    draining, other = await cluster.add(Role.MIXED, Role.MIXED)
    for worker in (draining, other):
        worker.behaviour.seconds_a_token = 0.05
    running = [asyncio.create_task(client.post("/v1/completions", json=completion())) for _ in range(4)]
    await wait(lambda: cluster.num_active() == 4)
    num_before = draining.num_tasks
    draining.is_accepting = False
    draining.beat()
    await wait(lambda: len(cluster.dispatcher.fleet.pairs()) == 1)
    more = [client.post("/v1/completions", json=completion()) for _ in range(4)]
    answers = [*await asyncio.gather(*running), *await asyncio.gather(*more)]
    assert [answer.json()["choices"][0]["text"] for answer in answers] == ["hello"] * 8
    assert (num_before, draining.num_tasks, other.num_tasks) == (2, 2, 6)


# --- many requests, one connection -----------------------------------------------------------------


async def test_after_many_requests_no_table_holds_any(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(*PAIR)
    for stream in (False, True):
        posts = [client.post("/v1/completions", json=completion(stream=stream)) for _ in range(50)]
        assert {response.status_code for response in await asyncio.gather(*posts)} == {200}
    assert cluster.is_empty()
    assert cluster.dispatcher.ledger._by_worker == {}


async def test_a_stream_over_a_real_connection_ends_with_the_connection_usable(
    cluster: "Cluster", address: tuple[str, int]
) -> None:
    await cluster.add(*PAIR)
    async with httpx.AsyncClient(base_url="http://{}:{}".format(*address)) as http:
        for _ in range(3):
            assert text_of(chunks_of(await http.post("/v1/completions", json=completion(stream=True)))) == "hello"


# --- the end ---------------------------------------------------------------------------------------


async def test_a_draining_router_refuses_new_requests_and_finishes_the_open_ones(
    cluster: "Cluster", client: httpx.AsyncClient, wait: "Wait"
) -> None:
    [worker] = await cluster.add(Role.MIXED)
    worker.behaviour.seconds_a_token = 0.02
    running = asyncio.create_task(client.post("/v1/completions", json=completion(stream=True)))
    await wait(lambda: cluster.num_active() == 1)
    draining = asyncio.create_task(cluster.router.drain())
    await asyncio.sleep(0)
    assert (await client.get("/health")).status_code == 503
    refused = await client.post("/v1/completions", json=completion())
    assert (refused.status_code, refused.json()["error"]["message"]) == (503, "the router is shutting down")
    await draining
    assert text_of(chunks_of(await running)) == "hello"


async def test_a_drain_that_takes_too_long_ends_the_rest_with_an_error(
    cluster: "Cluster", client: httpx.AsyncClient, wait: "Wait"
) -> None:
    [worker] = await cluster.add(Role.MIXED)
    worker.behaviour.seconds_a_token = 0.2
    running = asyncio.create_task(client.post("/v1/completions", json=completion(stream=True)))
    await wait(lambda: cluster.num_active() == 1)
    await cluster.router.drain()
    events = events_of(await running)
    assert json.loads(events[-1])["error"]["message"] == "the router is shutting down"
    await wait(cluster.is_empty)
