"""What a transport must do: bring spans of the own pool to blocks of a peer's pool, then say so.

A transport is chosen for each pair by its probe (probe.py). Some write into the peer's memory themselves (their
name is in `POOL_WRITERS`), and the bare header follows; others send the bytes beside it, and the receiver brings them
to their place once it has checked the header.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import zmq

from ..core.kv_layout import LayerGroup
from ..core.messages import Peer, ProbeSent, Push, TransportCard
from ..core.part import Delivery, TransferFailed

POOL_WRITERS = frozenset({"shm", "cuda_ipc"})
"""Transports that bring the bytes to the receiver's pool and leave it to their caller to send the header after them."""


class NotReachable(Exception):
    """This transport does not lead to that peer; another one may."""


class LinkDown(TransferFailed):
    """The way to the peer has broken; it must be opened anew, or another one be found."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """Own block ``sources[i]`` to the peer's block ``destinations[i]``, the span of ``layers`` of each."""

    sources: list[int]
    destinations: list[int]
    layers: LayerGroup

    def split(self, max_blocks: int) -> "Iterator[BlockCopy]":
        """The same in pieces of at most ``max_blocks`` blocks."""
        for start in range(0, len(self.sources), max_blocks):
            piece = slice(start, start + max_blocks)
            yield BlockCopy(self.sources[piece], self.destinations[piece], self.layers)


class Inbox(Protocol):
    """What a worker's loop polls."""

    @property
    def num_rejected(self) -> int:
        """Messages that were malformed or meant for another incarnation."""

    @property
    def poll_socket(self) -> zmq.Socket[bytes] | int:
        """Readable when something may have arrived; a file descriptor if a number."""

    def receive(self) -> Delivery | None:
        """The next message; ``None`` if none is here. Always asked until then before the loop polls."""

    def forget(self, peer: Peer) -> None:
        """The incarnation is dead: what is under way from it ends without result."""


class Copying(Protocol):
    """A copy that is still under way."""

    @property
    def is_done(self) -> bool: ...

    @property
    def wakes(self) -> bool:
        """Whether its end wakes the loop, which must look for it else."""

    def wait(self) -> None:
        """Until it is done. Raises `TransferFailed` where that takes too long."""


class Transport(Protocol):
    """One way to every peer that has a card for it. Nothing here waits for a peer."""

    @property
    def card(self) -> TransportCard:
        """How peers reach the own pool; its ``name`` is the transport's."""

    @property
    def inbox(self) -> Inbox | None:
        """Where headers with payloads arrive; the worker polls it next to its control mailbox."""

    @property
    def is_moving(self) -> bool:
        """Something is under way here whose end does not wake the loop, which must look for it."""

    def open(self, peer: Peer, card: TransportCard, num_blocks: int) -> None:
        """Make ready to push to the peer's pool of ``num_blocks`` blocks; again it does nothing, unless the way broke.

        Raises `NotReachable`.
        """

    def push(self, to: Peer, header: Push | ProbeSent, copy: BlockCopy) -> Copying | None:
        """Bring the bytes over, and beside them the header, unless this is one of `POOL_WRITERS`.

        ``None`` says that the sources are free to change. Otherwise the copy has only begun, and the caller says
        nothing else to this peer before it is done.

        Raises `TransferFailed` if not all of it could be sent, or the peer is not open, and `LinkDown` if it would be
        of no use to try again.
        """

    def detail(self, peer: Peer) -> str:
        """What else is worth telling of the way to an open peer."""

    def forget(self, peer: Peer) -> None:
        """The incarnation is dead, or another transport was chosen: let go of what `open` holds.

        Waits for copies to it that are under way.
        """

    def close(self) -> None: ...
