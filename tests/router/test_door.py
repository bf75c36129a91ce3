"""The door of a whole router, whose workers are played: keys, limits, tenants, priorities, deadlines, ids."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest
from starlette.types import Message

from crossdock.core.config import DoorConfig, RouterConfig
from crossdock.core.messages import Role
from crossdock.core.request import Request
from crossdock.router.access.access import Access
from crossdock.router.access.key_file import add_key, revoke_key
from crossdock.router.access.keys import KeyRecord, new_key
from crossdock.router.access.usage_report import Column, UsageRow, read_usage
from crossdock.router.app import MAX_COMPILING, create_app

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import Cluster, Wait

Json = dict[str, object]
KEYS = {name: new_key() for name in ("alice", "bob", "carol")}
RECORDS = [
    KeyRecord(name="alice", id="", salt="", digest="", requests_per_minute=4, max_concurrent=2, tokens_per_minute=100),
    KeyRecord(name="bob", id="", salt="", digest="", priority=5, most_urgent=2),
    KeyRecord(name="carol", id="", salt="", digest="", tenant="bob"),
]


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.jsonl"
    for record in RECORDS:
        add_key(path, record.sealed(KEYS[record.name]))
    return path


@pytest.fixture
def usage_db(tmp_path: Path) -> Path:
    return tmp_path / "usage.db"


@pytest.fixture
def config(config: RouterConfig, keys_file: Path, usage_db: Path) -> RouterConfig:
    door = DoorConfig(
        api_keys=keys_file,
        api_key="letmein",
        usage_db=usage_db,
        cors_origins=("https://page.example",),
        max_body_bytes=10_000,
    )
    return replace(config, door=door)


@pytest.fixture
async def client(cluster: "Cluster") -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(create_app(cluster.router), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        yield http


@pytest.fixture
def still(cluster: "Cluster", config: RouterConfig) -> None:
    """Time stands still for the limits, so that no bucket refills; for tests without deadlines, before ``client``."""
    cluster.router.access.close()
    cluster.router.access = Access(config.door, "toy", clock=lambda: 1000.0)


def of(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


async def complete(client: httpx.AsyncClient, who: dict[str, str], **more: object) -> httpx.Response:
    body = {"model": "toy", "prompt": "say hello", "max_tokens": 20, **more}
    return await client.post("/v1/completions", json=body, headers=who)


def error_of(response: httpx.Response) -> dict[str, str]:
    error: dict[str, str] = response.json()["error"]
    return error


# --- who comes in ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "who", [of("alice"), {"x-api-key": KEYS["bob"]}, {"authorization": "bearer letmein"}, {"x-api-key": " letmein "}]
)
async def test_a_key_opens_the_door(cluster: "Cluster", client: httpx.AsyncClient, who: dict[str, str]) -> None:
    await cluster.add(Role.MIXED)
    assert (await complete(client, who)).json()["choices"][0]["text"] == "hello"
    assert (await client.get("/v1/models", headers=who)).status_code == 200


@pytest.mark.parametrize(
    "who",
    [
        {},
        {"authorization": "Bearer"},
        {"authorization": "Bearer wrong"},
        {"authorization": "Basic letmein"},
        {"authorization": KEYS["alice"]},
        {"authorization": f"Bearer {KEYS['alice']}x"},
        {"authorization": "Bearer wrong", "x-api-key": "letmein"},
    ],
)
async def test_without_a_right_key_nothing_is_read_and_no_worker_hears_of_it(
    cluster: "Cluster", client: httpx.AsyncClient, who: dict[str, str]
) -> None:
    [worker] = await cluster.add(Role.MIXED)
    for response in (await complete(client, who, n="nonsense"), await client.get("/v1/models", headers=who)):
        assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        error = error_of(response)
        assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
        assert "wrong" not in response.text
    assert worker.num_tasks == 0


async def test_probes_and_metrics_need_no_key(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(Role.MIXED)
    assert [(await client.get(path)).status_code for path in ("/health", "/metrics")] == [200, 200]
    assert [(await client.get(path)).status_code for path in ("/health/", "/Health", "/nowhere")] == [401] * 3


async def test_a_key_added_or_revoked_counts_from_the_next_look_at_the_file(
    cluster: "Cluster", client: httpx.AsyncClient, keys_file: Path
) -> None:
    await cluster.add(Role.MIXED)
    key = new_key()
    add_key(keys_file, KeyRecord(name="dave", id="", salt="", digest="").sealed(key))
    revoke_key(keys_file, "bob")
    dave = {"authorization": f"Bearer {key}"}
    assert [(await complete(client, who)).status_code for who in (dave, of("bob"))] == [401, 200]
    await cluster.router.access.reload()
    assert [(await complete(client, who)).status_code for who in (dave, of("bob"))] == [200, 401]
    await asyncio.to_thread(keys_file.write_text, "nonsense")
    await cluster.router.access.reload()
    assert [(await complete(client, who)).status_code for who in (dave, of("bob"))] == [200, 401]


# --- limits of a key -------------------------------------------------------------------------------


async def test_requests_beyond_the_limit_are_told_when_to_come_back(
    cluster: "Cluster", still: None, client: httpx.AsyncClient
) -> None:
    [worker] = await cluster.add(Role.MIXED)
    responses = [await complete(client, of("alice"), max_tokens=1) for _ in range(5)]
    assert [response.status_code for response in responses] == [200] * 4 + [429]
    refused = responses[-1]
    assert (error_of(refused)["type"], error_of(refused)["code"]) == ("requests", "rate_limit_exceeded")
    assert refused.headers["retry-after"] == "15"
    assert KEYS["alice"] not in refused.text
    remaining = [response.headers["x-ratelimit-remaining-requests"] for response in responses]
    assert (remaining, refused.headers["x-ratelimit-limit-requests"]) == (["3", "2", "1", "0", "0"], "4")
    assert refused.headers["x-ratelimit-reset-requests"] == "60.000s"
    assert worker.num_tasks == 4
    assert (await client.get("/v1/models", headers=of("alice"))).status_code == 200
    assert (await complete(client, of("bob"))).status_code == 200


async def test_a_request_over_the_limit_is_refused_before_its_body_is_looked_at(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    statuses = [(await client.post("/v1/completions", content=b"{", headers=of("alice"))).status_code for _ in range(5)]
    assert statuses == [400] * 4 + [429]
    assert cluster.is_empty()


async def test_requests_at_a_time_are_limited_and_the_place_comes_back(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    [worker] = await cluster.add(Role.MIXED)
    worker.behaviour.seconds_a_token = 0.05
    responses = await asyncio.gather(*(complete(client, of("alice"), stream=True, max_tokens=3) for _ in range(3)))
    refused = [response for response in responses if response.status_code == 429]
    assert [(error_of(each)["type"], each.headers["retry-after"]) for each in refused] == [("concurrency", "1")]
    assert (await complete(client, of("alice"), max_tokens=1)).status_code == 200


async def test_tokens_are_reserved_before_the_work_and_settled_after_it(
    cluster: "Cluster", still: None, client: httpx.AsyncClient, wait: "Wait"
) -> None:
    [worker] = await cluster.add(Role.MIXED)
    worker.behaviour.seconds_a_token = 0.03
    running = asyncio.create_task(complete(client, of("alice"), max_tokens=80, stream=True))
    await wait(lambda: bool(worker.active))
    refused = await complete(client, of("alice"), max_tokens=20)
    assert (refused.status_code, error_of(refused)["type"]) == (429, "tokens")
    assert refused.headers["x-ratelimit-limit-tokens"] == "100"
    assert refused.headers["x-ratelimit-remaining-tokens"] == "11"
    assert (await running).headers["x-ratelimit-remaining-tokens"] == "11"
    after = await complete(client, of("alice"), max_tokens=70)
    assert (after.status_code, worker.num_tasks) == (200, 2)
    assert after.headers["x-ratelimit-remaining-tokens"] == "70"


async def test_a_prompt_that_no_waiting_would_let_in_is_the_client_s_mistake(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    [worker] = await cluster.add(Role.MIXED)
    response = await complete(client, of("alice"), prompt="x" * 101, max_tokens=1)
    assert (response.status_code, error_of(response)["code"]) == (400, "rate_limit_exceeded")
    assert error_of(response)["message"] == "The prompt has 101 tokens, the key 'alice' may use 100 a minute."
    assert worker.num_tasks == 0


async def test_refusals_for_want_of_capacity_give_everything_back(
    cluster: "Cluster", still: None, client: httpx.AsyncClient
) -> None:
    for _ in range(2):
        response = await complete(client, of("alice"))
        assert (response.status_code, response.headers["retry-after"]) == (503, "1")
        assert response.headers["x-ratelimit-remaining-tokens"] == "100"
    await cluster.add(Role.MIXED)
    assert (await complete(client, of("alice"))).status_code == 200


# --- what the key makes of a request ---------------------------------------------------------------


@pytest.fixture
async def heard(cluster: "Cluster") -> list[Request]:
    """What the workers were asked."""
    requests: list[Request] = []
    [worker] = await cluster.add(Role.MIXED)

    def listen(request: Request) -> list[int]:
        requests.append(request)
        return cluster.script(request)

    worker.behaviour.script = listen
    return requests


async def test_tenants_have_salts_of_their_own_which_no_caller_can_choose(
    client: httpx.AsyncClient, heard: list[Request]
) -> None:
    async def salt(who: dict[str, str], **more: object) -> bytes:
        assert (await complete(client, who, max_tokens=1, **more)).status_code == 200
        return heard[-1].salt

    bob, bob_x = await salt(of("bob")), await salt(of("bob"), cache_salt="x")
    others = [
        await salt(of("alice")),
        await salt(of("alice"), cache_salt="x"),
        await salt(of("alice"), cache_salt="bob"),
    ]
    assert len({bob, bob_x, *others}) == 5
    assert (await salt(of("carol")), await salt(of("carol"), cache_salt="x")) == (bob, bob_x)
    assert all(len(each) == 16 for each in (bob, bob_x, *others))


async def test_a_request_may_ask_for_a_priority_as_far_as_its_key_goes(
    client: httpx.AsyncClient, heard: list[Request]
) -> None:
    for asked, got in ((None, 5), (2, 2), (9, 9)):
        assert (await complete(client, of("bob"), priority=asked)).status_code == 200
        assert heard[-1].priority == got
    num_before = len(heard)
    refused = await complete(client, of("bob"), priority=1)
    assert (refused.status_code, error_of(refused)["param"], len(heard)) == (400, "priority", num_before)
    assert (await complete(client, of("carol"), priority=-1)).status_code == 400
    assert (await complete(client, of("carol"), priority=2**31)).status_code == 400


# --- ids, deadlines, bodies ------------------------------------------------------------------------


async def test_every_answer_carries_an_id_also_where_it_is_a_refusal(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    await cluster.add(Role.MIXED)
    mine = {"x-request-id": "mine:1/a"}
    for who, status in ((of("bob"), 200), ({}, 401), ({**of("bob"), "x-request-timeout": "soon"}, 400)):
        response = await complete(client, {**who, **mine})
        assert (response.status_code, response.headers["x-request-id"]) == (status, "mine:1/a")
    made = [(await client.get(path)).headers["x-request-id"] for path in ("/health", "/health", "/nowhere")]
    assert len(set(made)) == 3
    assert all(each.startswith("req_") for each in made)
    for bad in ("", "a b", "x" * 129, 'a"b'):
        response = await complete(client, {**of("bob"), "x-request-id": bad})
        assert (response.status_code, error_of(response)["param"]) == (400, "x-request-id")
        assert response.headers["x-request-id"].startswith("req_")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_out_of_time_before_its_first_token_is_a_504_and_ends_everywhere(
    cluster: "Cluster", client: httpx.AsyncClient, wait: "Wait", stream: bool
) -> None:
    workers = await cluster.add(Role.PREFILL, Role.DECODE)
    for worker in workers:
        worker.behaviour.seconds_a_token = 10
    response = await complete(client, {**of("bob"), "x-request-timeout": "0.1"}, stream=stream)
    assert (response.status_code, response.headers["x-should-retry"]) == (504, "false")
    assert (error_of(response)["code"], error_of(response)["message"]) == (
        "timeout",
        "the request took longer than 0.1 s",
    )
    await wait(cluster.is_empty, seconds=1.0)
    assert len(workers[0].aborted) == 1


async def test_a_stream_out_of_time_ends_with_an_error_event(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    [worker] = await cluster.add(Role.MIXED)
    worker.behaviour.seconds_a_token = 0.05
    cluster.says = "x" * 300
    response = await complete(client, {**of("bob"), "x-request-timeout": "0.8"}, stream=True, max_tokens=300)
    *chunks, last = [line for line in response.text.split("\n\n") if line]
    assert '"error":{"message":"the request took longer than 0.8 s","type":"server_error"' in last
    assert 1 <= len(chunks) <= 16
    assert '"finish_reason":null' in chunks[-1]


async def test_a_request_whose_time_is_over_before_its_grammar_is_compiled_is_a_504(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    await cluster.add(Role.MIXED)
    released = threading.Event()
    for _ in range(MAX_COMPILING):
        cluster.router._compiling.submit(released.wait)
    try:
        response = await complete(client, {**of("bob"), "x-request-timeout": "0.1"}, guided_regex="a+")
        assert (response.status_code, error_of(response)["code"]) == (504, "timeout")
        assert cluster.is_empty()
    finally:
        released.set()


async def test_a_body_that_does_not_come_in_time_is_a_408(client: httpx.AsyncClient) -> None:
    async def trickle() -> AsyncIterator[bytes]:
        yield b'{"prompt":'
        await asyncio.sleep(5)

    headers = {**of("alice"), "content-type": "application/json", "x-request-timeout": "0.1"}
    for _ in range(3):  # one more than alice may have at a time
        response = await client.post("/v1/completions", content=trickle(), headers=headers)
        assert (response.status_code, error_of(response)["message"]) == (
            408,
            "the request's body did not come within 0.1 s",
        )


class TestWithoutADeadline:
    @pytest.fixture
    def config(self, config: RouterConfig) -> RouterConfig:
        return replace(config, door=replace(config.door, body_timeout_seconds=0.2))

    async def test_a_body_that_does_not_come_is_a_408_too(self, client: httpx.AsyncClient) -> None:
        async def trickle() -> AsyncIterator[bytes]:
            while True:
                yield b" "
                await asyncio.sleep(0.01)

        headers = {**of("alice"), "content-type": "application/json"}
        response = await client.post("/v1/completions", content=trickle(), headers=headers)
        message = "the request's body did not come within 0.2 s"
        assert (response.status_code, error_of(response)["message"]) == (408, message)


async def test_a_client_that_leaves_within_its_body_gives_its_place_back(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    await cluster.add(Role.MIXED)
    sent: list[Message] = []

    async def leave() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(name.encode(), value.encode()) for name, value in of("alice").items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": headers}
    for _ in range(3):
        await create_app(cluster.router)(dict(scope), leave, send)
    assert sent == []
    assert (await complete(client, of("alice"))).status_code == 200


@pytest.mark.parametrize("asked", ["soon", "0", "-1", "nan", "inf", "1e9", ""])
async def test_a_timeout_that_is_none_is_refused(client: httpx.AsyncClient, asked: str) -> None:
    response = await complete(client, {**of("bob"), "x-request-timeout": asked})
    assert (response.status_code, error_of(response)["param"]) == (400, "x-request-timeout")


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt":' + b"[" * 101 + b"]" * 101 + b"}",
        b'{"a":' * 100_0,
        b"[" * 9_000,
        b'{"prompt":"\\ud800"}',
        b'{"prompt":"\xed\xa0\x80"}',
        b'{"\\ud800":1}',
        b'{"prompt":"\xff"}',
        b'{"prompt":' + b"9" * 5000 + b"}",
        b'{"prompt":1e999}',
        b"\x00",
        b"",
    ],
)
async def test_deep_lone_and_broken_bodies_are_400(cluster: "Cluster", client: httpx.AsyncClient, body: bytes) -> None:
    [worker] = await cluster.add(Role.MIXED)
    headers = {**of("bob"), "content-type": "application/json"}
    for path in ("/v1/completions", "/v1/chat/completions"):
        response = await client.post(path, content=body, headers=headers)
        assert response.status_code == 400
        assert error_of(response)["type"] == "invalid_request_error"
    assert worker.num_tasks == 0


# --- what is written down --------------------------------------------------------------------------


async def used_by(cluster: "Cluster", path: Path) -> dict[str, UsageRow]:
    await asyncio.to_thread(cluster.router.access.close)
    return {row.group[0]: row for row in read_usage(path, [Column.KEY])}


async def test_every_key_is_charged_what_its_clients_were_told(
    cluster: "Cluster", client: httpx.AsyncClient, usage_db: Path
) -> None:
    await cluster.add(Role.PREFILL, Role.DECODE)
    names = ["alice", "bob", "carol", "bob"]
    answers = await asyncio.gather(*(complete(client, of(name), n=2, max_tokens=4) for name in names))
    told = [answer.json()["usage"] for answer in answers]
    assert {(usage["prompt_tokens"], usage["completion_tokens"]) for usage in told} == {(9, 8)}
    for who in ({}, of("alice")):
        assert (await complete(client, who, n="nonsense")).status_code in (400, 401)
    rows = await used_by(cluster, usage_db)
    counts = {name: (row.requests, row.prompt_tokens, row.output_tokens) for name, row in rows.items()}
    assert counts == {"alice": (1, 9, 8), "bob": (2, 18, 16), "carol": (1, 9, 8)}


@pytest.mark.parametrize("stream", [False, True])
async def test_what_a_request_cost_that_came_to_no_end_is_charged_too(
    cluster: "Cluster", client: httpx.AsyncClient, usage_db: Path, stream: bool
) -> None:
    [worker] = await cluster.add(Role.MIXED)
    worker.behaviour.seconds_a_token = 0.05
    cluster.says = "x" * 300
    response = await complete(client, {**of("bob"), "x-request-timeout": "0.8"}, stream=stream, max_tokens=300)
    assert response.status_code == (200 if stream else 504)
    row = (await used_by(cluster, usage_db))["bob"]
    assert (row.requests, row.prompt_tokens) == (1, 9)
    assert 1 <= row.output_tokens <= 16
    assert not stream or row.output_tokens == response.text.count('"text"')


# --- web pages of other origins --------------------------------------------------------------------


async def test_a_preflight_needs_no_key_and_other_origins_get_none(client: httpx.AsyncClient) -> None:
    asks = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}
    allowed = await client.options("/v1/completions", headers={"origin": "https://page.example", **asks})
    assert (allowed.status_code, allowed.headers["access-control-allow-origin"]) == (200, "https://page.example")
    assert allowed.headers["access-control-allow-headers"] == "authorization,content-type"
    assert "POST" in allowed.headers["access-control-allow-methods"]
    assert allowed.headers["x-request-id"].startswith("req_")
    refused = await client.options("/v1/completions", headers={"origin": "https://other.example", **asks})
    assert (refused.status_code, "access-control-allow-origin" in refused.headers) == (400, False)


async def test_a_page_may_read_answers_and_refusals_with_their_headers(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    await cluster.add(Role.MIXED)
    page = {"origin": "https://page.example"}
    for who, status in ((of("alice"), 200), ({}, 401)):
        for stream in (False, True):
            response = await complete(client, {**who, **page}, stream=stream)
            assert (response.status_code, response.headers["access-control-allow-origin"]) == (status, page["origin"])
            exposed = response.headers["access-control-expose-headers"].split(", ")
            assert {"x-request-id", "retry-after", "x-ratelimit-remaining-tokens"} <= set(exposed)
    response = await complete(client, {**of("bob"), "origin": "https://other.example"})
    assert "access-control-allow-origin" not in response.headers
