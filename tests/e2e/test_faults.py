"""What clients see, and what is left behind, when clients leave and workers die."""

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import product
from pathlib import Path
from random import Random

import httpx
import pytest

from crossdock.core.messages import Rejected, Revoke

from .clients import Json, complete, complete_for, crowd
from .conftest import Serve
from .load import strike_under_load
from .questions import VOCAB_SIZE, Question, random_questions
from .rogue import NUM_BLOCKS, NUM_GROUPS, NUM_KINDS_OF_NONSENSE, Rogue, babble
from .server import Scrape, Server, listening_ports, serving

LONGEST_PROMPT = 600
NUM_TOKENS = 96


@pytest.fixture(scope="module")
def questions(small_model: Path) -> Sequence[Question]:
    return random_questions(small_model, 12, LONGEST_PROMPT, NUM_TOKENS)


@pytest.fixture(scope="module")
def pair(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One prefill and one decode worker with little room, so that KV is nearly always on its way."""
    log = tmp_path_factory.mktemp("pair") / "server.log"
    with serving(small_model, log, "--transports", "tcp", "--num-blocks", "96", "--chunk-tokens", "64") as server:
        yield server


# --- clients that leave ----------------------------------------------------------------------------

NUM_CLIENTS = 300
MAX_HALVES = 4
"""An allocator may take one more step late; what leaks grows with every half."""
ALLOWED_GROWTH_BYTES = 2 << 20
"""Of any process, in the second half of the clients: half of what their requests weigh."""
BAGGAGE: Json = {"logit_bias": {str(token_id): 0 for token_id in range(VOCAB_SIZE)}}
"""Does nothing but to make a request weigh some 25 KiB, so that one that is not forgotten shows."""
THRIFT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "24",
}
"""glibc gives back at once what is freed (mallopt(3)), oneDNN keeps few kernels: what grows then is a leak."""
STAGES = {
    "queued at prefill": ("requests_waiting", "prefill"),
    "computing": ("requests_running", "prefill"),
    "waiting for decode": ("requests_kept", "prefill"),
    "arriving at decode": ("requests_arriving", "decode"),
    "decoding": ("requests_running", "decode"),
}


async def visit(questions: Sequence[Question], number: int, client: httpx.AsyncClient) -> str | None:
    """Client ``number`` asks and, mostly, leaves at some stage; what is wrong with the answer of one who stays."""
    random = Random(number)
    max_tokens, is_stream = random.randint(2, NUM_TOKENS), random.random() < 0.5
    prompt = [random.randrange(VOCAB_SIZE) for _ in range(random.randint(1, LONGEST_PROMPT))]
    body = Question(prompt, [], questions[0].text_model).body(max_tokens, stream=is_stream) | BAGGAGE
    match number % 5:
        case 0:
            question = random.choice(questions)
            answer = await complete(client, question.body(max_tokens, stream=is_stream))
            return answer.error or question.fault_of(answer, max_tokens)
        case 1:
            await complete_for(client, body, random.uniform(0, 0.03))
        case 2:
            await complete_for(client, body, random.uniform(0, 2))
        case 3:
            await complete(client, body | {"stream": True}, max_events=1)
        case 4:
            await complete(client, body | {"stream": True}, max_events=random.randint(2, 20))
    return None


async def stages_seen(server: Server, seen: set[str]) -> None:
    """Watch, until cancelled, which stages workers say that requests are in."""
    while True:
        scrape = await asyncio.to_thread(server.scrape)
        seen.update(stage for stage, (table, role) in STAGES.items() if scrape.worker(table, role=role))
        await asyncio.sleep(0.2)


async def visits(server: Server, questions: Sequence[Question], numbers: range, seen: set[str]) -> list[str]:
    watch = asyncio.create_task(stages_seen(server, seen))
    faults = await crowd(server.url, [partial(visit, questions, number) for number in numbers], num_at_once=32)
    watch.cancel()
    return [fault for fault in faults if fault]


async def warm_up(server: Server, question: Question) -> None:
    """Steps of all sizes: torch keeps something for each."""

    async def visit(num_tokens: int, client: httpx.AsyncClient) -> None:
        await complete(client, question.body(24, stream=False) | {"prompt": [num_tokens] * num_tokens})

    await crowd(server.url, [partial(visit, num_tokens) for num_tokens in range(1, 65)], num_at_once=64)


def grown_since(before: dict[str, int], after: dict[str, int]) -> dict[str, int]:
    """Processes that took more memory than an allocator does by chance, and how much."""
    growth = {name: after[name] - before[name] for name in after}
    return {name: grown for name, grown in growth.items() if grown > ALLOWED_GROWTH_BYTES}


@pytest.mark.parametrize("transport", ["shm", pytest.param("tcp", marks=pytest.mark.full)])
def test_clients_that_leave_at_any_stage_leave_nothing_behind(
    transport: str, small_model: Path, serve: Serve, questions: Sequence[Question], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in THRIFT.items():
        monkeypatch.setenv(name, value)
    server = serve(small_model, "--transports", transport, "--num-blocks", "64", "--chunk-tokens", "64")
    asyncio.run(warm_up(server, questions[0]))
    seen: set[str] = set()
    resident_bytes = []
    for half in range(MAX_HALVES):
        numbers = range(half * NUM_CLIENTS // 2, (half + 1) * NUM_CLIENTS // 2)
        assert asyncio.run(visits(server, questions, numbers, seen)) == []
        server.wait_until_nothing_is_left(20)
        resident_bytes.append(server.resident_bytes())
        if half > 0 and not grown_since(*resident_bytes[-2:]):
            break
    assert seen == set(STAGES)
    assert grown_since(*resident_bytes[-2:]) == {}


def test_nobody_goes_on_for_clients_that_have_left(pair: Server) -> None:
    before = pair.settled()
    bodies: list[Json] = [
        {"prompt": [number] * num_prompt, "max_tokens": 1500 - num_prompt, "ignore_eos": True, "stream": stream}
        for number, (num_prompt, stream) in enumerate(product((10, 700), (False, True, True)), start=1)
    ]
    answers = asyncio.run(
        crowd(pair.url, [partial(complete_for, body=body, seconds=1) for body in bodies], len(bodies))
    )
    assert answers == [None] * len(bodies)
    pair.wait_for(lambda: not pair.scrape().unfinished, 4)
    ended = [scrape.total("vllm:request_success_total", finished_reason="abort") for scrape in (before, pair.scrape())]
    assert ended[1] - ended[0] == len(bodies)


# --- workers that die ------------------------------------------------------------------------------


def kill(server: Server, role: str) -> None:
    """And wait until a new worker is in the place of the old one."""
    num_deaths, pids = server.num_deaths, server.worker_pids(role)
    os.kill(pids[0], signal.SIGKILL)
    server.wait_for(lambda: server.num_deaths == num_deaths + 1, 10)
    server.wait_for(lambda: server.is_healthy and len(server.worker_pids(role)) == len(pids), 40)


def freeze(server: Server, role: str) -> None:
    """Until it is declared dead; then it goes on as if nothing had been."""
    num_deaths, [pid] = server.num_deaths, server.worker_pids(role)
    os.kill(pid, signal.SIGSTOP)
    try:
        server.wait_for(lambda: server.num_deaths == num_deaths + 1, 10)
    finally:
        os.kill(pid, signal.SIGCONT)
    server.wait_for(lambda: server.is_healthy, 10)
    assert server.worker_pids(role) == [pid]


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("strike", [kill, freeze])
def test_the_death_of_a_worker_costs_no_more_than_the_requests_on_it(
    strike: Callable[[Server, str], None], role: str, pair: Server, questions: Sequence[Question]
) -> None:
    load = asyncio.run(strike_under_load(pair, questions, partial(strike, pair, role)))
    assert load.faults == []
    assert load.errors or role == "prefill"  # of which a request may need no more than was sent, or start again
    pair.wait_until_nothing_is_left(30)
    assert pair.scrape().worker("accepting") == 2


@pytest.fixture(scope="module")
def two_pairs(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("two_pairs") / "server.log"
    flags = ("--prefill", "2", "--decode", "2", "--num-blocks", "64", "--chunk-tokens", "64")
    with serving(small_model, log, *flags) as server:
        server.wait_for(lambda: server.scrape().worker("links") == 4, 10)
        yield server


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_with_another_worker_left_only_streams_that_have_begun_are_lost(
    role: str, two_pairs: Server, questions: Sequence[Question]
) -> None:
    load = asyncio.run(strike_under_load(two_pairs, questions, partial(kill, two_pairs, role), num_clients=24))
    assert load.faults == []
    assert {answer.status for answer in load.errors} <= {200}
    assert two_pairs.scrape().total("crossdock:request_retries_total") > 0
    two_pairs.wait_until_nothing_is_left(30)
    assert two_pairs.scrape().worker("accepting") == 4


# --- what strangers send ---------------------------------------------------------------------------

NUM_ROUNDS = 20


def test_nobody_notices_a_worker_that_breaks_the_rules_of_transfers(
    small_model: Path, pair: Server, questions: Sequence[Question]
) -> None:
    def strike() -> None:
        pids = [pair.process.pid, *pair.worker_pids("prefill"), *pair.worker_pids("decode")]
        babble([port for pid in pids for port in listening_ports(pid) if port != pair.port], NUM_ROUNDS)
        with closing(Rogue(small_model, pair.control_address)) as rogue:
            break_every_rule(rogue)

    before = num_rejected(pair.settled())
    load = asyncio.run(strike_under_load(pair, questions, strike))
    assert (load.faults, load.errors) == ([], [])
    after = num_rejected(pair.wait_until_nothing_is_left(20))
    num_ports = {"prefill": 2, "decode": 2, "router": 1}
    num_nonsense = NUM_ROUNDS * NUM_KINDS_OF_NONSENSE
    assert {place: after[place] - before[place] for place in after} == {
        place: number * num_nonsense for place, number in num_ports.items()
    }


def num_rejected(scrape: Scrape) -> dict[str, float]:
    by_role = {role: scrape.worker("messages_rejected_total", role=role) for role in ("prefill", "decode")}
    return by_role | {"router": scrape.total("crossdock:messages_rejected")}


def break_every_rule(rogue: Rogue) -> None:
    """Each rule in a transfer of its own."""
    lease = rogue.reserved()
    rogue.push(lease, group=0, blocks=lease.blocks, num_missing_bytes=1)
    assert "bytes, not" in rogue.hear(Revoke).reason
    rogue.cancel(lease)
    lease = rogue.reserved()
    rogue.push(lease, group=0, blocks=[block ^ 1 for block in lease.blocks])
    assert rogue.hear(Revoke).reason == "a block was pushed that is not reserved"
    rogue.cancel(lease)
    lease = rogue.reserved()
    rogue.push(lease, group=NUM_GROUPS, blocks=lease.blocks)
    assert rogue.hear(Revoke).reason == f"layer groups {NUM_GROUPS} to {NUM_GROUPS + 1} do not exist"
    rogue.cancel(lease)
    lease = rogue.reserved()
    rogue.commit(lease, num_block_groups=1)
    assert rogue.hear(Rejected).reason == "1 block groups are committed, 6 blocks reserved"
    rogue.cancel(lease)
    for blocks_left_out, age in ((0, 1), (1, 0)):
        lease = rogue.reserved()
        for group in range(NUM_GROUPS):
            rogue.push(lease, group, lease.blocks[blocks_left_out:], age=age)
        rogue.commit(lease, NUM_GROUPS * NUM_BLOCKS)
        rogue.cancel(lease)
        rogue.commit(lease, NUM_GROUPS * NUM_BLOCKS)
        rogue.hear(Rejected)  # and not `Attached`
