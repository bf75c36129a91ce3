"""A dispatcher on its own: its mailbox and its clients are played, its clock is an argument."""

from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar, cast

from crossdock.core.config import RouterConfig
from crossdock.core.kv_layout import KvLayout
from crossdock.core.mailbox import AsyncMailbox
from crossdock.core.messages import (
    Heartbeat,
    Hello,
    Incarnation,
    Link,
    Message,
    Peer,
    PoolBooks,
    PromptLogprobs,
    RequestFailed,
    Role,
    TokenDelta,
    Tokens,
    WorkerCard,
    WorkerLoad,
)
from crossdock.core.part import Delivery
from crossdock.core.request import Request, RequestId, SamplingParams, TransferId, pack_ids
from crossdock.core.sequence import FinishReason
from crossdock.router.dispatcher import Dispatcher
from crossdock.router.ledger import Entry, Failure
from crossdock.router.metrics import RouterMetrics

T = TypeVar("T", bound=Message)
LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
P1, P2, D1, D2, M = (Peer(f"tcp://{name}:1", Incarnation(name)) for name in ("p1", "p2", "d1", "d2", "m"))


class Sent(NamedTuple):
    to: Peer
    message: Message


@dataclass
class RecordingMailbox:
    """Keeps what is sent; the test delivers by hand."""

    sent: list[Sent] = field(default_factory=list)
    forgotten: list[Peer] = field(default_factory=list)
    num_rejected: int = 0

    def send(self, to: Peer, message: Message) -> None:
        self.sent.append(Sent(to, message))

    strangers: dict[Peer, int] = field(default_factory=dict)
    refused: list[tuple[Peer, int, str]] = field(default_factory=list)

    def take_strangers(self) -> dict[Peer, int]:
        strangers, self.strangers = self.strangers, {}
        return strangers

    def refuse(self, to: Peer, protocol: int, reason: str) -> None:
        self.refused.append((to, protocol, reason))

    def forget(self, peer: Peer) -> None:
        self.forgotten.append(peer)

    def take(self, kind: type[T]) -> list[tuple[Peer, T]]:
        """The messages of one kind sent since the last call; the others are dropped."""
        found = [(sent.to, sent.message) for sent in self.sent if isinstance(sent.message, kind)]
        self.sent.clear()
        return found


@dataclass
class Client:
    """A sink that keeps what its entries got."""

    tokens: list[int | None] = field(default_factory=list)
    prompt_parts: list[int] = field(default_factory=list)
    num_restarts: int = 0
    failures: list[Failure] = field(default_factory=list)

    def emit(self, entry: Entry, delta: TokenDelta) -> None:
        self.tokens.append(delta.token_id)

    def emit_prompt(self, entry: Entry, part: PromptLogprobs) -> None:
        self.prompt_parts.append(part.start)

    def restart(self, entry: Entry) -> None:
        self.num_restarts += 1
        self.tokens.clear()

    def fail(self, entry: Entry, failure: Failure) -> None:
        self.failures.append(failure)


def card(role: Role, model: str = "m") -> WorkerCard:
    return WorkerCard(
        role=role,
        model=model,
        layout=LAYOUT,
        num_blocks=64,
        max_model_len=200,
        max_num_seqs=64,
        vocab_size=256,
        num_layer_groups=1,
    )


class Stage:
    """A dispatcher, its clock and what it sends."""

    def __init__(self, max_attempts: int = 3) -> None:
        self.now = 100.0
        self.mailbox = RecordingMailbox()
        self.metrics = RouterMetrics("toy")
        config = RouterConfig(model="toy", max_attempts=max_attempts)
        self.dispatcher = Dispatcher(config, cast(AsyncMailbox, self.mailbox), self.metrics, lambda: self.now)

    def hear(self, sender: Peer, *messages: Message) -> None:
        for message in messages:
            self.dispatcher.handle(Delivery(sender, message))

    def join(self, *workers: tuple[Peer, Role]) -> None:
        for peer, role in workers:
            self.hear(peer, Hello(card=card(role)))
        self.mailbox.sent.clear()

    def join_two_pairs(self) -> None:
        self.join((P1, Role.PREFILL), (P2, Role.PREFILL), (D1, Role.DECODE), (D2, Role.DECODE))
        for prefill in (P1, P2):
            for decode in (D1, D2):
                self.hear(prefill, Link(to=decode.incarnation, transport="tcp"))

    def pass_time(self, seconds: int, *alive: Peer, running: int = 0, waiting: int = 0) -> None:
        """Second by second, with heartbeats of those alive."""
        for _ in range(seconds):
            self.now += 1
            for peer in alive:
                load = WorkerLoad(books=PoolBooks(64, 0, 0, 0), num_running=running, num_waiting=waiting)
                self.hear(peer, Heartbeat(load=load))
            self.dispatcher.tick()

    def open(self, client: Client, num_choices: int = 1, may_restart: bool = False, num_prompt: int = 3) -> list[Entry]:
        params = SamplingParams(max_tokens=4, seed=0)
        prompt = pack_ids(list(range(num_prompt)))
        requests = [Request(request_id=RequestId(f"r-{n}"), prompt=prompt, params=params) for n in range(num_choices)]
        entries = [Entry(request, n, client, self.now, may_restart) for n, request in enumerate(requests)]
        assert self.dispatcher.open(entries) is None
        return entries

    def metric(self, line: str) -> float:
        lines = self.metrics.render().decode().splitlines()
        return float(next(found.rsplit(" ", 1)[1] for found in lines if found.startswith(line)))


def token(entry: Entry, index: int, finish: FinishReason | None = None) -> Tokens:
    deltas = [TokenDelta(request_id=entry.attempt.request_id, index=index, token_id=50 + index, finish=finish)]
    return Tokens(deltas=deltas)


def failure_of(entry: Entry, reason: str, is_retryable: bool) -> RequestFailed:
    request_id = entry.attempt.request_id
    return RequestFailed(
        request_id=request_id, transfer_id=TransferId(request_id), reason=reason, is_retryable=is_retryable
    )


def legs(entry: Entry) -> tuple[Peer, Peer]:
    return entry.attempt.pair.prefill.peer, entry.attempt.pair.decode.peer
