"""One transfer on the prefill side: a state machine without clock, socket or memory.

::

    start ── Offer ──> OFFERED ── Reservation ──> RESERVED ── finished, all pushed ──> COMMITTED ── Attached ──> ENDED
                       │ Offer again              │ pushes what is written             │ Commit again              ^
                       │ every third of a lease   │ Renew every third of it            │ every third of it         │
                       └──────────────────────────┴────────────────────────────────────┴── Cancel, Failed ─────────┘
                          Rejected, Revoke, cancel(); no answer for too long; the own lease expired

`SenderActions` say what to do: pushes first, then messages (all to the decode worker), then the outcome, which
comes exactly once; the blocks of the prompt may be released only then. Whatever fails says `Cancel`, the promise that
nothing of this transfer is written any more, and every later `Reservation` or `Revoke` is answered with it again.
Messages that are late, repeated or of another lease change nothing.
"""

from dataclasses import dataclass
from enum import Enum, auto

from ..core.messages import (
    Attached,
    Cancel,
    Commit,
    Incarnation,
    Message,
    Offer,
    Push,
    Rejected,
    Renew,
    Reservation,
    Revoke,
)
from ..core.request import TransferId
from .lease import Lease
from .plan import GroupBlocks, PushPlan

MAX_OFFERS = 90
"""Unanswered ones, three a lease time, so that a lost `Reservation` is repeated before its lease has run out.

A decode worker without room for so long is not worth holding the KV for.
"""
COMMIT_LEASES = 2
"""Lease times without an answer to `Commit` after which the transfer has failed."""
HOLDER_SHARE = 0.75
"""Part of the granted time that the holder uses: the rest covers a copy under way and the drift of clocks."""


class SenderState(Enum):
    OFFERED = auto()
    RESERVED = auto()
    COMMITTED = auto()
    ENDED = auto()


@dataclass(frozen=True, slots=True)
class Failed:
    """The transfer ended without result."""

    reason: str


@dataclass(frozen=True, slots=True)
class PushBlocks:
    """Push prompt blocks ``source`` (indices into the sequence's block list); `Links` names the transport."""

    header: Push
    source: range


@dataclass(frozen=True, slots=True)
class SenderActions:
    pushes: tuple[PushBlocks, ...] = ()
    messages: tuple[Message, ...] = ()
    outcome: Attached | Failed | None = None


NOTHING = SenderActions()


class Sender:
    """The prompt has ``num_blocks`` blocks (the last may be partial and travels whole) in ``num_groups`` layer groups.

    ``lease_seconds`` times the repetition of the offer; a lease itself runs as long as its `Reservation` says.
    ``min_pairs`` as in `PushPlan`.
    """

    def __init__(
        self,
        offer: Offer,
        num_blocks: int,
        num_groups: int,
        holder: Incarnation,
        lease_seconds: float,
        min_pairs: int = 1,
    ) -> None:
        self.state = SenderState.OFFERED
        self._offer = offer
        self._plan = PushPlan(num_blocks, num_groups, min_pairs)
        self._holder = holder
        self._lease_seconds = lease_seconds
        self._held: Lease | None = None
        self._num_offers = 0
        self._first_token_ids: list[int | None] = []
        self._finished_at = 0.0
        self._last_tick = 0.0
        self._next_message = 0.0
        self._commit_deadline = 0.0

    @property
    def transfer_id(self) -> TransferId:
        return self._offer.transfer_id

    @property
    def is_ended(self) -> bool:
        return self.state is SenderState.ENDED

    def start(self, now: float) -> SenderActions:
        """The prompt has begun to be computed: make the offer."""
        self._num_offers += 1
        self._last_tick = now
        self._next_message = now + self._lease_seconds / 3
        return SenderActions(messages=(self._offer,))

    def written(self, groups: range, num_blocks: int, now: float) -> SenderActions:
        """The first ``num_blocks`` prompt blocks hold these layer groups; only the last may be partial."""
        for group in groups:
            self._plan.write(group, num_blocks)
        return self._advance(now)

    def finish(self, first_token_ids: list[int | None], now: float) -> SenderActions:
        """The whole prompt is written and the first token of each choice is sampled."""
        self._plan.write_all()
        self._first_token_ids = first_token_ids
        self._finished_at = now
        return self._advance(now)

    def handle(self, message: Reservation | Attached | Rejected | Revoke, now: float) -> SenderActions:
        """A message of the decode worker about this transfer."""
        if self.is_ended:
            return _tell(answer_unknown(message))
        match message:
            case Reservation():
                return self._reserve(message, now)
            case Attached() if self.state is SenderState.COMMITTED:
                self.state = SenderState.ENDED
                return SenderActions(outcome=message)
            case Rejected() | Revoke():
                return self.cancel(message.reason)
        return NOTHING

    def cancel(self, reason: str) -> SenderActions:
        """Give up; nothing is written after this. Does nothing once the transfer has ended."""
        if self.is_ended:
            return NOTHING
        self.state = SenderState.ENDED
        return SenderActions(messages=(Cancel(transfer_id=self.transfer_id, reason=reason),), outcome=Failed(reason))

    def tick(self, now: float) -> SenderActions:
        """Deadlines and repetitions; call it many times in a lease time."""
        self._last_tick = now
        match self.state:
            case SenderState.OFFERED if now >= self._next_message:
                is_hopeless = self._num_offers >= MAX_OFFERS
                return self.cancel(f"no room within {MAX_OFFERS} offers") if is_hopeless else self.start(now)
            case SenderState.RESERVED:
                return self._keep_lease(now)
            case SenderState.COMMITTED if now >= self._commit_deadline:
                return self.cancel("no answer to the commit")
            case SenderState.COMMITTED if now >= self._next_message:
                return SenderActions(messages=(self._commit(now),))
        return NOTHING

    def _reserve(self, reservation: Reservation, now: float) -> SenderActions:
        if self.state is not SenderState.OFFERED:
            return NOTHING
        if not self._plan.fits(reservation.first_missing, reservation.blocks):
            return self.cancel("the reservation does not complete the prompt")
        self._plan.assign(reservation.first_missing, reservation.blocks)
        seconds = reservation.lease_seconds
        self._held = Lease(reservation.lease_id, reservation.generation, self._holder, seconds * HOLDER_SHARE, 0.0)
        self.state = SenderState.RESERVED
        # It may have lain in the mailbox while this worker stood still, but not since before the last tick.
        self._renewed(self._last_tick)
        return self._advance(now)

    def _advance(self, now: float) -> SenderActions:
        """Push what may be pushed, and commit after the last of it."""
        if self.state is not SenderState.RESERVED:
            return NOTHING
        if self._lease.is_expired(now):
            return self.cancel("the lease expired unused")
        pushes = tuple(self._push(blocks) for blocks in self._plan.take())
        if pushes:
            self._renewed(now)
        if not self._first_token_ids:
            return SenderActions(pushes)
        assert self._plan.is_complete, "a finished prompt is written in all layer groups"
        self.state = SenderState.COMMITTED
        self._commit_deadline = now + COMMIT_LEASES * self._granted_seconds
        return SenderActions(pushes, (self._commit(now),))

    def _keep_lease(self, now: float) -> SenderActions:
        if self._lease.is_expired(now):
            return self.cancel("the lease expired: this worker stood still for too long")
        if now < self._next_message:
            return NOTHING
        self._renewed(now)
        lease = self._lease
        renew = Renew(transfer_id=self.transfer_id, lease_id=lease.id, generation=lease.generation)
        return SenderActions(messages=(renew,))

    def _renewed(self, now: float) -> None:
        """A message that renews the lease goes out now."""
        self._lease.renew(now)
        self._next_message = now + self._granted_seconds / 3

    @property
    def _lease(self) -> Lease:
        assert self._held is not None, "a reservation brings its lease"
        return self._held

    @property
    def _granted_seconds(self) -> float:
        return self._lease.seconds / HOLDER_SHARE

    def _push(self, blocks: GroupBlocks) -> PushBlocks:
        header = Push(
            transfer_id=self.transfer_id,
            lease_id=self._lease.id,
            generation=self._lease.generation,
            group=blocks.group,
            blocks=blocks.destination,
            transport="",
            num_groups=blocks.num_groups,
        )
        return PushBlocks(header, blocks.source)

    def _commit(self, now: float) -> Commit:
        assert self._first_token_ids, "only a finished prompt is committed"
        self._next_message = now + self._granted_seconds / 3
        return Commit(
            transfer_id=self.transfer_id,
            lease_id=self._lease.id,
            generation=self._lease.generation,
            num_block_groups=self._plan.num_block_groups,
            first_token_ids=self._first_token_ids,
            exposed_seconds=now - self._finished_at,
        )


def _tell(message: Message | None) -> SenderActions:
    return SenderActions(messages=(message,)) if message else NOTHING


def answer_unknown(message: Message) -> Cancel | None:
    """What a prefill worker says to a message about a transfer that it does not (or no longer) hold.

    Without it the receiver of an attempt that nobody remembers could never free its blocks.
    """
    if isinstance(message, Reservation | Revoke):
        return Cancel(transfer_id=message.transfer_id, reason="no such transfer here")
    return None
