"""Transport between fixed pairs of GPUs by NCCL: NVLink, PCIe, or RDMA with NCCL's own verbs.

A push is packed piece by piece into a ring of staging buffers, and a channel (nccl_channel.py) sends them in order.
What the two sides must agree on goes over a mailbox of this transport: the invitation to a channel, and a header a
piece (nccl_inbox.py). NCCL matches by order alone, so pieces are numbered; what breaks the order breaks the channel.

Each peer has a ring and a channel of its own, so a peer that stands still delays nobody else's pieces.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.mailbox import Mailbox
from ..core.messages import ChannelEnded, ChannelInvite, Peer, PieceSent, ProbeSent, Push, TransportCard
from ..core.part import TransferFailed
from .nccl_channel import Carried, Channel, Network, Rank
from .nccl_inbox import MAX_CHANNELS, NcclInbox, invitation_code
from .pieces import PackingPieces, StagedAddress
from .pool_bytes import PoolMemory
from .staging_ring import StagingRing
from .transport import BlockCopy, LinkDown, NotReachable

LINGER_SECONDS = 0.2
_log = logging.getLogger("crossdock.links")


@dataclass(slots=True, eq=False)
class _Way:
    """The channel to one peer, whose mailbox is ``to`` and whose buffers have ``staging_bytes``."""

    to: Peer
    staging_bytes: int
    number: int
    channel: Channel
    ring: StagingRing
    is_invited: bool = False
    has_peer_left: bool = False
    is_down: bool = False
    num_pieces: int = 0
    packing: deque[PackingPieces] = field(default_factory=deque)
    unsaid: deque[PieceSent] = field(default_factory=deque)
    """Headers that go out behind the invitation."""
    sent: deque[Carried] = field(default_factory=deque)

    def stop(self, reason: str) -> None:
        """What is not packed by now is lost, and so its transfer, which its lease ends."""
        for packing in self.packing:
            packing.drop()
        self.packing.clear()
        self.channel.end(reason)


class NcclTransport:
    """``mailbox`` is this transport's own, with the worker's incarnation; ``key`` is the cluster's.

    A channel that has something to do and does nothing for ``patience_seconds`` is given up. ``wake`` is called, from
    another thread, whenever `inbox` should be asked again.
    """

    def __init__(
        self,
        pool: PoolMemory,
        network: Network,
        mailbox: Mailbox,
        key: bytes,
        patience_seconds: float,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.card = TransportCard("nccl", str(StagedAddress(pool.staging_bytes, mailbox.peer.address)))
        self.inbox = NcclInbox(pool, network, mailbox, key, patience_seconds, wake, self._pump, self._peer_left, clock)
        self._pool = pool
        self._network = network
        self._mailbox = mailbox
        self._key = key
        self._patience_seconds = patience_seconds
        self._wake = wake
        self._clock = clock
        self._ways: dict[Peer, _Way] = {}
        self._ending: list[Channel] = []
        self._leaving: dict[Peer, float] = {}
        self._num_channels = 0

    def open(self, peer: Peer, card: TransportCard, num_blocks: int) -> None:
        """Whether the peer joins shows in the probe."""
        way = self._ways.get(peer)
        if way is not None:
            if way.channel.failure is None:
                return
            self._take_down(way, way.channel.failure)
        self._ending = [channel for channel in self._ending if not channel.is_gone]
        if len(self._ending) + sum(not way.is_down for way in self._ways.values()) >= MAX_CHANNELS:
            raise NotReachable(f"this worker has its {MAX_CHANNELS} channels")
        there = StagedAddress.parse(card.address, self._pool.layout.block_bytes)
        to = Peer(there.address, peer.incarnation)
        self._leaving.pop(to, None)
        self._num_channels += 1
        channel = Channel(self._network, Rank.SENDER, self._patience_seconds, self._wake)
        ring = StagingRing(self._pool)
        self._ways[peer] = _Way(to, there.staging_bytes, self._num_channels, channel, ring)

    @property
    def is_moving(self) -> bool:
        return self.inbox.is_moving or any(way.channel.is_moving for way in self._ways.values())

    def push(self, to: Peer, header: Push | ProbeSent, copy: BlockCopy) -> PackingPieces:
        way = self._ways.get(to)
        if way is None:
            raise TransferFailed("there is no channel to the peer")
        if way.channel.failure is not None:
            raise LinkDown(f"the channel has failed: {way.channel.failure}")
        max_blocks = self._pool.staging_blocks(copy.layers, way.staging_bytes)
        span_bytes, is_end = self._pool.span_bytes(copy.layers), copy.layers.end == self._pool.all_layers.end
        packing = PackingPieces(to, header, copy, max_blocks, span_bytes, is_end, self._pump)
        way.packing.append(packing)
        self._pump()
        return packing

    def detail(self, peer: Peer) -> str:
        return self._network.name

    def forget(self, peer: Peer) -> None:
        """Only what goes there; what comes from there ends with `inbox.forget`, or when the peer says so."""
        way = self._ways.pop(peer, None)
        if way is not None:
            self._pool.mark().synchronize()
            self._take_down(way, "it is not needed any more")
            self._leaving[way.to] = self._clock() + self._patience_seconds

    def close(self) -> None:
        for peer in list(self._ways):
            self.forget(peer)
        for channel in self._ending:
            channel.wait_until_gone()
        self.inbox.close()
        self._mailbox.close(LINGER_SECONDS)

    def _peer_left(self, ended: ChannelEnded, sender: Peer) -> None:
        """The receiving side has let go of one of this side's channels."""
        for way in self._ways.values():
            if way.to == sender and way.number == ended.channel:
                way.has_peer_left = True
                way.channel.end(ended.reason)

    def _take_down(self, way: _Way, reason: str) -> None:
        """Stop using it, once, and tell the peer."""
        if way.is_down:
            return
        if way.channel.failure is not None:
            _log.warning("%s to %s has failed: %s", self._network.name, way.to.address, reason)
        way.is_down = True
        way.stop(reason)
        self._ending.append(way.channel)
        if way.is_invited and not way.has_peer_left:
            ended = ChannelEnded(channel=way.number, inviter=self._mailbox.peer.incarnation, reason=reason)
            self._mailbox.send(way.to, ended)

    def _pump(self) -> None:
        """Take back the buffers that have been sent, pack into them what waits, and see to channels that failed."""
        for way in self._ways.values():
            if way.channel.failure is None:
                self._pack(way)
                self._speak(way)
            else:
                self._take_down(way, way.channel.failure)
        for peer in [peer for peer, until in self._leaving.items() if self._clock() > until]:
            del self._leaving[peer]
            self._mailbox.forget(peer)

    def _pack(self, way: _Way) -> None:
        way.channel.advance()
        while way.sent and way.sent[0].is_done:
            way.ring.give_back(way.sent.popleft().buffer)
        while way.packing and way.ring.num_free:
            packing = way.packing[0]
            if packing.num_left:
                self._send(way, packing)
            else:
                way.packing.popleft()

    def _send(self, way: _Way, packing: PackingPieces) -> None:
        """Announce the next piece, launch its copy into a buffer, and have it sent as soon as that has run.

        The peer is told first: it takes longer to begin receiving than this side to begin sending.
        """
        on_their_way = sum(carried.num_bytes for carried in way.sent)
        message, copy = packing.take(on_their_way, others_wait=len(way.packing) > 1)
        num_bytes = len(copy.sources) * packing.span_bytes
        way.unsaid.append(PieceSent(channel=way.number, number=way.num_pieces, num_bytes=num_bytes, message=message))
        way.num_pieces += 1
        self._speak(way)
        buffer = way.ring.take()
        self._pool.is_beside_link = on_their_way > 0
        self._pool.pack(copy.sources, copy.layers, buffer)
        packing.packed = packed = self._pool.mark()
        way.sent.append(way.channel.carry(buffer, num_bytes, packed))

    def _speak(self, way: _Way) -> None:
        """Invite the peer as soon as the channel has its id, then announce what is sent."""
        unique_id = way.channel.unique_id
        if unique_id is None:
            return
        if not way.is_invited:
            way.is_invited = True
            code = invitation_code(self._key, unique_id)
            self._mailbox.send(way.to, ChannelInvite(channel=way.number, unique_id=unique_id, code=code))
        while way.unsaid:
            self._mailbox.send(way.to, way.unsaid.popleft())
