"""Workers that play their part by a script, on real mailboxes, and a toy model's text."""

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace

import httpx
import msgspec
import pytest
import uvicorn
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from crossdock.core.config import DoorConfig, RouterConfig
from crossdock.core.kv_layout import KvLayout
from crossdock.core.mailbox import AsyncMailbox
from crossdock.core.messages import (
    Abort,
    Heartbeat,
    Hello,
    Incarnation,
    Link,
    Message,
    Offer,
    Peer,
    Peers,
    PoolBooks,
    PrefillTask,
    PromptLogprobs,
    RequestFailed,
    Role,
    TokenDelta,
    Tokens,
    WhoAreYou,
    WorkerCard,
    WorkerLoad,
)
from crossdock.core.part import Delivery
from crossdock.core.request import Pooling, Request, RequestId, TokenLogprobs, TransferId
from crossdock.core.sequence import FinishReason
from crossdock.router.app import Router, create_app
from crossdock.router.dispatcher import Dispatcher
from crossdock.router.embedding import EmbeddingModel
from crossdock.router.metrics import RouterMetrics
from crossdock.router.server import listen
from crossdock.router.text import TextModel
from crossdock.router.tokenizer import TokenizerParts

NUM_BYTES = 256
EOS = NUM_BYTES
VOCAB_SIZE = NUM_BYTES + 1
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
CHAT_TEMPLATE = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="session")
def text() -> TextModel:
    """A model whose tokens are bytes: token id ``n`` is the ``n``-th byte in the alphabet's order, 256 ends.

    Its vectors may be cut to two numbers.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: n for n, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<eos>", special=True)])
    parts = TokenizerParts(tokenizer, {"eos_token": "<eos>"}, frozenset({EOS}), CHAT_TEMPLATE)
    embedding = EmbeddingModel(Pooling.LAST, normalizes=False, dimensions=(2,))
    return replace(TextModel.of(parts), embedding=embedding)


Script = Callable[[Request], list[int]]
"""The output of a request, in token ids; it is cut at ``max_tokens`` and at the first stop token."""


@dataclass
class Behaviour:
    """How a scripted worker plays; may be changed while it runs."""

    script: Script
    vector_of: Callable[[Request], bytes] = lambda request: array("f", [3.0, 4.0, request.num_prompt_tokens]).tobytes()
    seconds_a_token: float = 0.0
    fails_with: RequestFailed | None = None
    """Answer to a task instead of tokens; its ids are replaced by the task's."""
    repeats_tokens: bool = False
    bundles_tokens: bool = False
    """Send all tokens of a leg in one message."""
    dies_after: int | None = None
    """Falls silent, for good, before it sends the token of this index."""


@dataclass
class ScriptedWorker:
    """A worker that holds no model: a small real peer of the router's control plane.

    What prefill and decode say to each other is cut short: the `Offer` stands for the whole transfer.
    """

    role: Role
    router: Peer
    behaviour: Behaviour
    name: str = "worker"
    mailbox: AsyncMailbox = field(init=False)
    active: dict[RequestId, asyncio.Task[None]] = field(default_factory=dict)
    num_tasks: int = 0
    num_sent: int = 0
    aborted: list[RequestId] = field(default_factory=list)
    known: list[Peer] = field(default_factory=list)
    is_accepting: bool = True
    is_silent: bool = False
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.mailbox = AsyncMailbox("127.0.0.1", 0, Incarnation(f"{self.name}-{id(self):x}"))
        self._tasks = [asyncio.create_task(self._receive()), asyncio.create_task(self._beat())]

    @property
    def card(self) -> WorkerCard:
        return WorkerCard(
            role=self.role,
            model="toy",
            layout=LAYOUT,
            num_blocks=64,
            max_model_len=400,
            max_num_seqs=64,
            vocab_size=VOCAB_SIZE,
            num_layer_groups=1,
        )

    def send(self, to: Peer, message: Message) -> None:
        if not self.is_silent:
            self.mailbox.send(to, message)

    async def _beat(self) -> None:
        while True:
            self.beat()
            await asyncio.sleep(0.1)

    def beat(self) -> None:
        num_used = len(self.active)
        books = PoolBooks(free=64 - num_used, cached=0, leased=num_used, quarantined=0)
        load = WorkerLoad(books=books, is_accepting=self.is_accepting, num_running=num_used)
        self.send(self.router, Heartbeat(load=load))

    async def _receive(self) -> None:
        while True:
            self._handle(await self.mailbox.receive())

    def _handle(self, delivery: Delivery) -> None:
        if self.is_silent:
            return
        match delivery.message:
            case WhoAreYou():
                self.send(self.router, Hello(card=self.card))
            case Peers(workers):
                self._meet([info.peer for info in workers if info.card.role.decodes])
            case PrefillTask() as task:
                self._prefill(task)
            case Offer(transfer_id=_, request=request, router=router):
                for choice in request.choices:
                    self._start(choice, router, first=1)
            case Abort(request_id):
                self.aborted.append(request_id)
                if request_id in self.active:
                    self.active.pop(request_id).cancel()

    def _meet(self, decoders: list[Peer]) -> None:
        for peer in decoders:
            if self.role.prefills and peer not in self.known and peer != self.mailbox.peer:
                self.send(self.router, Link(to=peer.incarnation, transport="tcp", bytes_per_second=1e9))
        self.known = decoders

    def _prefill(self, task: PrefillTask) -> None:
        self.num_tasks += 1
        request = task.request
        failure = self.behaviour.fails_with
        if failure is not None:
            for choice in request.choices:
                ids = {"request_id": choice.request_id, "transfer_id": task.transfer_id}
                self.send(self.router, msgspec.structs.replace(failure, **ids))
            return
        if request.params.prompt_logprobs is not None:
            logprobs = [TokenLogprobs(-float(n)) for n in range(1, request.num_prompt_tokens)]
            self.send(self.router, PromptLogprobs(request_id=request.request_id, start=1, logprobs=logprobs))
        is_mine = task.decode == self.mailbox.peer
        for choice in request.choices:
            self._start(choice, self.router, first=0, end=None if is_mine else 1)
        if not is_mine and len(self._deltas(request)) > 1:
            offer = Offer(transfer_id=TransferId("t"), request=request, router=self.router)
            self.send(task.decode, offer)

    def _start(self, request: Request, router: Peer, first: int, end: int | None = None) -> None:
        self.active[request.request_id] = asyncio.create_task(self._play(request, router, first, end))

    async def _play(self, request: Request, router: Peer, first: int, end: int | None) -> None:
        deltas = self._deltas(request)[first:end]
        if self.behaviour.bundles_tokens:
            self.send(router, Tokens(deltas=deltas))
            deltas = []
        for delta in deltas:
            await asyncio.sleep(self.behaviour.seconds_a_token)
            if delta.index == self.behaviour.dies_after:
                self.is_silent = True
                return
            for _ in range(1 + self.behaviour.repeats_tokens):
                self.send(router, Tokens(deltas=[delta]))
            self.num_sent += 1
        self.active.pop(request.request_id, None)

    def _deltas(self, request: Request) -> list[TokenDelta]:
        output = self.behaviour.script(request)[: request.max_tokens]
        stops = (n + 1 for n, token_id in enumerate(output) if token_id in request.params.stop_token_ids)
        end = next(stops, None)
        finish = FinishReason.LENGTH if end is None else FinishReason.STOP
        ids: list[int | None] = [*output[:end]] or [None]
        has_logprobs = request.params.logprobs is not None
        return [
            TokenDelta(
                request_id=request.request_id,
                index=n,
                token_id=token_id,
                finish=finish if n == len(ids) - 1 else None,
                logprobs=TokenLogprobs(-0.25) if has_logprobs and token_id is not None else None,
                pooled=b"" if request.pooling is None else self.behaviour.vector_of(request),
            )
            for n, token_id in enumerate(ids)
        ]

    async def close(self) -> None:
        tasks = [*self._tasks, *self.active.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.mailbox.close()


@dataclass
class Cluster:
    """A router whose control plane runs, and its scripted workers."""

    router: Router
    mailbox: AsyncMailbox
    text: TextModel
    workers: list[ScriptedWorker] = field(default_factory=list)
    says: str = "hello"

    @property
    def dispatcher(self) -> Dispatcher:
        return self.router.dispatcher

    def script(self, request: Request) -> list[int]:
        """What every request is answered with, unless a worker is given another script."""
        return [*self.text.encode(self.says).ids, EOS]

    async def add(self, *roles: Role) -> list[ScriptedWorker]:
        """New workers, ready: joined, linked."""
        num_before = len(self.workers)
        for role in roles:
            name = f"{role.value}{len(self.workers)}"
            self.workers.append(ScriptedWorker(role, self.mailbox.peer, Behaviour(self.script), name))
        num_pairs = sum(
            one is other or not (one.role.decodes and other.role.prefills)
            for one in self.workers
            for other in self.workers
            if one.role.prefills and other.role.decodes
        )
        await until(lambda: len(self.dispatcher.fleet.pairs()) == num_pairs)
        return self.workers[num_before:]

    def num_active(self) -> int:
        return sum(len(worker.active) for worker in self.workers)

    def is_empty(self) -> bool:
        """Nothing is left of any request, here and at the workers."""
        return len(self.dispatcher.ledger) == 0 and self.num_active() == 0 and not self.router._streams


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something that other tasks bring about; fails when it takes longer."""
    deadline = asyncio.get_running_loop().time() + seconds
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it did not come about in time"
        await asyncio.sleep(0.005)


@pytest.fixture
def new_worker(text: TextModel) -> Callable[[Peer], ScriptedWorker]:
    """A mixed worker of the router at this address, that says x as often as it may."""
    return lambda router: ScriptedWorker(Role.MIXED, router, Behaviour(lambda request: text.encode("x" * 400).ids))


Wait = Callable[..., Awaitable[None]]


@pytest.fixture
def wait() -> Wait:
    return until


@pytest.fixture
def config() -> RouterConfig:
    door = DoorConfig(max_body_bytes=10_000)
    return RouterConfig(model="toy", max_open_requests=64, door=door, drain_seconds=0.5)


@pytest.fixture
async def cluster(text: TextModel, config: RouterConfig) -> AsyncIterator[Cluster]:
    mailbox = AsyncMailbox("127.0.0.1", 0, Incarnation("router"))
    metrics = RouterMetrics("toy")
    dispatcher = Dispatcher(config, mailbox, metrics)
    cluster = Cluster(Router(config, text, dispatcher, metrics), mailbox, text)
    control = asyncio.create_task(dispatcher.run())
    yield cluster
    for worker in cluster.workers:
        await worker.close()
    control.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await control
    cluster.router.close()
    cluster.router.access.close()
    mailbox.close()


@pytest.fixture
async def client(cluster: Cluster) -> AsyncIterator[httpx.AsyncClient]:
    """Speaks to the cluster's router without a socket."""
    transport = httpx.ASGITransport(create_app(cluster.router), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        yield http


@pytest.fixture
async def address(cluster: "Cluster") -> AsyncIterator[tuple[str, int]]:
    """Of the same app behind a real server, for clients that leave."""
    listener = listen("127.0.0.1", 0)
    host, port = listener.getsockname()
    config = uvicorn.Config(create_app(cluster.router), lifespan="off", log_config=None, ws="none")
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server._serve([listener]))
    yield host, port
    server.should_exit = server.force_exit = True
    await serving
