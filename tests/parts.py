"""What tests of the parts need: tables, requests, and an outbox that remembers."""

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from crossdock.core.block_hash import BlockHasher, model_root
from crossdock.core.block_pool import BlockPool
from crossdock.core.block_tables import BlockTables
from crossdock.core.kv_layout import KvLayout
from crossdock.core.messages import Incarnation, Message, Peer, PoolBooks, Push, Role, TokenDelta, WorkerCard
from crossdock.core.part import Delivery, TransferFailed
from crossdock.core.prefix_cache import PrefixCache
from crossdock.core.request import Fork, Request, RequestId, SamplingParams, pack_ids
from crossdock.core.sequence import Chunk, Sequence, settle
from crossdock.core.sequence import ChunkResult as Result
from crossdock.core.stages import Stage

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=1, block_size=16, dtype="float32")
NUM_GROUPS = 2
VOCAB_SIZE = 1000
LEASE_SECONDS = 12.0

ROUTER = Peer("tcp://router", Incarnation("router"))
PREFILL = Peer("tcp://p", Incarnation("p"))
DECODE = Peer("tcp://d", Incarnation("d"))


class Clock:
    """Stands still unless a test moves it."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def card(num_blocks: int, role: Role = Role.MIXED) -> WorkerCard:
    return WorkerCard(
        role=role,
        model="m",
        layout=LAYOUT,
        num_blocks=num_blocks,
        max_model_len=num_blocks * LAYOUT.block_size,
        max_num_seqs=64,
        vocab_size=VOCAB_SIZE,
        num_layer_groups=NUM_GROUPS,
    )


def tables_of(num_blocks: int, prefix_cache: bool = True) -> BlockTables:
    pool = BlockPool(num_blocks)
    root = model_root(b"key", "m", LAYOUT)
    hasher = BlockHasher(b"key", root, LAYOUT.block_size)
    return BlockTables(pool, PrefixCache(pool, prefix_cache), hasher, LAYOUT.block_size)


def free(num_blocks: int, cached: int = 0) -> PoolBooks:
    """The books of a pool that nobody uses."""
    return PoolBooks(free=num_blocks - cached, cached=cached, leased=0, quarantined=0)


def request(
    name: str,
    num_prompt: int = 16,
    max_tokens: int = 20,
    priority: int = 0,
    first_id: int = 0,
    stop: tuple[int, ...] = (),
    prompt_logprobs: int | None = None,
    num_forks: int = 0,
) -> Request:
    """A prompt of consecutive ids from ``first_id`` on; the forks of ``a`` are ``a1``, ``a2``, …"""
    params = SamplingParams(max_tokens=max_tokens, seed=0, stop_token_ids=stop, prompt_logprobs=prompt_logprobs)
    prompt = pack_ids(list(range(first_id, first_id + num_prompt)))
    forks = tuple(Fork(RequestId(f"{name}{number}"), number) for number in range(1, num_forks + 1))
    return Request(request_id=RequestId(name), prompt=prompt, params=params, priority=priority, forks=forks)


def name_of(sequence: Sequence) -> str:
    return str(sequence.request.request_id)


def spans(chunks: Seq[Chunk]) -> list[str]:
    """``a 0-16`` for tokens 0 to 15 of request a, with an arrow if the chunk samples."""
    return [f"{name_of(c.sequence)} {c.start}-{c.end}{' ->' if c.samples else ''}" for c in chunks]


def finish(tables: BlockTables, chunks: Seq[Chunk], token_id: int = 500) -> None:
    """The step of these chunks has run; every chunk that samples draws ``token_id``."""
    for chunk in chunks:
        settle(chunk, Result(token_id if chunk.samples else None))
        tables.publish(chunk.sequence)
        tables.step_done(chunk)


def from_router(message: Message) -> Delivery:
    return Delivery(ROUTER, message)


@dataclass(slots=True)
class Record:
    """An outbox. Pushes fail while ``is_link_down``."""

    sent: list[tuple[Peer, Message]] = field(default_factory=list)
    pushed: list[tuple[int, list[int], list[int]]] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)
    stages: list[Stage] = field(default_factory=list)
    is_link_down: bool = False

    def send(self, to: Peer, message: Message) -> None:
        self.sent.append((to, message))

    def push(self, to: Peer, header: Push, source_blocks: list[int]) -> None:
        if self.is_link_down:
            raise TransferFailed("the link is down")
        groups = range(header.group, header.group + header.num_groups)
        self.pushed += [(group, source_blocks, header.blocks) for group in groups]

    def emit(self, router: Peer, deltas: Seq[TokenDelta]) -> None:
        assert router == ROUTER
        self.deltas += deltas

    def note(self, stages: list[Stage]) -> None:
        self.stages += stages

    def take_sent(self) -> list[tuple[Peer, Message]]:
        sent, self.sent = self.sent, []
        return sent


def turn_until(is_done: Callable[[], object], *turns: Callable[[], object]) -> None:
    """Sides of one process, in turn."""
    end = time.monotonic() + 20.0
    while not is_done():
        assert time.monotonic() < end, "not within 20 s"
        for turn in turns:
            turn()
        time.sleep(0)
