"""Transport between any two hosts: ZeroMQ frames on a mailbox of its own, so that bulk never delays control.

A large push goes out in pieces, each a `Push` of some of its blocks with their bytes, so that the receiver
brings the first ones to their place while the last ones are under way.
"""

from msgspec.structs import replace

from ..core.mailbox import Mailbox
from ..core.messages import Peer, ProbeSent, Push, TransportCard
from ..core.part import TransferFailed
from .pool_bytes import PoolMemory
from .transport import BlockCopy

PIECE_BYTES = 4 << 20


class TcpTransport:
    """``inbox`` is the bulk mailbox of this worker, with the worker's incarnation."""

    is_moving = False

    def __init__(self, pool: PoolMemory, inbox: Mailbox) -> None:
        self.card = TransportCard("tcp", inbox.peer.address)
        self.inbox = inbox
        self._pool = pool
        self._peers: dict[Peer, Peer] = {}

    def open(self, peer: Peer, card: TransportCard, num_blocks: int) -> None:
        """Always succeeds: whether the address leads anywhere shows in the probe."""
        self._peers[peer] = Peer(card.address, peer.incarnation)

    def push(self, to: Peer, header: Push | ProbeSent, copy: BlockCopy) -> None:
        inbox = self._peers.get(to)
        if inbox is None:
            raise TransferFailed("the peer's bulk address is not known")
        num_dropped = self.inbox.num_dropped
        for piece in copy.split(self._max_piece(header, copy)):
            part = replace(header, blocks=piece.destinations) if isinstance(header, Push) else header
            self.inbox.send(inbox, part, self._pool.read(piece.sources, piece.layers))
            if self.inbox.num_dropped > num_dropped:
                raise TransferFailed("the queue to the peer is full")

    def detail(self, peer: Peer) -> str:
        return ""

    def forget(self, peer: Peer) -> None:
        inbox = self._peers.pop(peer, None)
        if inbox is not None:
            self.inbox.forget(inbox)

    def close(self) -> None:
        self.inbox.close()

    def _max_piece(self, header: Push | ProbeSent, copy: BlockCopy) -> int:
        """Blocks in one message; the digest of a probe speaks of all of them, so they stay together."""
        if isinstance(header, ProbeSent):
            return len(copy.sources)
        span_bytes = (copy.layers.end - copy.layers.first) * self._pool.layout.layer_bytes
        return max(1, PIECE_BYTES // span_bytes)
