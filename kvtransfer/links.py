"""Which transport leads to which decode worker: runs the probes (probe.py, loans.py) and pushes over what they found.

All effects of this part of the package are here: bytes are moved, messages are sent, time is measured. One trial of a
few MiB a `sweep` is the longest that anything here keeps the loop.
"""

import ctypes
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np
import zmq
from msgspec.structs import replace

from ..core.block_pool import BlockPool, OutOfBlocks
from ..core.compatibility import mismatch
from ..core.messages import (
    Commit,
    Link,
    Message,
    Peer,
    PeerInfo,
    ProbeDone,
    ProbeGrant,
    ProbeRequest,
    ProbeSent,
    ProbeVerdict,
    Push,
    Refused,
    TriedTransport,
    WorkerCard,
)
from ..core.part import Delivery, Payload, TransferFailed
from .loans import MAX_POOL_SHARE, Lender
from .pool_bytes import Mark, PoolMemory
from .probe import Probe, ProbeActions, Trial
from .transport import POOL_WRITERS, BlockCopy, Copying, Inbox, LinkDown, NotReachable, Transport

_log = logging.getLogger("crossdock.links")

GLANCE_SECONDS = 20e-6
"""From one look for the end of a copy to the next; threads that wait for the interpreter get it meanwhile.

Until a thread that waits for the copy had got it, once the loop has something to do, 5 ms could pass.
"""
PR_SET_TIMERSLACK = 29
PROBE_BYTES = 4 << 20
DIGEST_BYTES = 32


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A message behind a copy, since ``since``."""

    message: Message
    since: float

    def told_at(self, now: float) -> Message:
        """A commit that waited says so: the copy before it is what its `exposed_seconds` are about."""
        message = self.message
        if not isinstance(message, Commit):
            return message
        return replace(message, exposed_seconds=message.exposed_seconds + now - self.since)


class Links:
    """``me`` and ``card`` are this worker; ``post`` is its control mailbox, and like it never waits.

    ``transports`` are the allowed ones, and ``card`` lists theirs. ``memory`` is what ``pool`` counts. ``clock``
    measures the trials and must run like the ``now`` of all calls.
    """

    def __init__(
        self,
        me: Peer,
        card: WorkerCard,
        transports: Sequence[Transport],
        pool: BlockPool,
        memory: PoolMemory,
        post: Callable[[Peer, Message], None],
        lease_seconds: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        assert card.num_layer_groups == len(memory.groups), "the card counts the layer groups that exist"
        self._me = me
        self._card = card
        self._transports = {transport.card.name: transport for transport in transports}
        self._pool = pool
        self._memory = memory
        self._post = post
        self._lease_seconds = lease_seconds
        self._clock = clock
        # The loop, whose thread this is, looks for ends of copies at intervals of less than what Linux adds to a sleep.
        ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, ctypes.c_ulong(1))
        self._random = np.random.default_rng()
        self._router: Peer | None = None
        self._workers: dict[Peer, WorkerCard] = {}
        self._dead: set[Peer] = set()
        self._probes: dict[Peer, Probe] = {}
        self._refused: dict[Peer, Link] = {}
        self._lender = Lender(pool, lease_seconds)
        self._held_back: dict[Peer, deque[Copying | _Waiting]] = {}

    @property
    def is_copying(self) -> bool:
        """Messages may wait for a copy that is under way."""
        return bool(self._held_back)

    @property
    def inboxes(self) -> tuple[Inbox, ...]:
        """Where bulk arrives, to be polled next to the control mailbox."""
        return tuple(transport.inbox for transport in self._transports.values() if transport.inbox)

    def update(self, router: Peer, workers: Iterable[PeerInfo], now: float) -> None:
        """These workers live, says the router. It is told of all links again: it may be new, or have forgotten."""
        self._router = router
        present = {info.peer: info.card for info in workers if info.peer != self._me}
        for peer in self._workers.keys() - present.keys():
            self._lose(peer, now)
        self._workers = present
        self._dead -= present.keys()
        for peer, card in present.items():
            if self._card.role.prefills and card.role.decodes:
                self._meet(peer, card)
        for link in [*self._refused.values(), *(probe.link for probe in self._probes.values())]:
            self._report(link)

    def wait(self, poller: zmq.Poller, seconds: float) -> None:
        """Until something arrives that ``poller`` knows, for at most ``seconds``.

        It is for a moment where `sweep` has to look for the end of a copy.
        """
        is_moving = any(transport.is_moving for transport in self._transports.values())
        if not is_moving and all(_wakes(waiting[0]) for waiting in self._held_back.values()):
            poller.poll(round(1000 * seconds))
        elif not poller.poll(0):
            time.sleep(min(seconds, GLANCE_SECONDS))

    def push(self, to: Peer, header: Push, source_blocks: list[int]) -> None:
        """Bring the header's layer groups of own blocks to ``header.blocks``. Raises `TransferFailed`."""
        probe = self._probes.get(to)
        if probe is None or not probe.is_linked or probe.link is None:
            raise TransferFailed(f"there is no link to {to.incarnation}")
        transport = self._transports[probe.link.transport]
        header = replace(header, transport=probe.link.transport)
        copy = BlockCopy(source_blocks, header.blocks, self._memory.layers_of(header))
        try:
            copying = transport.push(to, header, copy)
        except LinkDown as error:
            self._act(probe, probe.broken(str(error), self._clock()))
            raise
        if copying is not None and not copying.is_done:
            self._held_back.setdefault(to, deque()).append(copying)
        if header.transport in POOL_WRITERS:
            self.send(to, header)

    def send(self, to: Peer, message: Message) -> None:
        """Behind the copies to this peer that are under way.

        So a `Commit` comes after all it counts, and after a `Cancel` nothing is written any more.
        """
        if (waiting := self._held_back.get(to)) is not None:
            waiting.append(_Waiting(message, self._clock()))
        else:
            self._post(to, message)

    def land(self, header: Push, payload: Payload) -> Mark:
        """Launch the copy of an accepted push's payload to its place in the pool: there once the mark is passed."""
        return self._memory.land(header, payload)

    def handle(self, delivery: Delivery, now: float) -> bool:
        """A message of a probe, of either side, or a refusal to take part in one; false for any other."""
        sender = delivery.sender
        match delivery.message:
            case ProbeRequest() as request:
                self._requested(sender, request)
            case Refused(reason=reason):
                self._refused_by(sender, reason)
            case ProbeDone() as done:
                self._lender.done(done.probe_id, sender)
            case ProbeSent() as sent:
                self._judge(sent, delivery, now)
            case ProbeGrant() as grant:
                self._granted(sender, grant, now)
            case ProbeVerdict() as verdict:
                probe = self._probes.get(sender)
                if probe is not None:
                    self._act(probe, probe.judged(verdict, self._clock()))
            case _:
                return False
        return True

    def sweep(self, now: float) -> None:
        """Ends of copies, deadlines, and at most one trial; call it in every iteration of the loop."""
        for peer in list(self._held_back):
            self._let_go(peer)
        for loan in self._lender.sweep(now):
            self.send(loan.borrower, loan.grant)
        for probe in self._probes.values():
            self._act(probe, probe.tick(now))
        due = next((probe for probe in self._probes.values() if probe.trial), None)
        if due is not None and due.trial is not None:
            self._try(due, due.trial)

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()

    def _let_go(self, peer: Peer) -> None:
        """Send what waited for copies that are done by now."""
        waiting = self._held_back[peer]
        while waiting:
            first = waiting[0]
            if isinstance(first, _Waiting):
                self._post(peer, first.told_at(self._clock()))
            elif not first.is_done:
                return
            waiting.popleft()
        del self._held_back[peer]

    def _meet(self, peer: Peer, card: WorkerCard) -> None:
        """Probe a decode worker that is new here, unless no KV may go there at all."""
        if peer in self._probes or peer in self._refused:
            return
        common = [name for name in self._transports if name in {offered.name for offered in card.transports}]
        error = mismatch(self._card, card) or ("" if common else "no transport in common")
        if error:
            self._refuse(peer, error)
            return
        block_bytes = self._card.layout.block_bytes
        self._probes[peer] = Probe(
            name=f"{self._me.incarnation}/{peer.incarnation}",
            peer=peer,
            transports=common,
            num_blocks=max(1, min(PROBE_BYTES // block_bytes, self._pool.num_blocks // MAX_POOL_SHARE)),
            card=self._card,
            lease_seconds=self._lease_seconds,
        )

    def _refuse(self, peer: Peer, error: str) -> None:
        """No KV goes there as long as that incarnation lives."""
        _log.warning("no KV goes to %s: %s", peer.address, error)
        self._refused[peer] = Link(to=peer.incarnation, transport="", error=error)

    def _refused_by(self, peer: Peer, reason: str) -> None:
        probe = self._probes.get(peer)
        if probe is not None and not probe.is_linked:
            del self._probes[peer]
            self._refuse(peer, f"it refuses: {reason}")
            self._report(self._refused[peer])

    def _lose(self, peer: Peer, now: float) -> None:
        self._probes.pop(peer, None)
        self._refused.pop(peer, None)
        self._dead.add(peer)
        self._lender.lose(peer, now)
        self._held_back.pop(peer, None)
        for transport in self._transports.values():
            transport.forget(peer)
        for inbox in self.inboxes:
            inbox.forget(peer)

    def _requested(self, peer: Peer, request: ProbeRequest) -> None:
        """Blocks lent on the late wish of a dead worker would never come back.

        What the router said of the peer is checked against what it says itself.
        """
        reason = mismatch(self._card, request.card, ("at the decode worker", "at the prefill worker"))
        if reason:
            _log.warning("refused KV from %s: %s", peer.address, reason)
            self.send(peer, Refused(reason=reason))
            return
        grant = self._lender.request(request, peer) if peer not in self._dead else None
        if grant is not None:
            self.send(peer, grant)

    def _granted(self, peer: Peer, grant: ProbeGrant, now: float) -> None:
        probe = self._probes.get(peer)
        if probe is None:
            self.send(peer, ProbeDone(probe_id=grant.probe_id))
        else:
            self._act(probe, probe.granted(grant, now))

    def _try(self, probe: Probe, trial: Trial) -> None:
        """Push random bytes from own blocks; without free ones the trial stays due."""
        try:
            blocks = self._pool.take(len(trial.blocks))
        except OutOfBlocks:
            return
        try:
            begun = self._push_random(probe, trial, blocks)
        except (NotReachable, TransferFailed) as error:
            self._act(probe, probe.failed(str(error), self._clock()))
        else:
            probe.sent(begun, self._clock())
        finally:
            self._pool.give_back(blocks)

    def _push_random(self, probe: Probe, trial: Trial, sources: list[int]) -> float:
        """When the push began. Raises `NotReachable`, `TransferFailed`."""
        self._open(probe.peer, trial.transport)
        layers = self._memory.all_layers
        payload = self._random.bytes(len(sources) * self._memory.layout.block_bytes)
        self._memory.write(sources, layers, payload)
        header = ProbeSent(
            probe_id=probe.probe_id,
            trial=trial.number,
            transport=trial.transport,
            num_blocks=len(sources),
            digest=blake2b(payload, digest_size=DIGEST_BYTES).digest(),
        )
        begun = self._clock()
        copying = self._transports[trial.transport].push(probe.peer, header, BlockCopy(sources, trial.blocks, layers))
        if copying is not None:
            copying.wait()
        if trial.transport in POOL_WRITERS:
            self.send(probe.peer, header)
        return begun

    def _open(self, peer: Peer, name: str) -> None:
        card = self._workers[peer]
        address = next(offered for offered in card.transports if offered.name == name)
        self._transports[name].open(peer, address, card.num_blocks)

    def _judge(self, sent: ProbeSent, delivery: Delivery, now: float) -> None:
        """Bring the bytes of a trial to their place if they travelled in the message, and compare what lies there."""
        loan = self._lender.find(sent, delivery.sender.incarnation, now)
        if loan is None:
            return
        begun = self._clock()
        is_correct = self._holds(loan.blocks[: sent.num_blocks], sent, delivery.payload)
        verdict = ProbeVerdict(
            probe_id=sent.probe_id,
            trial=sent.trial,
            is_correct=is_correct,
            check_seconds=self._clock() - begun,
        )
        self.send(loan.borrower, verdict)

    def _holds(self, blocks: list[int], sent: ProbeSent, payload: Payload) -> bool:
        layers = self._memory.all_layers
        wanted = 0 if sent.transport in POOL_WRITERS else len(blocks) * self._memory.layout.block_bytes
        if len(payload) != wanted:
            return False
        if len(payload):
            self._memory.write(blocks, layers, payload)
        return blake2b(self._memory.read(blocks, layers), digest_size=DIGEST_BYTES).digest() == sent.digest

    def _act(self, probe: Probe, actions: ProbeActions) -> None:
        for message in actions.messages:
            self.send(probe.peer, message)
        if actions.link is None:
            return
        link = probe.link = self._detailed(actions.link, probe.peer) if probe.is_linked else actions.link
        _log.info("%s to %s; tried: %s", link.transport or "no way", probe.peer.address, _told(link.tried))
        for name, transport in self._transports.items():
            if name != link.transport:
                transport.forget(probe.peer)
        self._report(link)

    def _detailed(self, link: Link, peer: Peer) -> Link:
        """With what the transports that work, and are open still, tell of the way to the peer."""
        details = {tried.name: self._transports[tried.name].detail(peer) for tried in link.tried if not tried.error}
        return replace(link, tried=tuple(replace(tried, detail=details.get(tried.name, "")) for tried in link.tried))

    def _report(self, link: Link | None) -> None:
        if self._router is not None and link is not None:
            self.send(self._router, link)


def _wakes(first: Copying | _Waiting) -> bool:
    return isinstance(first, _Waiting) or first.wakes


def _told(tried: Iterable[TriedTransport]) -> str:
    return ", ".join(_outcome(transport) for transport in tried) or "none"


def _outcome(tried: TriedTransport) -> str:
    if tried.error:
        return f"{tried.name}: {tried.error}"
    rate, latency = tried.bytes_per_second / 1e9, tried.latency_seconds * 1e6
    return f"{tried.name} {rate:.2f} GB/s {latency:.0f} us" + (f" ({tried.detail})" if tried.detail else "")
