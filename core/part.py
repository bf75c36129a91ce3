"""The protocol between the engine, which has no roles, and its two parts, which hold all policy.

A step: every part plans chunks within a budget, the engine launches them together, and hands each part
the results of its own chunks. A part changes its sequences, and says what others must know through the
`Outbox` it was made with. It does no I/O and reads no clock: time is an argument.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Protocol

from .messages import Message, Peer, Push, TokenDelta
from .request import RequestId
from .sequence import Chunk, ChunkResult, Sequence
from .stages import Stage


@dataclass(slots=True)
class StepBudget:
    """What is left for one step; planning takes from it."""

    num_tokens: int
    num_sequences: int

    def take(self, num_tokens: int, num_sequences: int = 1) -> None:
        self.num_tokens -= num_tokens
        self.num_sequences -= num_sequences


class Outbox(Protocol):
    """Where a part leaves what others must learn; the worker (or `LLM`) delivers it."""

    def send(self, to: Peer, message: Message) -> None:
        """One message to one peer; may be lost."""

    def push(self, to: Peer, header: Push, source_blocks: list[int]) -> None:
        """Send KV bytes of the pool; raises `TransferFailed` when the link to the peer is down."""

    def emit(self, router: Peer, deltas: Seq[TokenDelta]) -> None:
        """Tokens to the router of their requests; all of one step travel in one message."""

    def note(self, stages: list[Stage]) -> None:
        """A traced request has left this worker."""


@dataclass(frozen=True, slots=True)
class Handover:
    """A sequence whose prompt is computed and whose first token is known, passed from prefill to decode.

    It has been ready since ``ready_at``; ``transfer_seconds`` is how long that took from the computed prompt on, where
    its KV travelled.
    """

    sequence: Sequence
    router: Peer
    ready_at: float
    transfer_seconds: float | None = None


class Payload(Protocol):
    """Bulk bytes, in memory of the host or a GPU; what may read them knows where they lie."""

    def __len__(self) -> int: ...

    def __getitem__(self, piece: slice, /) -> "Payload": ...


@dataclass(frozen=True, slots=True)
class Delivery:
    """A message as it arrived, with the bulk bytes that travelled beside it; they are good until the next delivery."""

    sender: Peer
    message: Message
    payload: Payload = memoryview(b"")


Checksums = Callable[[list[int]], list[int]]
"""One a layer group over the KV of these blocks of the own pool, in their order; none where they are not wanted."""


def no_checksums(blocks: list[int]) -> list[int]:
    """`Checksums` of a sender that makes none."""
    return []


class TransferFailed(Exception):
    """KV could not be sent; the transfer ends without result."""


class Part(Protocol):
    """One half of a worker: prefill or decode."""

    def handle(self, delivery: Delivery, now: float) -> bool:
        """Take a message; false if this part has no use for its type."""

    def plan(self, budget: StepBudget, now: float) -> list[Chunk]:
        """Chunks for the next step; the sequences' tables are grown and marked when it returns."""

    def apply(self, done: Iterable[tuple[Chunk, ChunkResult]], now: float) -> None:
        """Results of this part's chunks of one finished step, in planning order."""

    def layers_done(self, chunks: Seq[Chunk], groups: range, now: float) -> None:
        """The KV of these layer groups of these chunks, all of this part, is written (the step may still run)."""

    def sweep(self, now: float) -> None:
        """Called every loop iteration: deadlines."""

    def lose(self, peer: Peer, now: float) -> None:
        """This incarnation is dead: end everything agreed with it."""

    @property
    def request_ids(self) -> AbstractSet[RequestId]:
        """The requests for which this part still has something to do."""

    @property
    def has_work(self) -> bool:
        """Whether a request is here that a step could advance."""


MayRun = Callable[[Sequence], bool]
"""Whether a sequence may take part in the next step, as far as its grammar is concerned."""
