"""Bodies that are no JSON, or not what their endpoint takes, and long ones."""

import asyncio
import json
from typing import TYPE_CHECKING

import httpx
import pytest

from crossdock.core.config import DoorConfig, RouterConfig
from crossdock.core.messages import Role

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import Cluster

JSON = "application/json"
NOT_JSON = "The body must be JSON, with the header 'content-type: application/json'."
DIGITS = b'{"prompt": ' + b"1" * 5000 + b"}"


@pytest.fixture
def config() -> RouterConfig:
    return RouterConfig(model="toy", door=DoorConfig(max_body_bytes=8 << 20))


@pytest.mark.parametrize(
    ("data", "media_type", "message"),
    [
        (b"", JSON, "The body is missing."),
        (b"{}", "text/plain", NOT_JSON),
        (b"{}", "", NOT_JSON),
        (b"{}", "application/x-www-form-urlencoded", NOT_JSON),
        (b'{"prompt"', JSON, "The request body is no valid JSON: Expecting ':' delimiter."),
        (b'{"prompt": "\xff"}', JSON, "The request body is no valid JSON."),
        (DIGITS, JSON, "The request body is no valid JSON."),
        (b"[]", JSON, "Invalid 'body': Input should be a valid dictionary or instance of CompletionRequest. Got []."),
        (b"{}", JSON, "Missing required parameter: 'prompt'."),
        (b"{}", "application/vnd.api+json; charset=utf-8", "Missing required parameter: 'prompt'."),
        (b'{"prompt": "a"' + b" " * 20_000 + b"]", JSON, "The request body is no valid JSON: Expecting ',' delimiter."),
    ],
)
async def test_what_is_no_body_is_refused(
    client: httpx.AsyncClient, data: bytes, media_type: str, message: str
) -> None:
    response = await client.post("/v1/completions", content=data, headers={"content-type": media_type})
    assert (response.status_code, response.json()["error"]["message"]) == (400, message)


async def test_others_are_served_while_a_long_body_is_read(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    """150,000 messages take most of a second; a list of them in one piece is all that holds up others."""
    await cluster.add(Role.PREFILL, Role.DECODE)
    body = json.dumps({"messages": [{"role": "user", "content": "a"}] * 150_000}).encode()
    headers = {"content-type": JSON}
    long = asyncio.create_task(client.post("/v1/chat/completions", content=body, headers=headers))
    num_served = 0
    while not long.done():
        short = await client.post("/v1/completions", json={"prompt": "say hello", "max_tokens": 1})
        assert short.status_code == 200
        num_served += 1
    response = await long
    assert (response.status_code, response.json()["error"]["code"]) == (400, "context_length_exceeded")
    assert num_served > 1
