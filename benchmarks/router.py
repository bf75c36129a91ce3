"""What the router itself costs: one router process on one core, its workers played by stubs that compute nothing.

    python -P -m crossdock.benchmarks.router [STREAMS] [TOKENS_A_SECOND] [SECONDS] [TOKENS_A_STREAM]

A second process holds the streams open and plays their workers: stubs that send the next token of each of their
requests at a fixed pace, one message a step, as engines do. The first process then asks for one token after the other
and answers itself, at once. In between it asks a server of its own that answers anything at once, which is what the
connection and the client take; what a token takes beyond that the router has added. Printed are the streamed tokens a
second, the share of its core that the router took, which tells at what rate the core would be full, and its memory at
the beginning and the end.

With TOKENS_A_STREAM a stream that ends is followed by another, as in a service, and nothing else is asked for. Without,
streams never end, and the ids that the router keeps of a stream for as long as it lives, 4 bytes each, add up.
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
from typing import cast

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
ENDLESS = 1_000_000
ROUTER_CORE, LOAD_CORE, PROBE_CORE = 0, 1, 2

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
    is_accepting: bool = True
    requests: dict[RequestId, Open] = field(default_factory=dict)

    async def receive(self) -> None:
        while True:
            match (await self.mailbox.receive()).message:
                case WhoAreYou():
                    self.mailbox.send(self.router, Hello(card=CARD))
                case PrefillTask(request=request):
                    opened = self.requests[request.request_id] = Open(request.max_tokens)
                    self.mailbox.send(self.router, Tokens(deltas=[self._next(request.request_id, opened)]))
                case Abort(request_id):
                    self.requests.pop(request_id, None)

    async def step(self) -> None:
        next_at = clock()
        while True:
            next_at += self.step_seconds
            await asyncio.sleep(max(0.0, next_at - clock()))
            self.requests = {name: opened for name, opened in self.requests.items() if not opened.is_done}
            deltas = [self._next(request_id, opened) for request_id, opened in self.requests.items()]
            if deltas:
                self.mailbox.send(self.router, Tokens(deltas=deltas))

    async def beat(self) -> None:
        while True:
            books = PoolBooks(free=CARD.num_blocks, cached=0, leased=0, quarantined=0)
            load = WorkerLoad(books=books, is_accepting=self.is_accepting, num_running=len(self.requests))
            self.mailbox.send(self.router, Heartbeat(load=load))
            await asyncio.sleep(0.5)

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
    max_num_seqs=64,
    vocab_size=VOCAB_SIZE,
    num_layer_groups=1,
)


def start_stub(router: Peer, name: str, step_seconds: float) -> tuple[Stub, list[asyncio.Task[None]]]:
    stub = Stub(router, step_seconds, AsyncMailbox("127.0.0.1", 0, Incarnation(name)))
    return stub, [asyncio.create_task(work) for work in (stub.receive(), stub.step(), stub.beat())]


def completion(url: str, max_tokens: int) -> HttpRequest:
    body = {"model": "stub", "prompt": "x" * PROMPT_TOKENS, "max_tokens": max_tokens, "stream": True}
    return HttpRequest("POST", url + "/v1/completions", orjson.dumps(body | {"ignore_eos": True}))


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
        try:
            yield f"http://127.0.0.1:{port}", Peer(address, Incarnation("router")), process.pid
        finally:
            process.terminate()
            process.join()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_mib(pid: int) -> float:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


@dataclass(frozen=True, slots=True)
class Load:
    """``rate`` is in tokens a second, of all streams together; ``stream_tokens`` is `ENDLESS` or how long one is."""

    num_streams: int
    rate: float
    seconds: float
    stream_tokens: int

    @property
    def is_endless(self) -> bool:
        return self.stream_tokens == ENDLESS


async def hold_streams(url: str, router: Peer, load: Load, told: Connection) -> None:
    """Open the streams, tell so, and from then on answer each question with the number of tokens received."""
    num_tokens = 0

    def on_body(data: bytes) -> None:
        nonlocal num_tokens
        num_tokens += data.count(b'"text"')

    async def stream() -> None:
        while await exchange(completion(url, load.stream_tokens), on_body) == 200:
            pass

    num_stubs = -(-load.num_streams // SLOTS_A_STUB)
    started = [start_stub(router, f"stub{n}", load.num_streams / load.rate) for n in range(num_stubs)]
    await asyncio.sleep(3)
    streams = []
    for _ in range(load.num_streams):
        streams.append(asyncio.create_task(stream()))
        await asyncio.sleep(0.005)
    await asyncio.sleep(2)
    for stub, _ in started:
        stub.is_accepting = not load.is_endless
    await asyncio.sleep(1)
    told.send(sum(len(stub.requests) for stub, _ in started))
    asyncio.get_running_loop().add_reader(told.fileno(), lambda: told.send(told.recv() or num_tokens))
    await asyncio.gather(*streams)


def be_load(url: str, router: Peer, load: Load, told: Connection) -> None:
    os.sched_setaffinity(0, {LOAD_CORE})
    os.nice(19)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(hold_streams(url, router, load, told))


class Bare(asyncio.Protocol):
    """A server that knows one answer."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.WriteTransport, transport)

    def data_received(self, data: bytes) -> None:
        self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")


async def probe(url: str, router: Peer, seconds: float) -> tuple[list[float], list[float]]:
    """Seconds from the request to the end of an answer of one token, and of an answer of `Bare`; both ascending."""
    _, tasks = start_stub(router, "probe", 1.0)
    bare = await asyncio.get_running_loop().create_server(Bare, "127.0.0.1", 0)
    bare_url = f"http://127.0.0.1:{bare.sockets[0].getsockname()[1]}"
    await asyncio.sleep(2)
    taken: tuple[list[float], list[float]] = [], []
    end = clock() + seconds
    while clock() < end:
        for target, times in zip((url, bare_url), taken, strict=True):
            began = clock()
            status = await exchange(completion(target, 1), lambda data: None)
            assert status == 200, f"{target} answered {status}"
            times.append(clock() - began)
            await asyncio.sleep(0.02)
    for task in tasks:
        task.cancel()
    bare.close()
    return sorted(taken[0]), sorted(taken[1])


def measure(url: str, router: Peer, pid: int, told: Connection, load: Load) -> None:
    """Print what the router does and costs while the load runs."""
    print(f"{told.recv()} open streams")
    mib_before = resident_mib(pid)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        began, cpu_before, tokens_before = clock(), cpu_seconds(pid), asked(told)
        if load.is_endless:
            taken, bare = runner.run(probe(url, router, load.seconds))
        else:
            time.sleep(load.seconds)
        tokens, cpu, wall = asked(told) - tokens_before, cpu_seconds(pid) - cpu_before, clock() - began
    print(f"{tokens / wall:.0f} tokens/s")
    print(f"router: {100 * cpu / wall:.0f} % of a core, full at {tokens / cpu:.0f} tokens/s")
    print(f"memory: {mib_before:.0f} MiB at the beginning, {resident_mib(pid):.0f} MiB after {wall:.0f} s")
    for name, share in (("median", 0.5), ("p99", 0.99)) if load.is_endless else ():
        whole, floor = (1000 * percentile(times, share) for times in (taken, bare))
        print(f"first token, {name}: {whole:.2f} ms, {floor:.2f} of it without a router, {whole - floor:.2f} added")


def asked(told: Connection) -> int:
    told.send(0)
    return int(told.recv())


def main() -> None:
    given = [float(argument) for argument in sys.argv[1:]]
    wanted = [*given, *(1000.0, 10_000.0, 10.0, float(ENDLESS))[len(given) :]]
    load = Load(int(wanted[0]), wanted[1], wanted[2], int(wanted[3]))
    os.sched_setaffinity(0, {min(PROBE_CORE, (os.cpu_count() or 1) - 1)})
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    with router_process() as (url, router, pid):
        process = context.Process(target=be_load, args=(url, router, load, theirs))
        process.start()
        try:
            measure(url, router, pid, ours, load)
        finally:
            process.terminate()
            process.join()


if __name__ == "__main__":
    main()
