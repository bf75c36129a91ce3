"""Trying the transports from one prefill worker to one decode worker, as the prefill side sees it; pure.

::

    WAITING ── ProbeRequest ──> REQUESTED ── ProbeGrant ──> DUE <── ProbeVerdict ── AWAITING
       ^                        │ asks anew                  │ ─── bytes, ProbeSent ──^ │ no answer: transport failed
       │                        │ every lease time           │                          │
       └── none works, back-off ┴────────────────────────────┴── all trials made: ProbeDone, Link ──> LINKED
       ^                                                                                                │
       └── the transport broke, back-off ───────────────────────────────────────────────────────────────┘

The peer lends blocks (loans.py). A transport is tried `NUM_ROUNDS` times with one of them, which also warms it up,
and as often with all of them, with fresh random bytes each time; the peer compares their digest. One wrong verdict,
or none, rules the transport out. Its rate and latency are those of its best round, and the fastest that is left
becomes the link. Two thirds of a lease time after its last message to the peer a probe stops using the lent blocks.
A grant for a probe that has ended is handed back with `ProbeDone`.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from ..core.messages import (
    Link,
    Message,
    Peer,
    ProbeDone,
    ProbeGrant,
    ProbeRequest,
    ProbeVerdict,
    TriedTransport,
    WorkerCard,
)

NUM_ROUNDS = 3
BACK_OFF_SECONDS = (1.0, 2.0, 4.0, 8.0, 16.0, 30.0)


class ProbeState(Enum):
    WAITING = auto()
    REQUESTED = auto()
    DUE = auto()
    AWAITING = auto()
    LINKED = auto()


@dataclass(frozen=True, slots=True)
class Trial:
    """Fill own blocks with random bytes, push them to ``blocks``, and say `Probe.sent` or `Probe.failed`."""

    number: int
    transport: str
    blocks: list[int]


@dataclass(slots=True)
class _Measured:
    """Best seconds from the start of a push to its verdict."""

    one_block: float = inf
    all_blocks: float = inf


@dataclass(frozen=True, slots=True)
class ProbeActions:
    """Messages to the decode worker, and the news for the router."""

    messages: tuple[Message, ...] = ()
    link: Link | None = None


NOTHING = ProbeActions()


class Probe:
    """``transports`` are those that both sides have; ``num_blocks`` are wanted, at least 1.

    ``name`` makes this worker's probe ids unique, ``card`` is its own.
    """

    def __init__(
        self,
        name: str,
        peer: Peer,
        transports: Sequence[str],
        num_blocks: int,
        card: WorkerCard,
        lease_seconds: float,
    ) -> None:
        self.peer = peer
        self.state = ProbeState.WAITING
        self.link: Link | None = None
        self._name = name
        self._transports = transports
        self._num_blocks = num_blocks
        self._card = card
        self._lease_seconds = lease_seconds
        self._num_attempts = 0
        self._next_event = 0.0
        self._blocks: list[int] = []
        self._trials: deque[Trial] = deque()
        self._begun = 0.0
        self._last_contact = 0.0
        self._measured: dict[str, _Measured] = {}
        self._errors: dict[str, str] = {}

    @property
    def probe_id(self) -> str:
        return f"{self._name}/{self._num_attempts}"

    @property
    def is_linked(self) -> bool:
        return self.state is ProbeState.LINKED

    @property
    def trial(self) -> Trial | None:
        """The trial to make now."""
        return self._trials[0] if self.state is ProbeState.DUE else None

    def tick(self, now: float) -> ProbeActions:
        """Requests, repetitions and timeouts; call it in every iteration of the loop."""
        if now < self._next_event:
            return NOTHING
        match self.state:
            case ProbeState.WAITING | ProbeState.REQUESTED:
                return self._request(now)
            case ProbeState.DUE:
                return self._give_up("this worker had no free blocks", now)
            case ProbeState.AWAITING:
                return self.failed("no verdict in time", now)
        return NOTHING

    def granted(self, grant: ProbeGrant, now: float) -> ProbeActions:
        """The peer lends blocks. A grant for an ended probe is handed back."""
        if grant.probe_id != self.probe_id or self.state in (ProbeState.WAITING, ProbeState.LINKED):
            return ProbeActions((ProbeDone(probe_id=grant.probe_id),))
        if self.state is not ProbeState.REQUESTED or not grant.blocks:
            return NOTHING
        self._blocks = grant.blocks
        self._measured = {}
        self._errors = {}
        self._trials.clear()
        for transport in self._transports:
            for blocks in [grant.blocks[:1]] * NUM_ROUNDS + [grant.blocks] * NUM_ROUNDS:
                self._trials.append(Trial(len(self._trials), transport, blocks))
        return self._next_trial(now)

    def sent(self, begun: float, now: float) -> None:
        """The bytes of the trial are under way since ``begun``."""
        self.state = ProbeState.AWAITING
        self._begun = begun
        self._last_contact = now
        self._next_event = now + self._lease_seconds / 3

    def failed(self, reason: str, now: float) -> ProbeActions:
        """The transport of the current trial does not work."""
        transport = self._trials[0].transport
        self._errors[transport] = reason
        self._measured.pop(transport, None)
        self._trials = deque(trial for trial in self._trials if trial.transport != transport)
        return self._next_trial(now)

    def broken(self, reason: str, now: float) -> ProbeActions:
        """The transport of the link does not work any more: there is none until a new probe has found one."""
        if not self.is_linked or self.link is None:
            return NOTHING
        self._errors = {self.link.transport: reason}
        self._measured = {}  # long ago
        return self._give_up(reason, now)

    def judged(self, verdict: ProbeVerdict, now: float) -> ProbeActions:
        """The peer has compared; late and repeated verdicts change nothing."""
        is_awaited = self.state is ProbeState.AWAITING and verdict.probe_id == self.probe_id
        if not is_awaited or verdict.trial != self._trials[0].number:
            return NOTHING
        if not verdict.is_correct:
            return self.failed("wrong bytes arrived", now)
        trial = self._trials.popleft()
        seconds = max(now - self._begun - verdict.check_seconds, 1e-9)
        measured = self._measured.setdefault(trial.transport, _Measured())
        if len(trial.blocks) == 1:
            measured.one_block = min(measured.one_block, seconds)
        if len(trial.blocks) == len(self._blocks):
            measured.all_blocks = min(measured.all_blocks, seconds)
        return self._next_trial(now)

    def _request(self, now: float) -> ProbeActions:
        """Ask under a new id, so that a grant belongs to this request and can't be older than it.

        However long the grant is under way, the blocks were lent after now: the borrower counts from here.
        """
        withdrawn = (ProbeDone(probe_id=self.probe_id),) if self.state is ProbeState.REQUESTED else ()
        self.state = ProbeState.REQUESTED
        self._num_attempts += 1
        self._last_contact = now
        self._next_event = now + self._lease_seconds
        request = ProbeRequest(probe_id=self.probe_id, card=self._card, num_blocks=self._num_blocks)
        return ProbeActions((*withdrawn, request))

    def _next_trial(self, now: float) -> ProbeActions:
        if not self._trials:
            return self._settle(now)
        deadline = self._last_contact + self._lease_seconds * 2 / 3
        if now >= deadline:  # the blocks may be somebody else's by now
            return self._give_up("this worker stood still for too long", now)
        self.state = ProbeState.DUE
        self._next_event = deadline
        return NOTHING

    def _settle(self, now: float) -> ProbeActions:
        if not self._measured:
            return self._give_up("; ".join(f"{name}: {why}" for name, why in self._errors.items()), now)
        tried = self._tried()
        best = max((outcome for outcome in tried if not outcome.error), key=lambda outcome: outcome.bytes_per_second)
        return self._end(
            ProbeState.LINKED,
            Link(
                to=self.peer.incarnation,
                transport=best.name,
                bytes_per_second=best.bytes_per_second,
                latency_seconds=best.latency_seconds,
                tried=tried,
            ),
        )

    def _tried(self) -> tuple[TriedTransport, ...]:
        """In the order of trial; those that were not reached are missing."""
        num_bytes = len(self._blocks) * self._card.layout.block_bytes
        outcomes = {name: TriedTransport(name, error=reason) for name, reason in self._errors.items()}
        for name, best in self._measured.items():
            if best.all_blocks < inf:
                outcomes[name] = TriedTransport(name, num_bytes / best.all_blocks, best.one_block)
        return tuple(outcomes[name] for name in self._transports if name in outcomes)

    def _give_up(self, reason: str, now: float) -> ProbeActions:
        self._next_event = now + BACK_OFF_SECONDS[min(self._num_attempts, len(BACK_OFF_SECONDS)) - 1]
        link = Link(to=self.peer.incarnation, transport="", error=reason, tried=self._tried())
        return self._end(ProbeState.WAITING, link)

    def _end(self, state: ProbeState, link: Link) -> ProbeActions:
        self.state = state
        self.link = link
        self._trials.clear()
        return ProbeActions((ProbeDone(probe_id=self.probe_id),), link)
