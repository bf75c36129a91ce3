"""`crossdock serve`, `router` and `worker` in the hands of an operator."""

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import httpx
import pytest

from crossdock.deploy.launch import crossdock_command

from .answers import Json, ask, refusal
from .conftest import Serve
from .fleet import Fleet
from .questions import VOCAB_SIZE, Question, random_questions
from .server import Server, cpu_seconds, processes_with, serving

BLOCK_BYTES = 16384
"""Of the small model: 4 layers of K and V, 2 heads, 16 tokens, 16 numbers of 4 bytes."""
MAX_ROUTER_BYTES = 300 << 20
MAX_IDLE_SHARE = 0.05
"""Of one core, for all processes together."""


@pytest.fixture(scope="module")
def questions(small_model: Path) -> Sequence[Question]:
    return random_questions(small_model, num_questions=2, longest_prompt=100, num_tokens=24)


@pytest.fixture(scope="module")
def server(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving(small_model, tmp_path_factory.mktemp("operations") / "server.log") as server:
        yield server


@contextmanager
def long_stream(server: Server, num_tokens: int = 1000) -> Iterator[Iterator[Json]]:
    """The events of a stream that has begun and takes a while."""
    body = {"prompt": [7, 8, 9], "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    with server.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        events = (json.loads(line[6:]) for line in response.iter_lines() if line and line != "data: [DONE]")
        yield chain([next(events)], events)


def random_ids(num_tokens: int, seed: int) -> list[int]:
    return [seed, *((seed * 7919 + i * i) % VOCAB_SIZE for i in range(1, num_tokens))]


# --- the first token, and the second (D1) ----------------------------------------------------------


def test_one_token_is_one_token_and_nothing_is_shipped(server: Server, questions: Sequence[Question]) -> None:
    question, before = questions[1], server.settled()
    for stream in (False, True):
        answer = ask(server, **question.body(1, stream=stream))
        assert (answer.text, answer.only.finish_reason, answer.num_output) == (question.text(1), "length", 1)
    change = server.settled().changes_since(before)
    assert change("prompt_tokens_total") == 2 * len(question.prompt)
    assert [change(f"{name}_total") for name in ("transfers", "bytes_pushed", "output_tokens")] == [0, 0, 0]


def test_two_tokens_are_one_of_each_worker(server: Server, questions: Sequence[Question]) -> None:
    question, before = questions[1], server.settled()
    for stream in (False, True):
        answer = ask(server, **question.body(2, stream=stream))
        assert (answer.text, answer.only.finish_reason, answer.num_output) == (question.text(2), "length", 2)
    change = server.settled().changes_since(before)
    assert (change("transfers_total"), change("output_tokens_total")) == (2, 2)


@pytest.mark.parametrize("ends_by", ["end of sequence", "stop string"])
def test_a_first_token_that_ends_the_request_is_the_last(
    ends_by: str, server: Server, questions: Sequence[Question]
) -> None:
    question, before = questions[1], server.settled()
    end = {"stop": question.text(1)} if ends_by == "stop string" else {"logit_bias": {"319": 100}, "ignore_eos": False}
    for stream in (False, True):
        answer = ask(server, **question.body(20, stream=stream) | end)
        assert (answer.text, answer.only.finish_reason, answer.num_output) == ("", "stop", 1)
    change = server.settled().changes_since(before)
    assert change("transfer_failures_total") == 0
    assert change("output_tokens_total") <= (0 if ends_by == "end of sequence" else 38)


# --- prefix reuse ----------------------------------------------------------------------------------


def test_a_shared_prefix_is_neither_computed_nor_shipped_again(server: Server) -> None:
    shared = random_ids(512, seed=5)
    shipped = []
    for number in (1, 2):
        before = server.settled()
        answer = ask(server, prompt=shared + [number] * 20, max_tokens=4, temperature=0, ignore_eos=True)
        assert answer.usage is not None
        change = server.settled().changes_since(before)
        counts = [change(f"{name}_total") for name in ("blocks_pushed", "blocks_skipped", "bytes_pushed")]
        shipped.append((answer.usage["prompt_tokens_details"]["cached_tokens"], *counts))
    assert shipped == [(0, 34, 0, 34 * BLOCK_BYTES), (512, 2, 32, 2 * BLOCK_BYTES)]


# --- what never fits (E1) --------------------------------------------------------------------------


def test_what_the_pool_can_never_hold_is_refused_at_the_door_while_others_are_served(
    small_model: Path, serve: Serve, questions: Sequence[Question]
) -> None:
    server = serve(small_model, "--mixed", "1", "--num-blocks", "50")
    assert server.client.get("/v1/models").json()["data"][0]["max_model_len"] == 50 * 16
    with long_stream(server, num_tokens=700) as events:
        for _ in range(5):
            error = refusal(server, {"prompt": random_ids(1002, seed=1), "max_tokens": 16})
            assert (error["param"], error["code"]) == ("prompt", "context_length_exceeded")
            assert error["message"] == (
                "This model's maximum context length is 800 tokens. However, you requested 1018 tokens "
                "(1002 in the prompt, 16 in the completion)."
            )
        assert ask(server, **questions[1].body(16, stream=False)).text == questions[1].text(16)
        assert list(events)[-1]["choices"][0]["finish_reason"] == "length"
    assert "800 tokens" in refusal(server, {"prompt": [1] * 10, "max_tokens": 791})["message"]
    answer = ask(server, prompt=[1] * 10, max_tokens=790, temperature=0, ignore_eos=True)
    assert (answer.num_output, answer.only.finish_reason) == (790, "length")
    server.wait_until_nothing_is_left(10)


# --- starting --------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, list[str], float]:
    """Exit status, lines printed, and seconds until the end of a `crossdock` that must not stay."""
    begun = time.monotonic()
    ended = subprocess.run(
        crossdock_command(*arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=30
    )
    return ended.returncode, ended.stdout.splitlines(), time.monotonic() - begun


@pytest.mark.parametrize("command", ["serve", "router"])
def test_a_port_in_use_is_known_before_anything_is_loaded(command: str, small_model: Path, tmp_path: Path) -> None:
    model = tmp_path / "model_of_this_test"
    model.symlink_to(small_model)
    with socket.create_server(("127.0.0.1", 0)) as occupant:
        port = occupant.getsockname()[1]
        status, lines, seconds = run(command, str(model), "--port", str(port))
    assert (status, lines) == (2, [f"crossdock: cannot listen on 127.0.0.1:{port}: Address already in use"])
    assert seconds < 5
    assert processes_with(str(model)) == []


REFUSED_FLAGS = {
    "a model that is nowhere": ("serve", "nowhere"),
    "no such option": ("serve", "MODEL", "--speed", "9"),
    "an unknown dtype": ("serve", "MODEL", "--dtype", "float17"),
    "an unknown transport": ("serve", "MODEL", "--transports", "shm,smoke"),
    "a size that is none": ("worker", "MODEL", "--router", "tcp://127.0.0.1:1", "--kv-memory", "12q"),
    "an address that is none": ("worker", "MODEL", "--router", "somewhere"),
    "a pool without room": ("serve", "MODEL", "--port", "0", "--mixed", "1", "--kv-memory", "1K"),
}
REASONS = {
    "a model that is nowhere": "crossdock: model 'nowhere' is neither 'demo', a .gguf file, a folder with config.json, "
    "nor owner/name on the hub",
    "no such option": "No such option: --speed",
    "an unknown dtype": "'float17' is no dtype",
    "an unknown transport": "smoke is no transport; there are",
    "a size that is none": "'12q' is no size; write 256MiB or 2G",
    "an address that is none": "'somewhere' is no address; write tcp://host:port",
    "a pool without room": "crossdock: the pool would have 0 blocks of 16 tokens; give it more memory",
}


@pytest.mark.parametrize("fault", REFUSED_FLAGS)
def test_what_can_not_work_is_refused_in_one_line(fault: str, small_model: Path) -> None:
    arguments = [str(small_model) if argument == "MODEL" else argument for argument in REFUSED_FLAGS[fault]]
    status, lines, _ = run(*arguments)
    text = " ".join(line.strip(" │") for line in lines)
    assert (status, text.count(REASONS[fault]), text.count("Traceback")) == (2, 1, 0), text


# --- ending ----------------------------------------------------------------------------------------


@pytest.fixture
def own_model(small_model: Path, tmp_path: Path) -> Path:
    """A name for the small model by which the processes of one test are told from all others."""
    model = tmp_path / "model_of_this_test"
    model.symlink_to(small_model)
    return model


def is_gone(server: Server, model: Path, seconds: float) -> bool:
    """Whether all processes that serve this model end in time."""
    deadline = time.monotonic() + seconds
    while processes_with(str(model)) and time.monotonic() < deadline:
        server.process.poll()
        time.sleep(0.05)
    return not processes_with(str(model))


def test_sigterm_lets_streams_end_and_leaves_no_process(own_model: Path, serve: Serve) -> None:
    server = serve(own_model)
    with long_stream(server) as events:
        server.process.send_signal(signal.SIGTERM)
        server.wait_for(lambda: "draining" in server.log, 5)
        response = httpx.post(f"{server.url}/v1/completions", json={"prompt": [1], "max_tokens": 1})
        last = list(events)[-1]
    assert last["choices"][0]["finish_reason"] == "length"
    assert (response.status_code, response.json()["error"]["message"]) == (503, "the router is shutting down")
    assert is_gone(server, own_model, 15)
    assert server.process.wait(5) == 0
    assert "Traceback" not in server.log


def test_ctrl_c_twice_ends_streams_with_an_error_and_leaves_no_process(own_model: Path, serve: Serve) -> None:
    server = serve(own_model)
    with long_stream(server) as events:
        os.killpg(server.process.pid, signal.SIGINT)
        server.wait_for(lambda: "draining" in server.log, 5)
        os.killpg(server.process.pid, signal.SIGINT)
        *tokens, last = events
    assert last["error"]["message"] == "the router is shutting down"
    assert {event["choices"][0]["finish_reason"] for event in tokens} == {None}
    assert is_gone(server, own_model, 15)
    assert server.process.wait(5) == 0
    assert "Traceback" not in server.log


def test_workers_end_with_the_process_that_started_them(own_model: Path, serve: Serve) -> None:
    server = serve(own_model)
    assert len(processes_with(str(own_model))) == 3
    with long_stream(server):
        server.process.kill()
        server.process.wait(5)
    assert is_gone(server, own_model, 15)


# --- what it costs ---------------------------------------------------------------------------------


def test_the_router_has_no_torch_and_little_memory(server: Server) -> None:
    maps = Path(f"/proc/{server.process.pid}/maps").read_text()
    assert "torch" not in maps
    assert "uvloop" in maps
    memory = server.resident_bytes()
    assert memory["router"] < MAX_ROUTER_BYTES


def test_an_idle_server_sleeps(server: Server) -> None:
    pids = [server.process.pid, *server.worker_pids("prefill"), *server.worker_pids("decode")]
    server.settled()
    begun, before = time.monotonic(), sum(map(cpu_seconds, pids))
    while time.monotonic() < begun + 4:
        time.sleep(0.5)
    share = (sum(map(cpu_seconds, pids)) - before) / (time.monotonic() - begun)
    assert share <= MAX_IDLE_SHARE


# --- apart -----------------------------------------------------------------------------------------


@pytest.fixture
def fleet(small_model: Path, tmp_path: Path) -> Iterator[Fleet]:
    fleet = Fleet(small_model, tmp_path)
    yield fleet
    fleet.stop()


def test_workers_join_a_router_by_its_address_and_outlive_it(fleet: Fleet, questions: Sequence[Question]) -> None:
    question = questions[1]
    router = fleet.start_router()
    router.wait_for(lambda: router.health == 503, 10)
    prefill = fleet.start_worker("prefill")
    router.wait_for(lambda: router.scrape().worker("accepting") == 1, 20)
    assert router.health == 503
    decode = fleet.start_worker("decode")
    router.wait_for(lambda: router.is_healthy, 20)
    assert ask(router, **question.body(24, stream=False)).text == question.text(24)
    with long_stream(router) as events:
        router.process.kill()
        router.process.wait(5)
        with pytest.raises(httpx.RemoteProtocolError):
            list(events)
    router = fleet.start_router()
    router.wait_for(lambda: router.is_healthy, 20)
    assert ask(router, **question.body(24, stream=False)).text == question.text(24)
    router.wait_until_nothing_is_left(20)
    assert (prefill.poll(), decode.poll()) == (None, None)
    with long_stream(router) as events:
        decode.kill()
        *tokens, last = events
    assert {event["choices"][0]["finish_reason"] for event in tokens} == {None}
    assert "died" in last["error"]["message"]
    assert router.health == 503
    assert router.client.post("/v1/completions", json={"prompt": [1]}).status_code == 503
    fleet.start_worker("decode")
    router.wait_for(lambda: router.is_healthy, 20)
    assert ask(router, **question.body(24, stream=True)).text == question.text(24)
