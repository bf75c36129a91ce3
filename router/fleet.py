"""The router's view of all workers: role, load, liveness, and which of them work together.

Pure bookkeeping: time is an argument, and whoever calls sends the messages. A worker is known by its
incarnation; the address is trusted only together with it, and a new incarnation at an address voids the
old one at once.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from ..core.compatibility import difference, mismatch
from ..core.messages import Incarnation, Link, Peer, PeerInfo, Peers, PoolBooks, Refused, WorkerCard, WorkerLoad

MAX_REFUSALS = 16
"""So many are remembered, for people to read."""


@dataclass(slots=True)
class Unreported:
    """What a worker was sent since its last heartbeat, so that a burst spreads before the load shows it."""

    num_prompt_tokens: int = 0
    num_sequences: int = 0
    num_blocks: int = 0


@dataclass(slots=True, eq=False)
class Worker:
    """One live incarnation, equal to itself alone.

    ``links`` are the outcomes of its probes, as a prefill worker, of decode workers.
    """

    peer: Peer
    card: WorkerCard
    heard_at: float
    load: WorkerLoad
    links: dict[Incarnation, Link] = field(default_factory=dict)
    unreported: Unreported = field(default_factory=Unreported)

    @property
    def incarnation(self) -> Incarnation:
        return self.peer.incarnation

    @property
    def name(self) -> str:
        return _name(self.peer)

    @property
    def reached(self) -> list[Incarnation]:
        """The decode workers to which KV can travel from here."""
        return [incarnation for incarnation, link in self.links.items() if not link.error]

    @property
    def num_queued_prompt_tokens(self) -> int:
        return self.load.num_queued_prompt_tokens + self.unreported.num_prompt_tokens

    @property
    def num_sequences(self) -> int:
        return _num_requests(self.load) + self.unreported.num_sequences

    @property
    def num_available_blocks(self) -> int:
        """Free or evictable blocks that nobody was promised; below 0 when requests will wait for blocks."""
        return self.load.books.free + self.load.books.cached - self.unreported.num_blocks


@dataclass(frozen=True, slots=True)
class Pair:
    """Two workers that can serve a request together; a mixed worker is a pair with itself."""

    prefill: Worker
    decode: Worker

    @property
    def is_one_worker(self) -> bool:
        return self.prefill is self.decode

    def max_choices(self, num_prompt_tokens: int) -> int:
        """So many may share one computed prompt."""
        return min(worker.card.max_choices(num_prompt_tokens) for worker in (self.prefill, self.decode))

    @property
    def max_model_len(self) -> int:
        return min(self.prefill.card.max_model_len, self.decode.card.max_model_len)


@dataclass(frozen=True, slots=True)
class Joined:
    """The answer to a `Hello` that is welcome; everybody must hear of a change."""

    is_new: bool
    is_change: bool


@dataclass(frozen=True, slots=True)
class Refusal:
    """A worker that could not join, and when it last tried."""

    peer: Peer
    reason: str
    at: float

    @property
    def name(self) -> str:
        return _name(self.peer)


class Fleet:
    """All live workers. Each method that removes a worker returns it: its requests are the caller's to end.

    ``model`` is the one whose tokens the router speaks (`ModelFingerprint`); ``None`` leaves it to the first worker.
    """

    def __init__(self, dead_after_seconds: float, model: str | None = None) -> None:
        self._dead_after = dead_after_seconds
        self._model = model
        self._refusals: dict[str, Refusal] = {}
        self._workers: dict[Incarnation, Worker] = {}

    def __iter__(self) -> Iterator[Worker]:
        return iter(self._workers.values())

    def __len__(self) -> int:
        return len(self._workers)

    @property
    def card(self) -> WorkerCard | None:
        """Of the longest-standing worker, whose model and layout are everybody's; ``None`` while the fleet is empty."""
        return next((worker.card for worker in self), None)

    def find(self, peer: Peer) -> Worker | None:
        worker = self._workers.get(peer.incarnation)
        return worker if worker is not None and worker.peer == peer else None

    def remove_former(self, peer: Peer) -> Worker | None:
        """The worker that an earlier incarnation at this address was: it is dead, whatever becomes of the new one."""
        former = next((worker for worker in self if worker.peer.address == peer.address), None)
        if former is None or former.peer == peer:
            return None
        self.remove(former)
        return former

    def join(self, peer: Peer, card: WorkerCard, now: float) -> Joined | Refused:
        """A `Hello`: a new worker, a known one that repeats itself, or one that changed its role."""
        reason = self._mismatch(peer, card)
        if reason:
            return Refused(reason=reason)
        self._refusals.pop(peer.address, None)
        known = self.find(peer)
        if known is not None:
            known.heard_at = now
            is_change, known.card = known.card != card, card
            return Joined(is_new=False, is_change=is_change)
        load = WorkerLoad(books=PoolBooks(free=card.num_blocks, cached=0, leased=0, quarantined=0))
        self._workers[peer.incarnation] = Worker(peer, card, now, load)
        return Joined(is_new=True, is_change=True)

    def refuse(self, peer: Peer, reason: str, now: float) -> bool:
        """Remember it; false if the same was known."""
        known = self._refusals.pop(peer.address, None)
        self._refusals[peer.address] = Refusal(peer, reason, now)
        if len(self._refusals) > MAX_REFUSALS:
            del self._refusals[next(iter(self._refusals))]
        return known is None or (known.peer, known.reason) != (peer, reason)

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """Of workers that have not joined since; the newest comes last."""
        return tuple(self._refusals.values())

    def _mismatch(self, peer: Peer, card: WorkerCard) -> str:
        """Why this worker can't serve the router's model or exchange KV with the others, who are all alike."""
        if self._model is not None and card.model != self._model:
            return difference("model", self._model, card.model, ("at the router", "at the worker"))
        other = next((worker for worker in self if worker.peer != peer), None)
        return mismatch(other.card, card, ("in the fleet", "at the worker")) if other is not None else ""

    def heard(self, peer: Peer, now: float) -> Worker | None:
        """Any message is a sign of life; ``None`` if the sender is unknown."""
        worker = self.find(peer)
        if worker is not None:
            worker.heard_at = now
        return worker

    def report(self, worker: Worker, load: WorkerLoad) -> None:
        """A `Heartbeat`: its load replaces what was only assumed since the last one."""
        worker.load = load
        worker.unreported = Unreported()

    def link(self, worker: Worker, link: Link) -> bool:
        """The outcome of probing a pair; false if it was known. A failed probe takes back an earlier success."""
        if link.to not in self._workers or worker.links.get(link.to) == link:
            return False
        worker.links[link.to] = link
        return True

    def remove(self, worker: Worker) -> None:
        del self._workers[worker.incarnation]
        for other in self:
            other.links.pop(worker.incarnation, None)

    def remove_silent(self, now: float) -> list[Worker]:
        """The workers not heard of for ``dead_after_seconds``; they are gone from the fleet."""
        silent = [worker for worker in self if now - worker.heard_at > self._dead_after]
        for worker in silent:
            self.remove(worker)
        return silent

    def pairs(self) -> list[Pair]:
        """All pairs that take a new request now: both alive, accepting, in role and linked."""
        return [
            Pair(prefill, decode)
            for prefill in self
            if prefill.load.is_accepting and prefill.card.role.prefills
            for decode in self._reached_by(prefill)
            if decode.load.is_accepting and decode.card.role.decodes
        ]

    def solo(self) -> list[Pair]:
        """Every worker that takes prompts, with itself: for requests that end with their prompt."""
        return [Pair(w, w) for w in self if w.load.is_accepting and w.card.role.prefills]

    def _reached_by(self, prefill: Worker) -> Iterator[Worker]:
        if prefill.card.role.decodes:
            yield prefill
        for incarnation in prefill.reached:
            other = self._workers[incarnation]
            # two workers that decode for each other could each keep KV for which the other has no room
            if incarnation != prefill.incarnation and not (prefill.card.role.decodes and other.card.role.prefills):
                yield other

    def max_model_len(self) -> int:
        """The longest prompt plus output that some usable pair can hold; 0 without a pair."""
        return max((pair.max_model_len for pair in self.pairs()), default=0)

    def roomiest(self) -> tuple[WorkerCard, ...]:
        """Both cards of the usable pair that holds the most choices over one prompt; empty without a pair."""
        each = [(pair.prefill.card, pair.decode.card) for pair in self.pairs()]
        return max(each, key=lambda cards: min((card.max_num_seqs, card.num_blocks) for card in cards), default=())

    def links(self) -> Iterator[tuple[Worker, Worker, Link]]:
        """From whom, to whom, and how: every pair that has been probed."""
        return ((one, self._workers[to], link) for one in self for to, link in one.links.items())

    def peers(self) -> Peers:
        return Peers(workers=[PeerInfo(worker.peer, worker.card) for worker in self])


def _name(peer: Peer) -> str:
    """Its address, as people read it."""
    return peer.address.removeprefix("tcp://")


def _num_requests(load: WorkerLoad) -> int:
    return load.num_waiting + load.num_running + load.num_arriving + load.num_kept_for_decode
