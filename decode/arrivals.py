"""Half-arrived requests: from a prefill worker's `Offer` to KV that is whole.

The life of an arrival::

    Offer ──no room yet──> queued ──room──> reserved ──every push and the Commit──> attached, handed on
              │                                │
              └── Abort, Cancel, dead peer ────┴──> ended; blocks that the sender may still write are quarantined
                                                    until it says that it is quiet, or is dead

An offer of a request with forks is one arrival; with the Commit each choice becomes a sequence of its own, over the
same blocks. A choice may be aborted alone, the arrival ends with the last of them.

The state of one transfer is the `Receiver`'s; this file gives and takes the blocks. Abort may overtake the Offer it
is meant for, so the ids of aborted requests are remembered for a while.
"""

from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count

from ..core.block_tables import BlockTables
from ..core.messages import (
    Cancel,
    Commit,
    Offer,
    Peer,
    Push,
    Rejected,
    Renew,
    WorkerCard,
)
from ..core.part import Checksums, Delivery, Handover, MayRun, Outbox, Payload, no_checksums
from ..core.request import Request, RequestId, TransferId
from ..core.sequence import Sequence, ending
from ..core.unfit import refuse_unfit
from ..kvtransfer.lease import LeaseBook
from ..kvtransfer.pool_bytes import PASSED, Mark
from ..kvtransfer.receiver import Change, Receiver, ReceiverActions, answer_unknown

TOMBSTONE_SECONDS = 30.0


@dataclass(slots=True, eq=False)
class Arrival:
    """One offered request; ``wanted`` are its choices that nobody has aborted.

    ``receiver`` exists once it has blocks. ``sequence`` owns them until it is handed on or ended; the receiver stays
    a while longer to answer what is repeated, and as long as its blocks are quarantined. The offer with its prompt
    does not stay. ``landing`` is behind the copies of all payloads so far. ``committed_at`` is when the first `Commit`
    came, which said ``exposed_seconds``. ``reminder`` is the number of the one that counts.
    """

    transfer_id: TransferId
    wanted: set[RequestId]
    priority: int
    router: Peer
    sender: Peer
    sequence: Sequence | None
    receiver: Receiver | None = None
    landing: Mark = PASSED
    heard_at: float = 0.0
    committed_at: float | None = None
    exposed_seconds: float = 0.0
    reminder: int = -1

    def goes_on(self, choice: Request, first_token_id: int) -> bool:
        return choice.request_id in self.wanted and ending(choice, first_token_id, 1) is None


class Arrivals:
    """All offered requests of one worker, those that wait for room by priority, then in the order in which they came.

    ``num_held_back()`` blocks are left free for running requests; ``attach`` takes over a request whose KV is whole.

    Those that are settled, attached or ended, stay for many seconds, so that there are hundreds of them: they are kept
    apart, and the loop looks at no arrival before it is due.
    """

    def __init__(
        self,
        card: WorkerCard,
        tables: BlockTables,
        outbox: Outbox,
        group_bytes: tuple[int, ...],
        lease_seconds: float,
        num_held_back: Callable[[], int],
        attach: Callable[[Handover], None],
        land: Callable[[Push, Payload], Mark],
        may_run: MayRun = lambda sequence: True,
        checksums: Checksums = no_checksums,
    ) -> None:
        self._card = card
        self._tables = tables
        self._outbox = outbox
        self._group_bytes = group_bytes
        self._lease_seconds = lease_seconds
        self._num_held_back = num_held_back
        self._attach = attach
        self._land = land
        self._may_run = may_run
        self._checksums = checksums
        self._leases = LeaseBook()
        self._arrivals: dict[TransferId, Arrival] = {}
        self._settled: dict[TransferId, Arrival] = {}
        self._reminders: list[tuple[float, int, Arrival]] = []
        self._numbers = count()
        self._queue: list[Arrival] = []
        self._no_room: tuple[Arrival, int, int] | None = None
        self._aborted: dict[RequestId, float] = {}

    @property
    def request_ids(self) -> set[RequestId]:
        """Of requests that are queued or whose KV is on its way."""
        return set().union(*(arrival.wanted for arrival in self._arrivals.values()))

    @property
    def num_arriving(self) -> int:
        return len(self.request_ids)

    @property
    def num_promised(self) -> int:
        """Blocks that the forks of requests on their way will need for copies."""
        return sum(self._num_copies(arrival) for arrival in self._arrivals.values() if arrival.receiver is not None)

    def _num_copies(self, arrival: Arrival) -> int:
        if arrival.sequence is None:
            return 0
        most = arrival.sequence.request.num_copies(self._tables.block_size)
        return max(0, min(most, len(arrival.wanted) - 1))

    def handle(self, delivery: Delivery, now: float) -> bool:
        match delivery.message:
            case Offer() as offer:
                self._take(offer, delivery.sender, now)
            case Push() | Renew() | Commit() | Cancel() as message:
                self._advance(message, delivery, now)
            case _:
                return False
        return True

    def _take(self, offer: Offer, sender: Peer, now: float) -> None:
        arrival = self._find(offer.transfer_id)
        if arrival is not None:
            if arrival.receiver is not None:
                self._act(arrival, arrival.receiver.offered(now))
            return
        request = offer.request
        wanted = {choice.request_id for choice in request.choices} - self._aborted.keys()
        reason = refuse_unfit(request, self._card) if wanted else "the request was aborted"
        if reason is not None:
            self._outbox.send(sender, Rejected(transfer_id=offer.transfer_id, reason=reason))
            return
        sequence = Sequence.of(request)
        if not self._tables.believe(sequence, offer.block_hashes):
            reason = "the block hashes are not those of the prompt"
            self._outbox.send(sender, Rejected(transfer_id=offer.transfer_id, reason=reason))
            return
        self._may_run(sequence)  # asked so early, its grammar compiles while its KV is on its way
        arrival = Arrival(offer.transfer_id, wanted, request.priority, offer.router, sender, sequence)
        self._arrivals[offer.transfer_id] = arrival
        insort(self._queue, arrival, key=lambda queued: queued.priority)
        self.reserve(now)

    def reserve(self, now: float) -> None:
        """Answer queued offers, in order, as long as there is room.

        The first is tried again when something has changed: to look for its prefix takes 0.1 ms.
        """
        while self._queue and (state := self._state_of_queue()) != self._no_room:
            if self._reserve(self._queue[0], now):
                self._queue.pop(0)
            else:
                self._no_room = state

    def _state_of_queue(self) -> tuple[Arrival, int, int]:
        """The first offer, and what decides whether there is room for it.

        A prefix that is published meanwhile counts too, but belongs to somebody whose end makes room.
        """
        first = self._queue[0]
        return first, self._num_copies(first), self._tables.pool.num_available - self._num_held_back()

    def _reserve(self, arrival: Arrival, now: float) -> bool:
        """Blocks for the whole prompt: what this worker's prefix cache holds, and new ones for the rest.

        There must be room for the copies that its forks need, too.
        """
        sequence, tables = arrival.sequence, self._tables
        assert sequence is not None, "a queued arrival has its sequence"
        tables.reuse(sequence, sequence.num_prompt)
        first_missing = len(sequence.blocks)
        missing = tables.num_missing(sequence, sequence.num_prompt) + self._num_copies(arrival)
        if missing > tables.pool.num_available - self._num_held_back():
            tables.reset(sequence)
            return False
        tables.grow(sequence, sequence.num_prompt)
        lease = self._leases.grant(arrival.sender.incarnation, self._lease_seconds, now)
        blocks = sequence.blocks[first_missing:]
        arrival.receiver = Receiver(arrival.transfer_id, lease, first_missing, blocks, self._group_bytes)
        self._remind(arrival)
        self._act(arrival, arrival.receiver.offered(now))
        return True

    def _find(self, transfer_id: TransferId) -> Arrival | None:
        return self._arrivals.get(transfer_id) or self._settled.get(transfer_id)

    def _advance(self, message: Push | Renew | Commit | Cancel, delivery: Delivery, now: float) -> None:
        arrival = self._find(message.transfer_id)
        if isinstance(message, Commit) and not self._is_sound(message, arrival):
            return  # malformed; the lease will run out
        if arrival is None:
            # a push comes from a bulk address, where nobody listens for control; its commit gets the answer
            if not isinstance(message, Push) and (answer := answer_unknown(message)):
                self._outbox.send(delivery.sender, answer)
        elif arrival.receiver is not None:
            arrival.heard_at = now
            if isinstance(message, Commit) and arrival.committed_at is None:
                arrival.committed_at, arrival.exposed_seconds = now, message.exposed_seconds
            self._act(arrival, arrival.receiver.handle(delivery, now), delivery)
        elif isinstance(message, Cancel) and delivery.sender.incarnation == arrival.sender.incarnation:
            self._unqueue(arrival)

    def _is_sound(self, commit: Commit, arrival: Arrival | None) -> bool:
        """Tokens of the vocabulary, or none, one a choice."""
        ids, sequence = commit.first_token_ids, arrival.sequence if arrival is not None else None
        if sequence is not None and len(ids) != 1 + len(sequence.request.forks):
            return False
        return all(token_id is None or 0 <= token_id < self._card.vocab_size for token_id in ids)

    def _act(self, arrival: Arrival, actions: ReceiverActions, delivery: Delivery | None = None) -> None:
        """Do what the transfer's state machine asks for after ``delivery``, or by itself."""
        if actions.lands:
            assert delivery is not None and isinstance(delivery.message, Push), "only a push brings bytes"
            arrival.landing = self._land(delivery.message, delivery.payload)
        if actions.change is not None:
            # no step reads these blocks, and nobody else gets them, before all that was launched for them has run
            arrival.landing.synchronize()
        if actions.change is Change.ATTACH and not self._is_intact(arrival):
            assert arrival.receiver is not None, "an attachment comes from the receiver"
            actions = arrival.receiver.refuse_corrupted()
        if actions.change is not None:
            self._change(arrival, actions.change)
        for message in actions.messages:
            self._outbox.send(arrival.sender, message)

    def _is_intact(self, arrival: Arrival) -> bool:
        receiver = arrival.receiver
        if receiver is None or not receiver.checksums:
            return True
        return receiver.checksums == self._checksums(receiver.blocks)

    def _change(self, arrival: Arrival, change: Change) -> None:
        receiver, sequence, tables = arrival.receiver, arrival.sequence, self._tables
        assert receiver is not None, "a change comes from the receiver"
        self._remind(arrival)
        if change is Change.END_QUARANTINE:
            tables.pool.end_quarantine(receiver.blocks)
            return
        assert sequence is not None, "the blocks leave the arrival once"
        arrival.sequence = None
        self._settled[arrival.transfer_id] = self._arrivals.pop(arrival.transfer_id)
        if change is Change.ATTACH:
            self._hand_on(sequence, arrival, receiver.first_token_ids)
            return
        if change is Change.QUARANTINE:
            del sequence.blocks[len(sequence.blocks) - len(receiver.blocks) :]
            tables.pool.quarantine(receiver.blocks)
        tables.release(sequence)

    def _hand_on(self, sequence: Sequence, arrival: Arrival, first_token_ids: list[int | None]) -> None:
        """The prompt's KV is whole: from here on every choice decodes like any other request."""
        sequence.num_scheduled = sequence.num_computed = sequence.num_prompt
        self._tables.publish(sequence)
        going_on = [
            token_id if token_id is not None and arrival.goes_on(choice, token_id) else None
            for choice, token_id in zip(sequence.request.choices, first_token_ids, strict=True)
        ]
        assert arrival.committed_at is not None, "nothing attaches without a commit"
        transfer_seconds = arrival.exposed_seconds + arrival.heard_at - arrival.committed_at
        for choice in self._tables.split(sequence, going_on):
            self._attach(Handover(choice, arrival.router, arrival.heard_at, transfer_seconds))

    def _unqueue(self, arrival: Arrival) -> None:
        """Forget an offer that never got blocks."""
        self._queue.remove(arrival)
        del self._arrivals[arrival.transfer_id]

    # --- ends ----------------------------------------------------------------------------------

    def abort(self, request_id: RequestId, now: float) -> None:
        """The client is gone, or the other leg failed; an offer still on its way will be rejected."""
        self._aborted.pop(request_id, None)  # those that stay the longest are last
        self._aborted[request_id] = now + TOMBSTONE_SECONDS
        for arrival in [arrival for arrival in self._arrivals.values() if request_id in arrival.wanted]:
            arrival.wanted.remove(request_id)
            if not arrival.wanted:
                self._revoke(arrival, "aborted by the client", now)

    def lose(self, peer: Peer, now: float) -> None:
        """A dead sender pushes no more, a dead router reads no tokens."""
        for arrival in [*self._arrivals.values(), *self._settled.values()]:
            if arrival.sender != peer:
                continue
            if arrival.receiver is None:
                self._unqueue(arrival)
            else:
                self._act(arrival, arrival.receiver.lose(now))
        for arrival in [arrival for arrival in self._arrivals.values() if arrival.router == peer]:
            self._revoke(arrival, "the router is gone", now)

    def sweep(self, now: float) -> None:
        """Deadlines of leases; then room that has become free goes to queued offers."""
        while self._reminders and self._reminders[0][0] <= now:
            _, number, arrival = heappop(self._reminders)
            if number == arrival.reminder:
                self._tick(arrival, now)
        while self._aborted and next(iter(self._aborted.values())) <= now:
            del self._aborted[next(iter(self._aborted))]
        self.reserve(now)

    def _remind(self, arrival: Arrival) -> None:
        """Look at it when it is due; what was said before counts no more."""
        assert arrival.receiver is not None, "who waits for room has no deadline"
        arrival.reminder = next(self._numbers)
        heappush(self._reminders, (arrival.receiver.due, arrival.reminder, arrival))

    def _tick(self, arrival: Arrival, now: float) -> None:
        receiver = arrival.receiver
        assert receiver is not None, "who waits for room has no deadline"
        if receiver.is_ended:
            self._leases.end(receiver.lease)
            del self._settled[arrival.transfer_id]
        else:
            self._act(arrival, receiver.tick(now))
            self._remind(arrival)

    def _revoke(self, arrival: Arrival, reason: str, now: float) -> None:
        if arrival.receiver is None:
            self._outbox.send(arrival.sender, Rejected(transfer_id=arrival.transfer_id, reason=reason))
            self._unqueue(arrival)
        elif arrival.sequence is not None:
            self._act(arrival, arrival.receiver.revoke(reason, now))
