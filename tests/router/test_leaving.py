"""Clients that leave, and what requests leave behind."""

import asyncio
import gc
import json
import threading
from typing import TYPE_CHECKING

import httpx
import pytest

from crossdock.core.messages import Role
from crossdock.router.access.visit import Visit
from crossdock.router.app import MAX_COMPILING
from crossdock.router.ledger import Entry
from crossdock.router.output import OutputAssembler
from crossdock.router.prepare import PreparedRequest
from crossdock.router.streams import Reply, Stream

from .test_app import PAIR, Json, bodies, completion

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import Cluster, Wait


async def leave_after(address: tuple[str, int], body: Json, seconds: float, num_events: int = 0) -> bytes:
    """Post on a raw socket, close it after a while in which so many events came; what had come by then."""
    content = json.dumps(body).encode()
    headers = f"host: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n"
    reader, writer = await asyncio.open_connection(*address)
    writer.write(f"POST /v1/completions HTTP/1.1\r\n{headers}\r\n".encode() + content)
    await asyncio.sleep(seconds)
    events = [await reader.readuntil(b"data: ") for _ in range(num_events)]
    received = b"".join(events) + bytes(reader._buffer)  # type: ignore[attr-defined]
    writer.close()
    await writer.wait_closed()
    return received


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("roles", [PAIR, (Role.MIXED,)])
async def test_a_client_that_leaves_frees_everything_within_a_second(
    cluster: "Cluster", address: tuple[str, int], wait: "Wait", stream: bool, roles: tuple[Role, ...]
) -> None:
    workers = await cluster.add(*roles)
    cluster.says = "x" * 300
    for worker in workers:
        worker.behaviour.seconds_a_token = 0.02
    body = completion(max_tokens=300, ignore_eos=True, stream=stream)
    received = await leave_after(address, body, seconds=0.3, num_events=4 if stream else 0)
    assert stream or received == b""
    await wait(cluster.is_empty, seconds=1.0)
    num_sent = sum(worker.num_sent for worker in workers)
    await asyncio.sleep(0.1)
    assert sum(worker.num_sent for worker in workers) == num_sent
    assert all(len(worker.aborted) >= 1 for worker in workers)


@pytest.mark.parametrize("stream", [False, True])
async def test_clients_that_leave_while_they_wait_for_the_first_token_free_everything(
    cluster: "Cluster", address: tuple[str, int], client: httpx.AsyncClient, wait: "Wait", stream: bool
) -> None:
    prefill, _ = await cluster.add(*PAIR)
    prefill.behaviour.seconds_a_token = 60
    await asyncio.gather(*(leave_after(address, completion(stream=stream), seconds=0.2) for _ in range(50)))
    await wait(cluster.is_empty, seconds=1.0)
    prefill.behaviour.seconds_a_token = 0
    assert (await client.post("/v1/completions", json=completion())).json()["choices"][0]["text"] == "hello"


async def test_a_client_that_leaves_while_its_request_is_prepared_gives_no_worker_work(
    cluster: "Cluster", address: tuple[str, int], wait: "Wait"
) -> None:
    [worker] = await cluster.add(Role.MIXED)
    go_on = threading.Event()
    for _ in range(MAX_COMPILING):
        cluster.router._compiling.submit(go_on.wait)
    try:
        leaving = asyncio.create_task(leave_after(address, completion(guided_regex="a+"), seconds=0.2))
        await wait(lambda: len(cluster.router._streams) == 1)
        await leaving
    finally:
        go_on.set()
    await wait(lambda: not cluster.router._streams)
    assert worker.num_tasks == 0


OF_ONE_REQUEST = (Stream, Reply, Entry, OutputAssembler, PreparedRequest, Visit)


async def test_what_a_request_leaves_is_freed_without_the_garbage_collector(
    cluster: "Cluster", address: tuple[str, int], wait: "Wait"
) -> None:
    """Its full collections take a tenth of a second with a thousand streams open, so that they must be rare."""
    await cluster.add(*PAIR)
    cluster.says = "x" * 40
    posts = [*bodies(), *bodies(stream=True), *bodies(n=3), *bodies(stream=True, stop="x"), *bodies(max_tokens=-1)]
    gc.collect()
    gc.disable()
    try:
        async with httpx.AsyncClient(base_url="http://{}:{}".format(*address)) as http:
            for path, body in posts:
                assert (await http.post(path, json=body)).status_code == (400 if "max_tokens" in body else 200)
        await leave_after(address, completion(stream=True), seconds=0.1)
        await wait(lambda: not any(type(kept) in OF_ONE_REQUEST for kept in gc.get_objects()))
    finally:
        gc.enable()
