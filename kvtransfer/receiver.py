"""One transfer on the decode side: a state machine without clock, socket or memory.

::

    RESERVED ── Commit, all landed ───────────────> ATTACHED ── no Commit repeated for long ──> ENDED
     │  │ │                                            ^                                          ^
     │  │ └── Commit ──> COMMITTED ── last push landed ┘                                          │
     │  └──── Cancel ────────┬────────────────────────────────────────────── GIVE_BACK ───────────┤
     └── bad push, expiry, ──┴──> REVOKED (Revoke again and again) ── Cancel ── END_QUARANTINE ───┤
         revoke()                    │                                                            │
         lose() ─────────────────────┴─> LOST ── silent for a lease time ────── END_QUARANTINE ───┘

The KV is whole when every (block, layer group) pair landed under this lease and generation; only then, and with
the sender's `Commit`, the sequence may attach. A `Commit` may overtake pushes on another socket: it waits for
them, no longer than the lease. Blocks that the sender may still write to are quarantined: until its `Cancel`, the
promise that it writes no more, or until it is dead and silent for a lease time, because a process that was only
stalled finds its own lease expired when it wakes. Stale and repeated messages change nothing.
"""

from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from ..core.messages import (
    Attached,
    Cancel,
    Commit,
    Message,
    Push,
    Rejected,
    Renew,
    Reservation,
    Revoke,
)
from ..core.part import Delivery
from ..core.request import TransferId
from .lease import Lease
from .transport import POOL_WRITERS

LINGER_LEASES = 3
"""Lease times after attaching in which a repeated `Commit` is answered; longer than a sender repeats it."""


class ReceiverState(Enum):
    RESERVED = auto()
    COMMITTED = auto()
    ATTACHED = auto()
    REVOKED = auto()
    LOST = auto()
    ENDED = auto()


class Change(Enum):
    """What to do with the receiver's blocks now."""

    ATTACH = auto()
    """They hold the prompt's KV and belong to the sequence, whose choices go on from ``first_token_ids``."""
    GIVE_BACK = auto()
    """Nobody writes to them any more."""
    QUARANTINE = auto()
    END_QUARANTINE = auto()


@dataclass(frozen=True, slots=True)
class ReceiverActions:
    """``lands``: first of all write the payload of the handled `Push` into the pool. Messages go to the sender."""

    messages: tuple[Message, ...] = ()
    lands: bool = False
    change: Change | None = None


NOTHING = ReceiverActions()


class Receiver:
    """Pool block ``blocks[i]`` gets prompt block ``first_missing + i``; a span of group g has ``group_bytes[g]`` B."""

    def __init__(
        self,
        transfer_id: TransferId,
        lease: Lease,
        first_missing: int,
        blocks: list[int],
        group_bytes: tuple[int, ...],
    ) -> None:
        self.state = ReceiverState.RESERVED
        self.transfer_id = transfer_id
        self.lease = lease
        self.blocks = blocks
        self.first_token_ids: list[int | None] = []
        self.checksums: list[int] = []
        self._first_missing = first_missing
        self._group_bytes = group_bytes
        self._reserved = frozenset(blocks)
        self._missing = [set(self._reserved) for _ in group_bytes]
        self._next_event = 0.0

    @property
    def is_open(self) -> bool:
        """Pushes may land."""
        return self.state in (ReceiverState.RESERVED, ReceiverState.COMMITTED)

    @property
    def is_ended(self) -> bool:
        return self.state is ReceiverState.ENDED

    @property
    def due(self) -> float:
        """`tick` has nothing to do before, nor later once it has ended. A lease that is renewed moves it."""
        if self.is_ended:
            return -inf
        return self.lease.deadline if self.is_open else self._next_event

    def offered(self, now: float) -> ReceiverActions:
        """The offer came, or came again because the reservation was lost."""
        if self.state is not ReceiverState.RESERVED or self.lease.is_expired(now):
            return NOTHING
        reservation = Reservation(
            transfer_id=self.transfer_id,
            lease_id=self.lease.id,
            generation=self.lease.generation,
            first_missing=self._first_missing,
            blocks=self.blocks,
            lease_seconds=self.lease.seconds,
        )
        return ReceiverActions((reservation,))

    def handle(self, delivery: Delivery, now: float) -> ReceiverActions:
        """A `Push`, `Renew`, `Commit` or `Cancel` of this transfer."""
        message, sender = delivery.message, delivery.sender.incarnation
        if isinstance(message, Cancel):
            return self._cancelled() if sender == self.lease.holder else NOTHING
        if not isinstance(message, Push | Renew | Commit):
            return NOTHING
        if not self.lease.covers(message, sender):
            return self._reject("the lease is another one") if isinstance(message, Commit) else NOTHING
        if self.is_open and self.lease.is_expired(now):
            return self.revoke("the lease expired", now)
        match message:
            case Commit():
                return self._commit(message, now)
            case Push() if self.is_open:
                return self._push(message, len(delivery.payload), now)
            case Renew() if self.state is ReceiverState.RESERVED:
                self.lease.renew(now)
            case Push() | Renew() if self.state is ReceiverState.LOST:
                return self._sign_of_life(now)
        return NOTHING

    def revoke(self, reason: str, now: float) -> ReceiverActions:
        """This side wants to end it. Does nothing once attached or ended."""
        if not self.is_open:
            return NOTHING
        self.state = ReceiverState.REVOKED
        self._next_event = now + self.lease.seconds / 3
        return ReceiverActions((Revoke(transfer_id=self.transfer_id, reason=reason),), change=Change.QUARANTINE)

    def refuse_corrupted(self) -> ReceiverActions:
        """Instead of attaching: what landed is not what was sent. Its sender has committed, so it writes no more."""
        assert self.state is ReceiverState.ATTACHED, "it is known when everything has landed"
        return ReceiverActions(self._reject("the checksums differ").messages, change=self._end(Change.GIVE_BACK).change)

    def lose(self, now: float) -> ReceiverActions:
        """The sender's incarnation was declared dead."""
        if not self.is_open and self.state is not ReceiverState.REVOKED:
            return NOTHING
        change = Change.QUARANTINE if self.is_open else None
        self.state = ReceiverState.LOST
        self._next_event = now + self.lease.seconds
        return ReceiverActions(change=change)

    def tick(self, now: float) -> ReceiverActions:
        """Deadlines and repetitions; call it once it is `due`."""
        if self.is_open and self.lease.is_expired(now):
            return self.revoke("the lease expired", now)
        if self.is_open or now < self._next_event:
            return NOTHING
        match self.state:
            case ReceiverState.REVOKED:
                self._next_event = now + self.lease.seconds / 3
                return ReceiverActions((Revoke(transfer_id=self.transfer_id, reason="no answer yet"),))
            case ReceiverState.LOST:
                return self._end(Change.END_QUARANTINE)
            case ReceiverState.ATTACHED:
                return self._end(None)
        return NOTHING

    def _push(self, push: Push, num_payload_bytes: int, now: float) -> ReceiverActions:
        fault = self._fault_of(push, num_payload_bytes)
        if fault:
            return self.revoke(fault, now)
        self.lease.renew(now)
        missing = self._missing[push.group : push.group + push.num_groups]
        if all(of_group.isdisjoint(push.blocks) for of_group in missing):
            return NOTHING
        for of_group in missing:
            of_group.difference_update(push.blocks)
        actions = self._attach_if_whole(now) if self.state is ReceiverState.COMMITTED else NOTHING
        return ReceiverActions(actions.messages, num_payload_bytes > 0, actions.change)

    def _fault_of(self, push: Push, num_payload_bytes: int) -> str | None:
        end = push.group + push.num_groups
        if not 0 <= push.group < end <= len(self._group_bytes):
            return f"layer groups {push.group} to {end} do not exist"
        if not self._reserved.issuperset(push.blocks):
            return "a block was pushed that is not reserved"
        wanted = 0 if push.transport in POOL_WRITERS else len(push.blocks) * sum(self._group_bytes[push.group : end])
        if num_payload_bytes != wanted:
            return f"a push brought {num_payload_bytes} bytes, not {wanted}"
        return None

    def _commit(self, commit: Commit, now: float) -> ReceiverActions:
        match self.state:
            case ReceiverState.ATTACHED:
                return ReceiverActions((Attached(transfer_id=self.transfer_id),))
            case ReceiverState.COMMITTED:
                return NOTHING
            case ReceiverState.ENDED:
                return self._reject("no such transfer here")
            case ReceiverState.REVOKED | ReceiverState.LOST:
                return self._reject("the lease was ended")
            case ReceiverState.RESERVED if commit.num_block_groups == len(self.blocks) * len(self._group_bytes):
                self.lease.renew(now)
                self.first_token_ids, self.checksums = commit.first_token_ids, commit.checksums
                self.state = ReceiverState.COMMITTED
                return self._attach_if_whole(now)
        reason = f"{commit.num_block_groups} block groups are committed, {len(self.blocks)} blocks reserved"
        return ReceiverActions(self._reject(reason).messages, change=self.revoke(reason, now).change)

    def _attach_if_whole(self, now: float) -> ReceiverActions:
        if any(self._missing):
            return NOTHING
        self.state = ReceiverState.ATTACHED
        self._missing.clear()
        self._next_event = now + LINGER_LEASES * self.lease.seconds
        return ReceiverActions((Attached(transfer_id=self.transfer_id),), change=Change.ATTACH)

    def _reject(self, reason: str) -> ReceiverActions:
        return ReceiverActions((Rejected(transfer_id=self.transfer_id, reason=reason),))

    def _cancelled(self) -> ReceiverActions:
        match self.state:
            case ReceiverState.RESERVED | ReceiverState.COMMITTED:
                return self._end(Change.GIVE_BACK)
            case ReceiverState.REVOKED | ReceiverState.LOST:
                return self._end(Change.END_QUARANTINE)
        return NOTHING

    def _sign_of_life(self, now: float) -> ReceiverActions:
        """Who was declared dead still writes: tell it, and wait a whole lease time again."""
        self._next_event = now + self.lease.seconds
        return ReceiverActions((Revoke(transfer_id=self.transfer_id, reason="you were declared dead"),))

    def _end(self, change: Change | None) -> ReceiverActions:
        self.state = ReceiverState.ENDED
        return ReceiverActions(change=change)


def answer_unknown(message: Message) -> Rejected | None:
    """What a decode worker says to a message about a transfer that it does not (or no longer) hold."""
    if isinstance(message, Push | Renew | Commit):
        return Rejected(transfer_id=message.transfer_id, reason="no such transfer here")
    return None
