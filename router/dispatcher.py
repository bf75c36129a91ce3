"""The router's end of the control plane: sends requests to pairs of workers and brings back what they say.

`Dispatcher.handle` takes one message, `Dispatcher.tick` the passing of time; both are synchronous.
`Dispatcher.run` is the task that feeds them from the mailbox.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import lru_cache

from ..core.block_hash import BlockHasher, model_root
from ..core.compatibility import protocol_mismatch
from ..core.config import RouterConfig
from ..core.kv_layout import KvLayout
from ..core.mailbox import AsyncMailbox
from ..core.messages import (
    Abort,
    CacheEvents,
    CacheSnapshot,
    Heartbeat,
    Hello,
    Inquiry,
    Link,
    Message,
    NotHeld,
    Peer,
    PromptLogprobs,
    Refused,
    RequestFailed,
    SnapshotRequest,
    TokenDelta,
    Tokens,
    WhoAreYou,
)
from ..core.part import Delivery
from ..core.request import Request, RequestId
from .fleet import Fleet, Pair, Worker
from .ledger import Attempt, Entry, Failure, Ledger
from .metrics import EndReason, RouterMetrics
from .placement import Demand, NoCapacity, Placement, place, record
from .prefix_map import PrefixMap
from .turns import Turns

TICK_SECONDS = 1.0
MAX_WAITING = 10_000
"""Pieces of deliveries; beyond, the router has fallen behind its workers for good."""

_log = logging.getLogger("crossdock.router")


class Dispatcher:
    """Owns the fleet, the prefix map and the ledger; the only one who sends to workers."""

    def __init__(
        self,
        config: RouterConfig,
        mailbox: AsyncMailbox,
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.fleet = Fleet(config.dead_after_seconds, config.fingerprint)
        self.prefixes = PrefixMap()
        self.ledger = Ledger()
        self._config = config
        self._mailbox = mailbox
        self._metrics = metrics
        self._clock = clock
        self._turns = Turns()
        self._has_turns = asyncio.Event()
        self._has_caught_up = asyncio.Event()
        self._num_placed = 0
        self._ticked_at = self._told_at = clock()
        metrics.watch(self.fleet, self.ledger, self.prefixes, lambda: mailbox.num_rejected)

    # --- requests ------------------------------------------------------------------------------

    def open(self, entries: Sequence[Entry]) -> NoCapacity | None:
        """Send all choices of one HTTP request on their way, or none of them and say why.

        Choices of one prompt go to one pair, which computes the prompt once: they differ by their seeds alone.
        """
        groups: dict[tuple[bytes, bytes], list[Entry]] = {}
        for entry in entries:
            groups.setdefault((entry.request.prompt, entry.request.salt), []).append(entry)
        pairs: list[Pair] = []
        for group in groups.values():
            placement = self._place(group)
            if isinstance(placement, NoCapacity):
                self._metrics.counts.refusals += 1
                return placement
            pairs.append(placement.pair)
        now = self._clock()
        for group, pair in zip(groups.values(), pairs, strict=True):
            self._begin(group, pair, now)
            self._metrics.placed(group, now)
        return None

    def _place(self, group: Sequence[Entry], avoid: Sequence[Pair] = ()) -> Placement | NoCapacity:
        """Choose a pair for entries of one prompt and count them in at it."""
        request = group[0].request
        pairs = self.fleet.pairs() if request.pooling is None else self.fleet.solo()
        hashes = self._hashes(request) if len(pairs) > 1 else []
        longest = max(entry.request.max_total_tokens for entry in group)
        demand = Demand(request.num_prompt_tokens, longest, len(group))
        placement = place(demand, pairs, self.prefixes.num_cached(hashes), self._num_placed, avoid)
        if isinstance(placement, Placement):
            self._num_placed += 1
            record(placement, demand)
        return placement

    def _hashes(self, request: Request) -> list[bytes]:
        card, key = self.fleet.card, self._config.cluster_key
        assert card is not None, "there is a pair, so there are workers"
        return _hasher(key, card.model, card.layout, card.weights).hashes(request.prompt, request.salt)

    def _begin(self, group: Sequence[Entry], pair: Pair, now: float) -> None:
        """In as few tasks as the pair allows."""
        at_once = max(1, pair.max_choices(group[0].request.num_prompt_tokens))
        for start in range(0, len(group), at_once):
            self._mailbox.send(pair.prefill.peer, self.ledger.begin(group[start : start + at_once], pair, now))

    def release(self, entry: Entry, reason: EndReason) -> None:
        """The client needs no more of this choice; both legs free what they hold. Idempotent."""
        if self._end(entry, reason):
            self._abort(entry.attempt)
            self._close(entry, reason, self._clock())

    def _end(self, entry: Entry, outcome: str, is_failure: bool = False) -> bool:
        """The current attempt is over; false if it was already."""
        if not self.ledger.end(entry):
            return False
        if entry.trace is not None:
            entry.trace.end_attempt(entry, outcome, is_failure)
        return True

    def _close(self, entry: Entry, reason: EndReason, now: float) -> None:
        """No attempt follows."""
        entry.end_reason = reason
        self._metrics.ended(entry, reason, now)

    def _abort(self, attempt: Attempt) -> None:
        for leg in attempt.legs:
            if self.fleet.find(leg.peer) is leg:
                self._mailbox.send(leg.peer, Abort(request_id=attempt.request_id))

    def _fail(self, entry: Entry, failure: Failure, now: float) -> None:
        """An attempt failed: the other leg stops at once, and the request starts elsewhere or ends."""
        if not self._end(entry, failure.reason, is_failure=True):
            return
        self._abort(entry.attempt)
        if failure.is_retryable and self._retry(entry, now):
            return
        self._close(entry, EndReason.ERROR, now)
        entry.sink.fail(entry, failure)

    def _retry(self, entry: Entry, now: float) -> bool:
        if not entry.can_restart or len(entry.attempts) >= self._config.max_attempts:
            return False
        placement = self._place([entry], avoid=[attempt.pair for attempt in entry.attempts])
        if isinstance(placement, NoCapacity):
            return False
        self._metrics.counts.retries += 1
        entry.forget_output()
        entry.sink.restart(entry)
        self._begin([entry], placement.pair, now)
        return True

    # --- messages ------------------------------------------------------------------------------

    def handle(self, delivery: Delivery) -> None:
        """Take one message of a worker; one that means nothing here (any more) is ignored."""
        now, sender, message = self._clock(), delivery.sender, delivery.message
        if isinstance(message, Hello):
            self._on_hello(sender, message, now)
            return
        worker = self.fleet.heard(sender, now)
        if worker is not None:
            self._on_message(worker, message, now)
        elif isinstance(message, Heartbeat):
            self._mailbox.send(sender, WhoAreYou())

    def _on_message(self, worker: Worker, message: Message, now: float) -> None:
        match message:
            case Tokens():
                self._on_tokens(worker, message, now)
            case Heartbeat():
                self._metrics.preempted(worker.load, message.load)
                self.fleet.report(worker, message.load)
            case PromptLogprobs():
                entry = self.ledger.find(message.request_id, worker.peer)
                if entry is not None:
                    entry.sink.emit_prompt(entry, message)
            case RequestFailed():
                entry = self.ledger.find(message.request_id, worker.peer)
                if entry is not None and entry.needs(worker):
                    self._fail(entry, Failure(message.reason, message.is_retryable), now)
            case NotHeld():
                self._on_not_held(worker, message, now)
            case Link():
                self._on_link(worker, message)
            case CacheEvents():
                if self.prefixes.apply(worker.incarnation, message, now):
                    self._mailbox.send(worker.peer, SnapshotRequest())
            case CacheSnapshot():
                self.prefixes.replace(worker.incarnation, message)

    def _on_tokens(self, worker: Worker, tokens: Tokens, now: float) -> None:
        for delta in tokens.deltas:
            entry = self.ledger.find(delta.request_id, worker.peer)
            if entry is None:  # its Abort was lost or is still under way
                self._mailbox.send(worker.peer, Abort(request_id=delta.request_id))
                continue
            for ready in entry.accept(delta, now):
                self._emit(entry, ready, now)

    def _on_not_held(self, worker: Worker, message: NotHeld, now: float) -> None:
        """A request that none of its legs holds is lost, unless it moved after they were asked."""
        for request_id in message.request_ids:
            entry = self.ledger.find(request_id, worker.peer)
            if entry is None or entry.moved_at > entry.asked_at:
                continue
            entry.denied_by.add(worker.incarnation)
            living = {leg.incarnation for leg in entry.attempt.legs if self.fleet.find(leg.peer) is leg}
            if living <= entry.denied_by:
                self._lose(entry, now)

    def _lose(self, entry: Entry, now: float) -> None:
        self._fail(entry, Failure("a message between router and workers was lost", is_retryable=True), now)

    def _emit(self, entry: Entry, delta: TokenDelta, now: float) -> None:
        self._metrics.token(entry, delta, now)
        entry.moved_at = now
        if entry.first_token_at is None:
            entry.first_token_at = now
        if entry.is_finished:
            reason = EndReason.of(delta.finish)
            self._end(entry, reason)
            self._close(entry, reason, now)
        entry.sink.emit(entry, delta)

    def _on_hello(self, sender: Peer, hello: Hello, now: float) -> None:
        former = self.fleet.remove_former(sender)
        answer = self.fleet.join(sender, hello.card, now)
        if isinstance(answer, Refused):
            self._refused(sender, answer.reason, now)
            self._mailbox.send(sender, answer)
        elif answer.is_new:
            _log.info("%s worker %s joined", hello.card.role.value, sender.address)
            self.prefixes.add(sender.incarnation, now)
            self._mailbox.send(sender, SnapshotRequest())
        if former is not None or (not isinstance(answer, Refused) and answer.is_change):
            self._broadcast(now)
        elif not isinstance(answer, Refused):
            self._mailbox.send(sender, self.fleet.peers())
        if former is not None:
            self._bury([former], now)

    def _refused(self, sender: Peer, reason: str, now: float) -> None:
        if self.fleet.refuse(sender, reason, now):
            self._metrics.counts.refused_workers += 1
            _log.warning("refused %s: %s", sender.address, reason)

    def _refuse_strangers(self, now: float) -> None:
        """Whoever speaks another version of the protocol is told so in its own."""
        for peer, protocol in self._mailbox.take_strangers().items():
            reason = protocol_mismatch(protocol, ("at the router", "at the worker"))
            self._refused(peer, reason, now)
            self._mailbox.refuse(peer, protocol, reason)

    def _on_link(self, worker: Worker, link: Link) -> None:
        if not self.fleet.link(worker, link):
            return
        if link.error:
            _log.warning("no transport from %s to %s: %s", worker.peer.address, link.to, link.error)
        else:
            rate = link.bytes_per_second / 1e9
            _log.info("%s reaches %s over %s at %.2f GB/s", worker.peer.address, link.to, link.transport, rate)

    def _broadcast(self, now: float) -> None:
        self._told_at = now
        peers = self.fleet.peers()
        for worker in self.fleet:
            self._mailbox.send(worker.peer, peers)

    def _bury(self, dead: Sequence[Worker], now: float) -> None:
        """End what needs workers that the fleet has removed and the others know of."""
        for worker in dead:
            _log.warning("worker %s is dead", worker.peer.address)
            self._metrics.counts.deaths += 1
            self._mailbox.forget(worker.peer)
            self.prefixes.drop(worker.incarnation)
        for worker in dead:
            for entry in self.ledger.on_worker(worker):
                if entry.needs(worker):
                    self._fail(entry, Failure(f"worker {worker.peer.address} died", is_retryable=True), now)

    # --- time ----------------------------------------------------------------------------------

    def tick(self) -> None:
        """Once a second: the silent are dead, the lost is found, and the workers hear that the router lives.

        After a pause of this process itself nobody is judged: their heartbeats may wait in the mailbox.
        """
        now = self._clock()
        was_paused = now - self._ticked_at > 2 * TICK_SECONDS
        self._ticked_at = now
        self._refuse_strangers(now)
        silent = [] if was_paused else self.fleet.remove_silent(now)
        if silent or now - self._told_at >= self._config.dead_after_seconds:
            self._broadcast(now)
        self._bury(silent, now)
        self._look_for_lost(now)
        self._metrics.sample(self.ledger, now)

    def _look_for_lost(self, now: float) -> None:
        """End what misses a token for longer than delivery takes; ask the legs of what has not moved for so long."""
        patience = self._config.dead_after_seconds
        asked: dict[Worker, list[RequestId]] = {}
        for entry in self.ledger:
            if entry.gap_since is not None and now - entry.gap_since > patience:
                self._lose(entry, now)
            elif now - max(entry.moved_at, entry.asked_at) > patience:
                entry.asked_at = now
                entry.denied_by.clear()
                for leg in entry.attempt.legs:
                    asked.setdefault(leg, []).append(entry.attempt.request_id)
        for leg, request_ids in asked.items():
            if self.fleet.find(leg.peer) is leg:
                self._mailbox.send(leg.peer, Inquiry(request_ids=request_ids))

    async def run(self) -> None:
        """Serve until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._receive())
            tasks.create_task(self._take_turns())
            tasks.create_task(self._keep_time())

    async def _receive(self) -> None:
        while True:
            first = self._turns.add(await self._mailbox.receive())
            if first is not None:
                self.handle(first)
            if self._turns:
                self._has_turns.set()
            if len(self._turns) > MAX_WAITING:  # what comes meanwhile waits in the mailbox, which is bounded
                self._has_caught_up.clear()
                await self._has_caught_up.wait()

    async def _take_turns(self) -> None:
        while True:
            await self._has_turns.wait()
            self._has_turns.clear()
            while self._turns:
                for delivery in self._turns.take():
                    self.handle(delivery)
                await asyncio.sleep(0)
            self._has_caught_up.set()

    async def _keep_time(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self.tick()


@lru_cache(1)
def _hasher(cluster_key: bytes, model: str, layout: KvLayout, weights: str) -> BlockHasher:
    """Kept, because it remembers the beginnings of prompts."""
    return BlockHasher(cluster_key, model_root(cluster_key, model, layout, weights), layout.block_size)
