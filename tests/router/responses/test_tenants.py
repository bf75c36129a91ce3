"""One key never sees the responses of another, not even where both are of one tenant."""

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from crossdock.core.config import RouterConfig
from crossdock.core.messages import Role
from crossdock.router.access.key_file import add_key
from crossdock.router.access.keys import KeyRecord, new_key

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import Cluster

KEYS = {name: new_key() for name in ("alice", "bob")}


@pytest.fixture
def config(config: RouterConfig, tmp_path: Path) -> RouterConfig:
    path = tmp_path / "keys.jsonl"
    for name, key in KEYS.items():
        add_key(path, KeyRecord(name=name, id="", salt="", digest="", tenant="shared").sealed(key))
    return replace(config, door=replace(config.door, api_keys=path))


def as_(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[name]}"}


async def test_a_response_is_there_for_the_key_that_made_it_alone(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    await cluster.add(Role.MIXED)
    made = await client.post("/v1/responses", json={"input": "my secret"}, headers=as_("alice"))
    path = f"/v1/responses/{made.json()['id']}"
    for method, end in [("GET", ""), ("GET", "/input_items"), ("POST", "/cancel"), ("DELETE", "")]:
        assert (await client.request(method, path + end, headers=as_("bob"))).status_code == 404
        assert (await client.request(method, path + end)).status_code == 401
    body = {"input": "tell me", "previous_response_id": made.json()["id"]}
    refused = await client.post("/v1/responses", json=body, headers=as_("bob"))
    assert refused.json()["error"]["code"] == "previous_response_not_found"
    assert (await client.post("/v1/responses", json=body, headers=as_("alice"))).status_code == 200
    assert (await client.get(path, headers=as_("alice"))).json() == made.json()
