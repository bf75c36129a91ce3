"""What whoever runs the server asks it: is it up, can it serve and if not why, which version."""

import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from crossdock.core.messages import Role
from crossdock.core.version import VERSION
from crossdock.router.openai_answers import Readiness

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import Cluster, Wait

NO_PREFILL, NO_DECODE = "no worker that prefills is here", "no worker that decodes is here"
NO_LINK = "no prefill worker has a working transport to a decode worker yet"


async def ready(client: httpx.AsyncClient) -> tuple[int, list[str], dict[str, int]]:
    response = await client.get("/ready")
    body = Readiness.model_validate_json(response.content)
    assert body.is_ready is (response.status_code == 200)
    assert (await client.get("/health")).status_code == response.status_code
    return response.status_code, body.reasons, body.workers


async def test_not_ready_until_both_roles_are_here_and_says_which_is_missing(
    cluster: "Cluster", client: httpx.AsyncClient, wait: "Wait"
) -> None:
    assert await ready(client) == (503, [NO_PREFILL, NO_DECODE], {"prefill": 0, "decode": 0, "mixed": 0})
    await cluster.add(Role.DECODE)
    await wait(lambda: len(cluster.dispatcher.fleet) == 1)
    assert await ready(client) == (503, [NO_PREFILL], {"prefill": 0, "decode": 1, "mixed": 0})
    await cluster.add(Role.PREFILL)
    assert await ready(client) == (200, [], {"prefill": 1, "decode": 1, "mixed": 0})


async def test_workers_without_a_transport_between_them_are_not_ready(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    prefill, _ = await cluster.add(Role.PREFILL, Role.DECODE)
    worker = cluster.dispatcher.fleet.find(prefill.mailbox.peer)
    assert worker is not None
    worker.links.clear()
    assert (await ready(client))[:2] == (503, [NO_LINK])


async def test_a_mixed_worker_alone_is_ready_until_it_drains(
    cluster: "Cluster", client: httpx.AsyncClient, wait: "Wait"
) -> None:
    (mixed,) = await cluster.add(Role.MIXED)
    assert (await ready(client))[0] == 200
    mixed.is_accepting = False
    await wait(lambda: not cluster.dispatcher.fleet.pairs())
    assert (await ready(client))[:2] == (503, [NO_PREFILL, NO_DECODE])


async def test_a_draining_router_says_so(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(Role.MIXED)
    await cluster.router.drain()
    assert (await ready(client))[:2] == (503, ["the router is shutting down"])


@pytest.mark.parametrize("path", ["/ready", "/version", "/health", "/metrics", "/docs"])
async def test_head_is_answered_wherever_get_is(cluster: "Cluster", client: httpx.AsyncClient, path: str) -> None:
    await cluster.add(Role.MIXED)
    head, refused = await client.head(path), await client.delete(path)
    assert (head.status_code, refused.status_code) == (200, 405)
    assert sorted(refused.headers["allow"].split(", ")) == ["GET", "HEAD"]


async def test_the_version_is_that_of_the_package(client: httpx.AsyncClient) -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert (await client.get("/version")).json() == {"version": project["version"]} == {"version": VERSION}
