"""What the router itself costs: one router process on one core, its workers played by stubs that compute nothing.

    python -P -m crossdock.benchmarks.router [STREAMS] [TOKENS_A_SECOND] [SECONDS]

The stubs send the next token of every open request at a fixed pace, as engines do: one message a step. Clients and
stubs share another core, so that what they cost is not counted. Printed are the streamed tokens a second, the
share of its core that the router took (and so the rate at which the core would be full), its memory, and the time
that it adds to the first token: from the client's request to the stub's task, and from the stub's token to the client.
"""

import asyncio
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

import orjson
import uvloop
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from crossdock.core.config import RouterConfig
from crossdock.core.kv_layout import KvLayout
from crossdock.core.mailbox import AsyncMailbox
from crossdock.core.messages import (
    Abort,
    Heartbeat,
    Hello,
    Incarnation,
    Peer,
    PoolBooks,
    PrefillTask,
    Role,
    TokenDelta,
    Tokens,
    WhoAreYou,
    WorkerCard,
    WorkerLoad,
)
from crossdock.core.request import RequestId
from crossdock.core.sequence import FinishReason
from crossdock.router.server import listen, serve_router
from crossdock.router.text import load_text

from .report import percentile
from .sse_client import HttpRequest, exchange

PROMPT_TOKENS = 256
VOCAB_SIZE = 257
SLOTS_A_STUB = 256
ROUTER_CORE, CLIENT_CORE = 0, 1

clock = time.perf_counter


@dataclass(slots=True)
class Open:
    """One request at a stub."""

    max_tokens: int
    num_sent: int = 0

    @property
    def is_done(self) -> bool:
        return self.num_sent == self.max_tokens


@dataclass(slots=True)
class Stub:
    """A mixed worker whose every step takes ``step_seconds`` and no work."""

    router: Peer
    step_seconds: float
    mailbox: AsyncMailbox
    requests: dict[RequestId, Open] = field(default_factory=dict)
    started: dict[str, float] = field(default_factory=dict)
    """When the first token of each request was asked for and sent, which is the same moment, by the client's id."""

    async def receive(self) -> None:
        while True:
            match (await self.mailbox.receive()).message:
                case WhoAreYou():
                    self.mailbox.send(self.router, Hello(card=CARD))
                case PrefillTask(request=request):
                    self.started[request.request_id.partition("-")[2].partition("-")[0]] = clock()
                    opened = self.requests[request.request_id] = Open(request.max_tokens)
                    self.mailbox.send(self.router, Tokens(deltas=[self._next(request.request_id, opened)]))
                case Abort(request_id):
                    self.requests.pop(request_id, None)

    async def step(self) -> None:
        next_at = clock()
        while True:
            next_at += self.step_seconds
            await asyncio.sleep(max(0.0, next_at - clock()))
            deltas = [self._next(request_id, opened) for request_id, opened in self.requests.items()]
            if deltas:
                self.mailbox.send(self.router, Tokens(deltas=deltas))
            self.requests = {name: opened for name, opened in self.requests.items() if not opened.is_done}

    async def beat(self) -> None:
        while True:
            books = PoolBooks(free=CARD.num_blocks, cached=0, leased=0, quarantined=0)
            self.mailbox.send(self.router, Heartbeat(load=WorkerLoad(books=books, num_running=len(self.requests))))
            await asyncio.sleep(1)

    def _next(self, request_id: RequestId, opened: Open) -> TokenDelta:
        index = opened.num_sent
        opened.num_sent += 1
        finish = FinishReason.LENGTH if opened.is_done else None
        return TokenDelta(request_id=request_id, index=index, token_id=40 + index % 50, finish=finish)


CARD = WorkerCard(
    role=Role.MIXED,
    model="stub",
    layout=KvLayout(num_layers=1, num_kv_heads=1, head_dim=64, block_size=16, dtype="float32"),
    num_blocks=1 << 20,
    max_model_len=1 << 20,
    vocab_size=VOCAB_SIZE,
    num_layer_groups=1,
)


@dataclass(slots=True)
class Tally:
    """What the clients saw."""

    num_tokens: int = 0
    num_open: int = 0
    first_tokens: list[float] = field(default_factory=list)

    async def stream(self, url: str, max_tokens: int, stubs: list[Stub]) -> None:
        """One streamed request, from its connection to its last event."""
        body = {"model": "stub", "prompt": "x" * PROMPT_TOKENS, "max_tokens": max_tokens, "stream": True}
        request = HttpRequest("POST", url + "/v1/completions", orjson.dumps(body | {"ignore_eos": True}))
        sent_at, has_token = clock(), False

        def on_body(data: bytes) -> None:
            nonlocal has_token
            if not has_token:
                has_token = True
                self.first_tokens.append(clock() - sent_at)
            self.num_tokens += data.count(b'"text"')

        self.num_open += 1
        status = await exchange(request, on_body)
        self.num_open -= 1
        assert status == 200, f"the router answered {status}"

    async def keep_open(self, url: str, max_tokens: int, stubs: list[Stub], delay: float) -> None:
        await asyncio.sleep(delay)
        while True:
            await self.stream(url, max_tokens, stubs)


def save_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer without merges: a token a character."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<eos>"}))


def be_router(folder: Path, told: Connection) -> None:
    """The measured process."""
    os.sched_setaffinity(0, {ROUTER_CORE})
    config = RouterConfig(model="stub", port=0, max_open_requests=1 << 16)
    listener = listen(config.host, config.port)
    mailbox = AsyncMailbox(config.control_host, config.control_port, Incarnation("router"))
    told.send((listener.getsockname()[1], mailbox.peer.address))
    serve_router(config, listener, mailbox, load_text(folder), asyncio.Event().wait)


@contextmanager
def router_process() -> Iterator[tuple[str, Peer, int]]:
    """The URL, the control address and the pid of a router that runs meanwhile."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        save_tokenizer(Path(folder))
        ours, theirs = context.Pipe()
        process = context.Process(target=be_router, args=(Path(folder), theirs))
        process.start()
        port, address = ours.recv()
        assert process.pid is not None
        yield f"http://127.0.0.1:{port}", Peer(address, Incarnation("router")), process.pid
        process.terminate()
        process.join()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


async def measure(url: str, router: Peer, pid: int, num_streams: int, rate: float, seconds: float) -> None:
    num_stubs = -(-num_streams // SLOTS_A_STUB)
    step_seconds = num_streams / rate
    stubs = [
        Stub(router, step_seconds, AsyncMailbox("127.0.0.1", 0, Incarnation(f"stub{n}"))) for n in range(num_stubs)
    ]
    work = [asyncio.create_task(task) for stub in stubs for task in (stub.receive(), stub.step(), stub.beat())]
    await asyncio.sleep(2)
    max_tokens = max(2, round(seconds / step_seconds))
    tally = Tally()
    ramp = step_seconds * max_tokens
    work += [
        asyncio.create_task(tally.keep_open(url, max_tokens, stubs, ramp * n / num_streams)) for n in range(num_streams)
    ]
    await asyncio.sleep(ramp + 1)
    tally.num_tokens, tally.first_tokens = 0, []
    began, cpu_before = clock(), cpu_seconds(pid)
    await asyncio.sleep(seconds)
    wall, cpu = clock() - began, cpu_seconds(pid) - cpu_before
    show(tally, wall, cpu, resident_mib(pid))
    for task in work:
        task.cancel()
    await asyncio.gather(*work, return_exceptions=True)
    for stub in stubs:
        stub.mailbox.close()


def show(tally: Tally, wall: float, cpu: float, mib: float) -> None:
    rate = tally.num_tokens / wall
    ordered = sorted(tally.first_tokens)
    print(f"{tally.num_open} open streams, {rate:.0f} tokens/s, {len(ordered) / wall:.1f} requests/s")
    print(f"router: {100 * cpu / wall:.0f} % of a core, full at {tally.num_tokens / cpu:.0f} tokens/s; {mib:.0f} MiB")
    if ordered:
        p50, p99 = (1000 * percentile(ordered, share) for share in (0.5, 0.99))
        print(f"added to the first token: {p50:.2f} ms at the median, {p99:.2f} ms at p99")


def main() -> None:
    given = [float(argument) for argument in sys.argv[1:]]
    num_streams, rate, seconds = [*given, *(1000.0, 10_000.0, 10.0)[len(given) :]]
    with router_process() as (url, router, pid):
        os.sched_setaffinity(0, {CLIENT_CORE})
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(measure(url, router, pid, int(num_streams), rate, seconds))


if __name__ == "__main__":
    main()
