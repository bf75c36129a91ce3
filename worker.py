"""`crossdock worker`: one engine with its two parts, a mailbox, and links to its peers.

The loop never waits for the device without listening: while a step runs it takes messages, pushes the KV of
layer groups that are done, and keeps its deadlines. The engine knows no role; the role only tells the router which
work to send here.
"""

import logging
import os
import resource
import secrets
import signal
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import zmq

from .core.block_hash import ModelFingerprint
from .core.compatibility import protocol_mismatch
from .core.config import WorkerConfig
from .core.grammar import Vocabulary
from .core.mailbox import Mailbox
from .core.messages import (
    Heartbeat,
    Hello,
    Incarnation,
    Inquiry,
    Message,
    NotHeld,
    Offer,
    Peer,
    PeerInfo,
    Peers,
    Push,
    Refused,
    SnapshotRequest,
    TokenDelta,
    Tokens,
    WhoAreYou,
    WorkerCard,
    WorkerLoad,
)
from .core.part import Delivery, no_checksums
from .core.request import RequestId
from .core.stages import Stage
from .decode.part import DecodePart
from .kvtransfer.links import Links
from .kvtransfer.offers import Owner, offers_of_gpu, offers_of_host
from .kvtransfer.pool_bytes import PoolBytes, PoolMemory
from .kvtransfer.shm import SharedPool, allocate_shared
from .kvtransfer.transport import Inbox, Transport
from .model.device_stream import CudaStream
from .model.engine import Engine, Step
from .model.startup import LoadedModel, is_dummy, load_model, share_gpus
from .prefill.part import PrefillPart

MAX_COPY_SECONDS = 0.002
"""What the end of a prompt of 8,192 tokens takes to another GPU is less than half of it."""

QUIET_SECONDS = 0.5
"""A rest begins so long after a step: the books of a large pool take ten milliseconds to check, and a commit that waits
for its copy, or the next request, would be kept for as long."""

_log = logging.getLogger("crossdock.worker")


class Outgoing:
    """The parts' outbox: messages go at once, tokens wait for the end of the step and travel together.

    ``note`` is told the stages of traced requests.
    """

    def __init__(self, mailbox: Mailbox, note: Callable[[list[Stage]], None]) -> None:
        self._mailbox = mailbox
        self.note = note
        self._deltas: dict[Peer, list[TokenDelta]] = defaultdict(list)
        self.links: Links

    def send(self, to: Peer, message: Message) -> None:
        """What was emitted or pushed before for the same peer goes first."""
        self._flush(to)
        self.links.send(to, message)

    def push(self, to: Peer, header: Push, source_blocks: list[int]) -> None:
        """Behind all tokens: it takes longer to launch a copy than to send them."""
        self.flush()
        self.links.push(to, header, source_blocks)

    def emit(self, router: Peer, deltas: Seq[TokenDelta]) -> None:
        self._deltas[router] += deltas

    def flush(self) -> None:
        """Send the tokens of the step that has just ended."""
        for router in list(self._deltas):
            self._flush(router)

    def _flush(self, to: Peer) -> None:
        if deltas := self._deltas.pop(to, None):
            self._mailbox.send(to, Tokens(deltas=deltas))


class Worker:
    """One worker process; `run` serves until SIGTERM has drained it.

    Raises ``ValueError`` for a model or configuration that can't work, before anything is announced. ``note`` is told
    the stages of traced requests that have left.
    """

    def __init__(
        self, config: WorkerConfig, path: Path, fingerprint: ModelFingerprint, note: Callable[[list[Stage]], None]
    ) -> None:
        incarnation = Incarnation(secrets.token_hex(8))
        self._config = config
        self._mailbox = Mailbox(config.host, 0, incarnation)
        self._note = note
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._router = Peer(config.router_address, Incarnation(""))
        self._router_seen = self._next_heartbeat = 0.0
        self._known_router: Peer | None = None
        self._peers: set[Peer] = set()
        self._strangers: dict[Peer, int] = {}
        self._misses_router = False
        self._is_draining = False
        self._books_due: float | None = 0.0
        self._shared: SharedPool | None = None
        if is_dummy(config.engine):
            fingerprint = replace(fingerprint, weights="random")
        self._model = self._load(path, fingerprint)
        self._compose(fingerprint)

    def _load(self, path: Path, fingerprint: ModelFingerprint) -> LoadedModel:
        config = self._config
        engine = share_gpus(config.engine, config.number, config.num_on_host)

        def allocate(num_bytes: int) -> memoryview:
            self._shared = allocate_shared(num_bytes)
            return self._shared.memory

        key, vocabulary = config.cluster_key, partial(load_vocabulary, path)
        return load_model(path, fingerprint, key, engine, allocate, self._wake_up, _show_progress, vocabulary)

    def _compose(self, fingerprint: ModelFingerprint) -> None:
        """Bring engine, parts, links and mailbox together."""
        config, model, me = self._config, self._model, self._mailbox.peer
        num_blocks = model.tables.pool.num_blocks
        num_groups = model.executor.num_layer_groups
        memory, transports = self._pool_and_transports(num_groups)
        self._card = WorkerCard(
            role=config.role,
            model=fingerprint.model,
            weights=fingerprint.weights,
            layout=model.layout,
            num_blocks=num_blocks,
            max_model_len=model.max_model_len,
            max_num_seqs=config.engine.max_num_seqs,
            vocab_size=model.spec.vocab_size,
            num_layer_groups=num_groups,
            transports=tuple(transport.card for transport in transports),
        )
        lease_seconds = config.transfer.lease_seconds
        self._outbox = Outgoing(self._mailbox, self._note)
        self._links = Links(me, self._card, transports, model.tables.pool, memory, self._mailbox.send, lease_seconds)
        self._outbox.links = self._links
        self._parts = self._decode, self._prefill = self._make_parts(memory)
        self._engine = Engine(model.executor, model.tables, self._parts, model.chunk_tokens, config.engine.max_num_seqs)
        self._poller = zmq.Poller()
        for source in (self._mailbox.poll_socket, self._wake, *(inbox.poll_socket for inbox in self._links.inboxes)):
            self._poller.register(source, zmq.POLLIN)

    def _make_parts(self, memory: PoolMemory) -> tuple[DecodePart, PrefillPart]:
        card, outbox, tables = self._card, self._outbox, self._model.tables
        lease_seconds, may_run = self._config.transfer.lease_seconds, self._model.grammars.may_run
        decode = DecodePart(
            card, tables, outbox, memory.group_bytes, self._links.land, lease_seconds, may_run, memory.checksums
        )
        prefill = PrefillPart(
            self._mailbox.peer,
            card,
            tables,
            outbox,
            hand_over=decode.adopt,
            held_back=lambda: decode.num_held_back,
            lease_seconds=lease_seconds,
            may_run=may_run,
            checksums=memory.checksums if self._config.transfer.checksums else no_checksums,
            min_push_bytes=memory.min_push_bytes,
        )
        return decode, prefill

    def _pool_and_transports(self, num_groups: int) -> tuple[PoolMemory, list[Transport]]:
        """The pool as transfers see it, and those of the wanted transports that can reach its kind of memory."""
        memory: PoolMemory
        config, kv, shared = self._config, self._model.kv, self._shared
        lease_seconds = config.transfer.lease_seconds
        owner = Owner(self._mailbox.peer, config.host, config.cluster_key, lease_seconds, self._wake_up)
        if shared is not None:
            memory = host_pool = PoolBytes(shared.memory, kv.num_blocks, kv.layout, num_groups)
            usable = offers_of_host(host_pool, shared, owner)
        else:
            from .kvtransfer.device_pool import DevicePool  # triton, which only machines with a GPU have

            memory = gpu_pool = DevicePool(kv.tensor, kv.layout, num_groups, CudaStream(kv.tensor.device))
            usable = offers_of_gpu(gpu_pool, owner)
        wanted = config.transfer.transports
        if not set(wanted) & set(usable):
            raise ValueError(
                f"no transport of {', '.join(wanted)} reaches a pool in {kv.tensor.device.type} memory; "
                f"{', '.join(usable)} would"
            )
        return memory, [usable[name]() for name in wanted if name in usable]

    # --- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        """Serve until told to stop. The first SIGTERM or SIGINT drains, the second ends at once."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        self._router_seen = time.monotonic()
        step: Step | None = None
        while not (self._is_draining and self._is_idle):
            self._listen(0.0)
            if step is not None:
                self._let_copies_end()
            following = self._engine.launch(step, time.monotonic())
            if step is not None:
                self._serve_while(step)
                self._engine.finish(step, time.monotonic())
                self._outbox.flush()
                self._tell_cache_events()
                self._books_due = time.monotonic() + QUIET_SECONDS
            elif following is None:
                self._rest()
            step = following
        self._close()

    def _serve_while(self, step: Step) -> None:
        """Until the step is done: messages, pushes of finished layer groups, deadlines."""
        while not step.launched.is_done:
            self._listen(self._seconds_to_heartbeat())
            self._engine.tell_progress(step, time.monotonic())

    def _let_copies_end(self) -> None:
        """While a step runs: launching the one behind it takes longer than a copy, whose commit would wait for it."""
        end = time.monotonic() + MAX_COPY_SECONDS
        while self._links.is_copying and (left := end - time.monotonic()) > 0:
            self._listen(left)

    def _rest(self) -> None:
        """Nothing to compute: sleep until a message or the next heartbeat; check the books once in a rest."""
        if self._books_due is not None and time.monotonic() >= self._books_due:
            self._check_books()
        self._listen(self._seconds_to_heartbeat())

    def _check_books(self) -> None:
        self._model.tables.prefixes.check()
        self._books_due = None

    def _listen(self, seconds: float) -> None:
        """Wait for at most ``seconds``; handle all that has arrived, then keep the deadlines."""
        if seconds > 0:
            self._links.wait(self._poller, seconds)
            self._clear_wake()
        now = time.monotonic()
        for mailbox in self._mailboxes:
            while delivery := mailbox.receive():
                self._dispatch(delivery, now)
        for part in self._parts:
            part.sweep(now)
        self._links.sweep(now)
        self._keep_in_touch(now)
        self._outbox.flush()

    def _dispatch(self, delivery: Delivery, now: float) -> None:
        match delivery.message:
            case Peers(workers=workers):
                self._meet_router(delivery.sender, now)
                self._meet(delivery.sender, workers, now)
            case WhoAreYou():
                self._meet_router(delivery.sender, now)
                self._meet(delivery.sender, [], now)  # they have heard that this worker is dead
                self._mailbox.send(self._router, Hello(card=self._card))
            case Refused(reason=reason) if delivery.sender not in self._peers:
                raise SystemExit(f"the router refuses this worker: {reason}")
            case SnapshotRequest():
                self._mailbox.send(delivery.sender, self._model.tables.prefixes.snapshot())
            case Inquiry(request_ids=request_ids):
                self._answer(delivery.sender, request_ids)
            case Offer() if delivery.sender not in self._peers:
                pass  # declared dead here: a lease granted to it now would never be ended by its death
            case _:
                handled = [part.handle(delivery, now) for part in (self._prefill, self._decode)]
                if not any(handled):
                    self._links.handle(delivery, now)

    def _answer(self, router: Peer, request_ids: list[RequestId]) -> None:
        """Behind all tokens of theirs."""
        held = self._prefill.request_ids | self._decode.request_ids
        if not_held := [each for each in request_ids if each not in held]:
            self._outbox.send(router, NotHeld(request_ids=not_held))

    # --- the router and the peers --------------------------------------------------------------

    def _keep_in_touch(self, now: float) -> None:
        """Once a second: who I am until the router knows, then how I am."""
        if not self._misses_router and now - self._router_seen > self._config.router_silence_seconds:
            self._misses_router = True
            _log.warning("the router at %s is silent; this worker goes on asking it", self._config.router_address)
            if self._known_router is not None:
                self._lose(self._known_router, now)
                self._meet(self._known_router, [], now)  # this worker has long been declared dead
                self._known_router = None
        if now < self._next_heartbeat:
            return
        self._refuse_strangers()
        self._next_heartbeat = now + self._config.heartbeat_seconds
        greeting = Hello(card=self._card) if self._known_router is None else Heartbeat(load=self.load())
        self._mailbox.send(self._router, greeting)
        self._tell_cache_events()

    def _refuse_strangers(self) -> None:
        """Whoever speaks another version of the protocol is told so in its own."""
        known, self._strangers = self._strangers, self._mailbox.take_strangers()
        for peer, protocol in self._strangers.items():
            reason = protocol_mismatch(protocol, (f"at {self._mailbox.peer.address}", f"at {peer.address}"))
            self._mailbox.refuse(peer, protocol, reason)
            if peer not in known:
                _log.warning("refused %s: %s", peer.address, reason)

    def _meet_router(self, router: Peer, now: float) -> None:
        """A router with another incarnation is a new one: what the former wanted is void."""
        self._router_seen = now
        self._misses_router = False
        if router != self._known_router:
            if self._known_router is not None:
                self._lose(self._known_router, now)
            self._known_router = router

    def _meet(self, router: Peer, workers: list[PeerInfo], now: float) -> None:
        """All live workers; whoever is missing now is dead."""
        alive = {info.peer for info in workers}
        for peer in self._peers - alive:
            self._lose(peer, now)
        self._peers = alive
        self._links.update(router, workers, now)

    def _lose(self, peer: Peer, now: float) -> None:
        for part in self._parts:
            part.lose(peer, now)
        self._mailbox.forget(peer)

    def _tell_cache_events(self) -> None:
        if events := self._model.tables.prefixes.take_events():
            self._mailbox.send(self._router, events)

    def load(self) -> WorkerLoad:
        """This worker's state now and its counters."""
        prefill, decode = self._prefill, self._decode
        return WorkerLoad(
            books=self._model.tables.pool.books(),
            is_accepting=not self._is_draining,
            num_queued_prompt_tokens=prefill.num_queued_tokens,
            num_waiting=prefill.num_waiting + decode.num_preempted,
            num_running=prefill.num_computing + decode.num_running,
            num_arriving=decode.num_arriving,
            num_kept_for_decode=prefill.num_kept,
            resident_bytes=_resident_bytes(),
            total_steps=self._engine.num_steps,
            total_preemptions=decode.num_preemptions,
            total_prompt_tokens=prefill.num_prompt_tokens,
            total_cached_tokens=prefill.num_cached_tokens,
            total_output_tokens=decode.num_output_tokens,
            total_transfers=prefill.num_transfers,
            total_transfer_failures=prefill.num_transfer_failures,
            total_blocks_pushed=prefill.num_blocks_pushed,
            total_blocks_skipped=prefill.num_blocks_skipped,
            total_bytes_pushed=prefill.num_bytes_pushed,
            total_messages_rejected=sum(mailbox.num_rejected for mailbox in self._mailboxes),
        )

    # --- small change --------------------------------------------------------------------------

    @property
    def _mailboxes(self) -> tuple[Inbox, ...]:
        return (self._mailbox, *self._links.inboxes)

    @property
    def _is_idle(self) -> bool:
        return not (self._prefill.num_requests or self._decode.num_requests)

    def _seconds_to_heartbeat(self) -> float:
        return max(0.001, self._next_heartbeat - time.monotonic())

    def _wake_up(self) -> None:
        os.eventfd_write(self._wake, 1)

    def _clear_wake(self) -> None:
        with suppress(BlockingIOError):  # something else woke us
            os.eventfd_read(self._wake)

    def _on_signal(self, number: int, frame: object) -> None:
        if self._is_draining:
            sys.exit(1)
        self._is_draining = True
        self._next_heartbeat = 0.0
        self._wake_up()

    def _close(self) -> None:
        self._check_books()
        self._model.executor.close()
        self._model.grammars.close()
        self._links.close()
        self._mailbox.close(linger_seconds=1.0)


def load_vocabulary(path: Path) -> Vocabulary:
    """What the model's tokens stand for; most workers never need to know. Raises ``ValueError``."""
    from .router.text import load_text  # the router's libraries, 30 MB

    return load_text(path).vocabulary


def _show_progress(done: int, total: int) -> None:
    if done in (1, total) or done % 10 == 0:
        _log.info("loading weights: %d of %d layers", done, total)


def _resident_bytes() -> int:
    """Resident memory of this process (Linux /proc, in pages)."""
    with open("/proc/self/statm", encoding="ascii") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()
