"""Where NCCL brings pieces of KV: headers come by mailbox and are numbered, bytes come in that very order.

For each header a buffer of the channel's ring is filled, whatever has become of the lease meanwhile; header and bytes
are handed on together, the lease is checked then, and only then are bytes brought to their blocks. A header that makes
no sense, or is missing for too long, leaves the order unknown, so it ends the channel.
"""

import hashlib
import hmac
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from ..core.mailbox import Mailbox
from ..core.messages import ChannelEnded, ChannelInvite, Incarnation, Peer, PieceSent
from ..core.part import Delivery, Payload
from .nccl_channel import Carried, Channel, Network, Rank
from .pool_bytes import PoolMemory
from .staging_ring import StagingRing

_log = logging.getLogger("crossdock.links")

MAX_CHANNELS = 8
"""A direction, with those that are still being ended: each holds a ring. Further peers use another transport."""
MAX_AHEAD = 64
"""A sender has one header a buffer under way, and a few more whose bytes NCCL could take beforehand."""
CODE_BYTES = 16


def invitation_code(key: bytes, unique_id: bytes) -> bytes:
    """Without it an invitation is refused: NCCL would connect to whatever address an id holds."""
    return hashlib.blake2b(unique_id, digest_size=CODE_BYTES, key=key, person=b"nccl unique id").digest()


@dataclass(slots=True, eq=False)
class _Source:
    """The channel ``number`` of one sender. Headers wait in ``announced`` for their turn and a free buffer."""

    sender: Peer
    number: int
    channel: Channel
    ring: StagingRing
    announced: dict[int, PieceSent] = field(default_factory=dict)
    next_number: int = 0
    missing_since: float | None = None
    arriving: deque[tuple[PieceSent, Carried]] = field(default_factory=deque)


class NcclInbox:
    """``on_progress`` is called whenever a channel may have moved something, ``on_ended`` when a peer has left one."""

    def __init__(
        self,
        pool: PoolMemory,
        network: Network,
        mailbox: Mailbox,
        key: bytes,
        patience_seconds: float,
        wake: Callable[[], None],
        on_progress: Callable[[], None],
        on_ended: Callable[[ChannelEnded, Peer], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.poll_socket = mailbox.poll_socket
        self._pool = pool
        self._network = network
        self._mailbox = mailbox
        self._key = key
        self._patience_seconds = patience_seconds
        self._wake = wake
        self._on_progress = on_progress
        self._on_ended = on_ended
        self._clock = clock
        self._num_refused = 0
        self._sources: dict[Incarnation, _Source] = {}
        self._ending: list[Channel] = []
        self._lent: tuple[_Source, Payload] | None = None

    @property
    def num_rejected(self) -> int:
        """Messages that were malformed, made no sense or were meant for another incarnation."""
        return self._mailbox.num_rejected + self._num_refused

    @property
    def is_moving(self) -> bool:
        return any(source.channel.is_moving for source in self._sources.values())

    def receive(self) -> Delivery | None:
        """The next piece; its payload is good for what is launched on the pool until the next call.

        Its buffer is filled again only behind the pool's copies until then, for which the device waits, not the loop.
        """
        if self._lent is not None:
            source, buffer = self._lent
            source.ring.give_back(buffer)
            self._lent = None
        self._on_progress()
        while (delivery := self._mailbox.receive()) is not None:
            self._take(delivery)
        for source in list(self._sources.values()):
            self._advance(source)
        return self._next_whole()

    def forget(self, peer: Peer) -> None:
        """The incarnation is dead: what is under way from it ends without result."""
        source = self._sources.get(peer.incarnation)
        if source is not None:
            self._end(source, "its sender is dead")
            self._mailbox.forget(source.sender)

    def close(self) -> None:
        for source in list(self._sources.values()):
            self._end(source, "this worker ends")
        for channel in self._ending:
            channel.wait_until_gone()

    def _take(self, delivery: Delivery) -> None:
        sender = delivery.sender
        match delivery.message:
            case ChannelInvite() as invite:
                self._invited(invite, sender)
            case PieceSent() as piece:
                self._announced(piece, sender)
            case ChannelEnded() as ended if ended.inviter == self._mailbox.peer.incarnation:
                self._on_ended(ended, sender)
            case ChannelEnded() as ended:
                source = self._sources.get(sender.incarnation)
                if source is not None and source.number == ended.channel:
                    self._end(source, ended.reason)
            case _:
                self._num_refused += 1

    def _invited(self, invite: ChannelInvite, sender: Peer) -> None:
        if not hmac.compare_digest(invite.code, invitation_code(self._key, invite.unique_id)):
            self._num_refused += 1
            return
        former = self._sources.get(sender.incarnation)
        if former is not None:
            if invite.channel <= former.number:
                return
            self._end(former, "another one replaces it")
        self._ending = [channel for channel in self._ending if not channel.is_gone]
        if len(self._sources) + len(self._ending) >= MAX_CHANNELS:
            self._tell(sender, invite.channel, f"the peer has its {MAX_CHANNELS} channels")
            return
        channel = Channel(self._network, Rank.RECEIVER, self._patience_seconds, self._wake, invite.unique_id)
        self._sources[sender.incarnation] = _Source(sender, invite.channel, channel, StagingRing(self._pool))

    def _announced(self, piece: PieceSent, sender: Peer) -> None:
        source = self._sources.get(sender.incarnation)
        if source is None or piece.channel > source.number:
            self._tell(sender, piece.channel, "the peer does not know this channel")
            return
        if piece.channel < source.number or piece.number < source.next_number:
            return  # of a former channel, or repeated
        most = self._pool.staging_bytes
        if not 0 < piece.num_bytes <= most or piece.number >= source.next_number + MAX_AHEAD:
            self._num_refused += 1
            self._fail(source, f"piece {piece.number} of {piece.num_bytes} bytes makes no sense here")
            return
        source.announced.setdefault(piece.number, piece)

    def _advance(self, source: _Source) -> None:
        """Have the bytes of the next headers received, as far as there are buffers."""
        source.channel.advance()
        if source.channel.failure is not None:
            self._fail(source, source.channel.failure)
            return
        while source.ring.num_free and (piece := source.announced.pop(source.next_number, None)) is not None:
            source.next_number += 1
            buffer, after = source.ring.take(), self._pool.mark()
            source.arriving.append((piece, source.channel.carry(buffer, piece.num_bytes, after)))
        is_missing = bool(source.announced) and source.next_number not in source.announced
        if not is_missing:
            source.missing_since = None
        elif source.missing_since is None:
            source.missing_since = self._clock()
        elif self._clock() - source.missing_since > self._patience_seconds:
            self._fail(source, f"header {source.next_number} was lost")

    def _next_whole(self) -> Delivery | None:
        for source in self._sources.values():
            if source.arriving and source.arriving[0][1].is_done:
                piece, carried = source.arriving.popleft()
                self._lent = source, carried.buffer
                self._pool.is_beside_link = any(each.arriving for each in self._sources.values())
                return Delivery(source.sender, piece.message, carried.buffer[: piece.num_bytes])
        return None

    def _fail(self, source: _Source, reason: str) -> None:
        _log.warning("%s from %s has failed: %s", self._network.name, source.sender.address, reason)
        self._end(source, reason)
        self._tell(source.sender, source.number, reason)

    def _end(self, source: _Source, reason: str) -> None:
        source.channel.end(reason)
        self._ending.append(source.channel)
        del self._sources[source.sender.incarnation]

    def _tell(self, sender: Peer, channel: int, reason: str) -> None:
        self._mailbox.send(sender, ChannelEnded(channel=channel, inviter=sender.incarnation, reason=reason))
