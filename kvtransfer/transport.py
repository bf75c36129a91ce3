"""What a transport must do: bring spans of the own pool to blocks of a peer's pool, then say so.

A transport is chosen for each pair by its probe (probe.py). Some write into the peer's memory themselves (their
name is in `POOL_WRITERS`) and then send the bare header; others send the bytes beside it, and the receiver
brings them to their place once it has checked the header.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from ..core.kv_layout import LayerGroup
from ..core.messages import Peer, ProbeSent, Push, TransportCard

if TYPE_CHECKING:
    from ..core.mailbox import Mailbox

POOL_WRITERS = frozenset({"shm", "cuda_ipc"})
"""Transports after which the bytes lie in the receiver's pool when the header arrives."""


class NotReachable(Exception):
    """This transport does not lead to that peer; another one may."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Own block ``sources[i]`` to the peer's block ``destinations[i]``, the span of ``layers`` of each."""

    sources: list[int]
    destinations: list[int]
    layers: LayerGroup

    def split(self, max_blocks: int) -> Iterator[BlockCopy]:
        """The same in pieces of at most ``max_blocks`` blocks."""
        for start in range(0, len(self.sources), max_blocks):
            piece = slice(start, start + max_blocks)
            yield BlockCopy(self.sources[piece], self.destinations[piece], self.layers)


class Transport(Protocol):
    """One way to every peer that has a card for it. Nothing here waits for a peer."""

    @property
    def card(self) -> TransportCard:
        """How peers reach the own pool; its ``name`` is the transport's."""

    @property
    def inbox(self) -> Mailbox | None:
        """Where headers with payloads arrive; the worker polls it next to its control mailbox."""

    def open(self, peer: Peer, card: TransportCard, num_blocks: int) -> None:
        """Make ready to push to the peer's pool of ``num_blocks`` blocks; again it does nothing.

        Raises `NotReachable`.
        """

    def push(self, to: Peer, header: Push | ProbeSent, copy: BlockCopy) -> None:
        """Bring the bytes over; the header reaches the peer only after them. The sources are free to change on return.

        Raises `TransferFailed` if not all of it could be sent, or the peer is not open.
        """

    def forget(self, peer: Peer) -> None:
        """The incarnation is dead, or another transport was chosen: let go of what `open` holds."""

    def close(self) -> None: ...
