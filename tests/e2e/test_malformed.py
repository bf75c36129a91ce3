"""Whatever comes in: a 4xx or a closed connection, and nobody else notices."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import httpx
import pytest

from .malformed import CONNECTIONS, Malformed, connect, malformed_requests
from .models import chat_model
from .server import Server, serving

STORY = {"prompt": "a story", "max_tokens": 120, "temperature": 0, "ignore_eos": True, "stream": True}
GROWTH_BYTES = 24 << 20
"""More than that after the first round is kept for each of the following requests."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module", params=[(), ("--mixed", "1")], ids=["1P1D", "mixed"])
def server(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(model, tmp_path_factory.mktemp("logs") / "log", "--pooling", "last", *request.param) as server:
        yield server


def story(server: Server) -> str:
    """The bytes of a greedy stream, without what is different each time."""
    answer = httpx.post(f"{server.url}/v1/completions", json=STORY, timeout=60)
    events = [line for line in answer.text.splitlines() if line]
    assert (answer.status_code, events[-1]) == (200, "data: [DONE]")
    return "\n".join(event[event.index('"choices"') :] for event in events[:-1])


@contextmanager
def neighbour(server: Server) -> Iterator[None]:
    """Somebody reads the same stream again and again; none of them may differ."""
    expected, told, is_over = story(server), list[str](), threading.Event()

    def read() -> None:
        while not is_over.is_set():
            told.append(story(server))

    reader = threading.Thread(target=read)
    reader.start()
    try:
        yield
    finally:
        is_over.set()
        reader.join()
    assert told == [expected] * len(told)
    assert told


def send(client: httpx.Client, request: Malformed) -> int:
    headers = {"content-type": request.content_type}
    return client.post(request.path, content=request.body, headers=headers).status_code


def one_round(server: Server, seed: int) -> int:
    """Every malformed request and every broken connection once; how many."""
    random = Random(seed)
    requests = list(malformed_requests(random))
    random.shuffle(requests)
    with httpx.Client(base_url=server.url, timeout=60) as client:
        for request in requests:
            status = send(client, request)
            assert 400 <= status < 500, f"{status} for {request.path} {request.content_type} {request.body[:200]!r}"
    for behave in CONNECTIONS:
        connect(server.port, behave)
    return len(requests)


def test_malformed_requests_are_refused_and_their_neighbour_reads_on(server: Server, is_full: bool) -> None:
    with neighbour(server):
        assert one_round(server, 0) > 200
    server.settled()
    before = server.resident_bytes()
    with neighbour(server):
        for seed in range(1, 20 if is_full else 2):
            one_round(server, seed)
    server.settled()
    after = server.resident_bytes()
    assert {name: after[name] - before[name] for name in before if after[name] - before[name] > GROWTH_BYTES} == {}
    assert server.is_healthy
    assert server.num_deaths == 0
    assert "Traceback" not in server.log
