"""The description of the API says what the server does."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from fastapi.routing import APIRoute, iter_route_contexts
from pydantic import BaseModel

from crossdock.core.messages import RequestFailed, Role
from crossdock.core.request import RequestId, TransferId
from crossdock.router.app import create_app
from crossdock.router.openai_answers import (
    ChatCompletion,
    ChatCompletionChunk,
    ErrorAnswer,
    ModelCard,
    ModelList,
    TextCompletion,
)

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import Cluster

Schema = dict[str, Any]
BODIES: dict[str, Schema] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "logprobs": True, "top_logprobs": 2},
    "/v1/completions": {"prompt": "hi", "logprobs": 2, "echo": True},
}
ANSWERS: dict[str, type[BaseModel]] = {"/v1/chat/completions": ChatCompletion, "/v1/completions": TextCompletion}
EVENTS: dict[str, type[BaseModel]] = {"/v1/chat/completions": ChatCompletionChunk, "/v1/completions": TextCompletion}


@pytest.fixture
def api(cluster: "Cluster") -> Schema:
    return create_app(cluster.router).openapi()


def values_of(key: str, inside: object) -> Iterator[object]:
    """Whatever stands under this key, at any depth."""
    if isinstance(inside, dict):
        yield from (value for name, value in inside.items() if name == key)
        for value in inside.values():
            yield from values_of(key, value)
    elif isinstance(inside, list):
        for value in inside:
            yield from values_of(key, value)


def operations(api: Schema) -> dict[str, Schema]:
    return {
        f"{method} {path}": operation for path, methods in api["paths"].items() for method, operation in methods.items()
    }


async def test_the_page_is_served_as_json(client: httpx.AsyncClient, api: Schema) -> None:
    assert (await client.get("/openapi.json")).json() == json.loads(json.dumps(api))


def test_every_route_is_described(cluster: "Cluster", api: Schema) -> None:
    app = create_app(cluster.router)
    routes = [context.route for context in iter_route_contexts(app.routes)]
    paths = {route.path_format for route in routes if isinstance(route, APIRoute)}
    assert set(api["paths"]) == paths
    assert {"/tokenize", "/detokenize", "/ready", "/version", "/docs", "/v1/models/{model}"} <= paths


def test_every_reference_leads_somewhere_and_no_name_is_used_twice(api: Schema) -> None:
    schemas = api["components"]["schemas"]
    references = {str(reference).removeprefix("#/components/schemas/") for reference in values_of("$ref", api)}
    assert references <= set(schemas)
    names = [operation["operationId"] for operation in operations(api).values()]
    assert len(set(names)) == len(names)


def test_every_error_has_the_one_form_and_every_endpoint_with_a_body_may_refuse_it(api: Schema) -> None:
    for name, operation in operations(api).items():
        assert operation["description"]
        assert "422" not in operation["responses"]
        for status, answer in operation["responses"].items():
            if status >= "400" and name not in ("get /ready", "get /health"):
                schema = answer["content"]["application/json"]["schema"]
                assert schema == {"$ref": "#/components/schemas/ErrorAnswer"}
        if "requestBody" in operation:
            assert {"200", "400", "401", "404", "413", "429", "500", "503", "504"} <= set(operation["responses"])
            assert "example" in operation["requestBody"]["content"]["application/json"]


async def test_the_examples_work(cluster: "Cluster", client: httpx.AsyncClient, api: Schema) -> None:
    await cluster.add(Role.MIXED)
    bodies = [
        (path, methods["post"]["requestBody"]["content"]["application/json"]["example"])
        for path, methods in api["paths"].items()
        if "requestBody" in methods.get("post", {})
    ]
    assert len(bodies) >= 5
    for path, body in bodies:
        assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("path", BODIES)
async def test_answers_are_as_described(cluster: "Cluster", client: httpx.AsyncClient, path: str) -> None:
    await cluster.add(Role.MIXED)
    ANSWERS[path].model_validate_json((await client.post(path, json=BODIES[path])).content)
    ModelList.model_validate_json((await client.get("/v1/models")).content)
    ModelCard.model_validate_json((await client.get("/v1/models/toy")).content)
    body = {**BODIES[path], "stream": True, "stream_options": {"include_usage": True}}
    streamed = await client.post(path, json=body)
    events = [line.removeprefix("data: ") for line in streamed.text.split("\n\n") if line]
    assert events.pop() == "[DONE]"
    assert len(events) > 5
    for event in events:
        EVENTS[path].model_validate_json(event)


async def test_errors_are_as_described(cluster: "Cluster", client: httpx.AsyncClient, api: Schema) -> None:
    body = BODIES["/v1/completions"]
    seen = [await client.post("/v1/completions", json=body)]
    (mixed,) = await cluster.add(Role.MIXED)
    seen += [
        await client.post("/v1/completions", json={**body, "n": 0}),
        await client.post("/v1/completions", json={**body, "model": "other"}),
        await client.post("/v1/completions", json={**body, "user": "x" * 20_000}),
        await client.get("/v1/models/other"),
    ]
    ids = (RequestId(""), TransferId(""))
    mixed.behaviour.fails_with = RequestFailed(
        request_id=ids[0], transfer_id=ids[1], reason="it broke", is_retryable=False
    )
    seen.append(await client.post("/v1/completions", json=body))
    assert [response.status_code for response in seen] == [503, 400, 404, 413, 404, 400]
    for response in seen:
        ErrorAnswer.model_validate_json(response.content)
