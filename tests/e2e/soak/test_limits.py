"""Router, prefill and decode worker at the limits of each at once: nobody waits for anybody in a circle."""

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
import pytest

from ..conftest import Serve
from ..questions import Question, random_questions
from ..server import Scrape, Server
from .visitors import Visitors

MAX_OPEN = 24
NUM_CLIENTS = 32
NUM_BLOCKS = 48
FLAGS = (f"--max-open-requests={MAX_OPEN}", f"--num-blocks={NUM_BLOCKS}", "--chunk-tokens=64")
LIMIT_SECONDS = 30.0
FULL_SECONDS = 8.0
RECOVERY_SECONDS = 60.0

pytestmark = [pytest.mark.full, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def questions(small_model: Path) -> Sequence[Question]:
    """A prompt has about ten blocks: five fill a pool, and answers twice as long as a prompt's last block need more."""
    prompts = random_questions(small_model, 10, longest_prompt=240, num_tokens=96)
    return [question for question in prompts if len(question.prompt) > 60]


def is_full(scrape: Scrape) -> bool:
    """The prefill worker keeps KV for which the decode worker has no room, until it has none itself for what waits."""
    blocks = {role: scrape.worker("blocks", role=role, state="leased") for role in ("prefill", "decode")}
    waits = [
        scrape.worker("requests_kept", role="prefill"),
        scrape.worker("requests_waiting", role="prefill"),
        scrape.worker("requests_arriving", role="decode"),
    ]
    return min(waits) > 0 and blocks["prefill"] > 0.6 * NUM_BLOCKS and blocks["decode"] > 0.6 * NUM_BLOCKS


def refusal_of(server: Server, question: Question) -> httpx.Response | None:
    """What a client of a full router is told; ``None`` if there was room after all."""
    response = server.client.post("/v1/completions", json=question.body(1, stream=False))
    return response if response.status_code == 503 else None


def disturb_nobody(server: Server) -> None:
    time.sleep(FULL_SECONDS)


def slow_decode(server: Server) -> None:
    """It stands still again and again, never so long that it counts as dead."""
    [pid] = server.worker_pids("decode")
    for _ in range(3):
        os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        os.kill(pid, signal.SIGCONT)
        time.sleep(1.0)


def lose_decode(server: Server) -> None:
    num_deaths, [pid] = server.num_deaths, server.worker_pids("decode")
    os.kill(pid, signal.SIGKILL)
    server.wait_for(lambda: server.num_deaths > num_deaths, 10)
    server.wait_for(lambda: server.is_healthy, 40)


@pytest.mark.parametrize("disturb", [disturb_nobody, slow_decode, lose_decode])
def test_with_all_three_at_their_limits_some_are_refused_and_all_others_served(
    disturb: Callable[[Server], None], small_model: Path, serve: Serve, questions: Sequence[Question]
) -> None:
    server = serve(small_model, *FLAGS)
    visitors = Visitors(questions, server.url, NUM_CLIENTS, seed=5)
    try:
        server.wait_for(lambda: is_full(server.scrape()), LIMIT_SECONDS)
        refusals = [refusal for _ in range(20) if (refusal := refusal_of(server, questions[0]))]
        disturb(server)
        num_right = visitors.num_right
        server.wait_for(lambda: visitors.num_right >= num_right + NUM_CLIENTS, RECOVERY_SECONDS)
    finally:
        visitors.leave()
    assert visitors.faults == []
    assert refusals
    assert {refusal.headers["retry-after"] for refusal in refusals} == {"1"}
    refused = f"{MAX_OPEN} requests are open, the most is {MAX_OPEN}"
    assert visitors.errors[refused] > 0
    if disturb is not lose_decode:
        assert dict(visitors.errors) == {refused: visitors.errors[refused]}
    assert server.wait_until_nothing_is_left(30).unfinished == {}
