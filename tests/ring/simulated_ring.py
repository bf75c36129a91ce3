"""A whole deployment in one thread: real parts, engines and transfers; a fake device, network, clock and router.

Nothing happens by itself. A test moves one thing at a time: a worker's loop, a layer group on its device, a message,
the clock, a client's whim, a death.
"""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from random import Random
from typing import cast

from msgspec.structs import replace

from crossdock.core.block_hash import BlockHasher, model_root
from crossdock.core.block_pool import BlockPool
from crossdock.core.block_tables import BlockTables
from crossdock.core.mailbox import Mailbox
from crossdock.core.messages import (
    Abort,
    Incarnation,
    Message,
    Offer,
    Peer,
    PeerInfo,
    Peers,
    PrefillTask,
    Push,
    RequestFailed,
    Role,
    TokenDelta,
    Tokens,
    WorkerCard,
)
from crossdock.core.part import Delivery, Part, TransferFailed, no_checksums
from crossdock.core.prefix_cache import PrefixCache
from crossdock.core.request import Request, RequestId, TransferId
from crossdock.core.sequence import FinishReason, Sequence
from crossdock.core.stages import Stage
from crossdock.decode.part import DecodePart
from crossdock.kvtransfer.links import Links
from crossdock.kvtransfer.pool_bytes import PoolBytes
from crossdock.model.engine import Engine, Step
from crossdock.model.executor import Executor
from crossdock.prefill.part import PrefillPart
from crossdock.worker import Outgoing

from .fake_device import NUM_LAYERS, VOCAB_SIZE, FakeExecutor, layout_of, reference_output
from .network import NO_FAULTS, Faults, Network

ROUTER = Peer("tcp://router", Incarnation("router"))
LEASE_SECONDS = 2.0
KEY = b"key"


def may_run(sequence: Sequence) -> bool:
    """With a grammar a step needs all tokens before it."""
    return not sequence.request.params.grammar or sequence.num_pending == 0


@dataclass(frozen=True, slots=True)
class Shape:
    """Of one worker."""

    num_blocks: int
    block_size: int = 4
    chunk_tokens: int = 32
    max_num_seqs: int = 64
    prefix_cache: bool = True


class SimulatedWorker:
    """What worker.py composes, with a step that ends when the test says so."""

    def __init__(self, ring: "Ring", peer: Peer, role: Role, shape: Shape) -> None:
        self.ring = ring
        self.peer = peer
        layout = layout_of(shape.block_size)
        self.memory = PoolBytes(
            memoryview(bytearray(shape.num_blocks * layout.block_bytes)), shape.num_blocks, layout, NUM_LAYERS
        )
        self.pool = BlockPool(shape.num_blocks)
        self.prefixes = PrefixCache(self.pool, shape.prefix_cache)
        hasher = BlockHasher(KEY, model_root(KEY, "fake", layout), shape.block_size)
        self.tables = tables = BlockTables(self.pool, self.prefixes, hasher, shape.block_size)
        self.card = WorkerCard(
            role=role,
            model="fake",
            layout=layout,
            num_blocks=shape.num_blocks,
            max_model_len=shape.num_blocks * shape.block_size,
            max_num_seqs=shape.max_num_seqs,
            vocab_size=VOCAB_SIZE,
            num_layer_groups=NUM_LAYERS,
        )
        self.stages: list[Stage] = []
        self.outbox = Outgoing(cast(Mailbox, self), self.stages.extend)
        self.outbox.links = cast(Links, self)
        self.decode = DecodePart(
            self.card,
            tables,
            self.outbox,
            self.memory.group_bytes,
            self.memory.land,
            LEASE_SECONDS,
            may_run,
            checksums=self.memory.checksums,
        )
        self.prefill = PrefillPart(
            peer,
            self.card,
            tables,
            self.outbox,
            self.decode.adopt,
            lambda: self.decode.num_held_back,
            LEASE_SECONDS,
            may_run,
            checksums=self.memory.checksums if ring.corruption else no_checksums,
        )
        self.parts: tuple[Part, Part] = (self.decode, self.prefill)
        self.device = FakeExecutor(self.memory, self.check_write)
        self.engine = Engine(cast(Executor, self.device), tables, self.parts, shape.chunk_tokens, shape.max_num_seqs)
        self.peers: set[Peer] = set()
        self.inbox: deque[Delivery] = ring.network.inboxes.setdefault(peer.incarnation, deque())
        self._is_resting = False
        self._loop = self._run()

    # --- the mailbox and the links ---------------------------------------------------------------

    def send(self, to: Peer, message: Message) -> None:
        self.ring.network.send(self.peer, to, message)

    def push(self, to: Peer, header: Push, source_blocks: list[int]) -> None:
        layers = self.memory.layers_of(header)
        payload = self.memory.read(source_blocks, layers)
        for block in source_blocks:
            assert not self.is_reusable(block), "a push reads a block that it no longer holds"
        self.ring.push(self.peer, to, header, payload)

    def check_write(self, block: int) -> None:
        """Somebody is about to write to this block: it must be held, and not be known under a hash."""
        assert not self.is_reusable(block), f"{self.peer.incarnation} writes to block {block}, which may be given out"
        assert self.pool.hash_of(block) is None, f"block {block} is published and written to"
        num_holders = self.pool.num_references(block) - self.tables._being_copied[block]
        assert num_holders <= 1, f"block {block} is written to and has {num_holders} holders"

    def is_reusable(self, block: int) -> bool:
        return block in self.pool._free or block in self.pool._cached

    # --- the loop --------------------------------------------------------------------------------

    def resume(self) -> None:
        """Run the loop to the next point where it would wait; the books are right whenever it does."""
        next(self._loop)
        self.prefixes.check()

    @property
    def is_quiet(self) -> bool:
        return self._is_resting and not self.inbox and not self.device.queue

    def _run(self) -> Iterator[None]:
        step: Step | None = None
        while True:
            self._listen()
            following = self.engine.launch(step, self.ring.now)
            if step is not None:
                while not step.launched.is_done:
                    yield
                    self._listen()
                    self.engine.tell_progress(step, self.ring.now)
                self.engine.finish(step, self.ring.now)
                self.outbox.flush()
            elif following is None:
                self._is_resting = True
                yield
                self._is_resting = False
            step = following

    def _listen(self) -> None:
        now = self.ring.now
        while self.inbox:
            self._dispatch(self.inbox.popleft(), now)
        for part in self.parts:
            part.sweep(now)
        self.outbox.flush()

    def _dispatch(self, delivery: Delivery, now: float) -> None:
        match delivery.message:
            case Peers(workers=workers):
                alive = {info.peer for info in workers}
                for peer in self.peers - alive:
                    for part in self.parts:
                        part.lose(peer, now)
                self.peers = alive
            case Offer() if delivery.sender not in self.peers:
                pass  # it repeats itself
            case _:
                handled = [part.handle(delivery, now) for part in (self.prefill, self.decode)]
                assert any(handled), f"nobody knows what to do with {delivery.message}"

    # --- what a test looks at --------------------------------------------------------------------

    @property
    def leftovers(self) -> list[str]:
        """Everything that a worker without requests should not hold."""
        books = self.pool.books()
        prefill, decode = self.prefill, self.decode
        arrivals = decode._arrivals
        found = {
            "leased": books.leased,
            "quarantined": books.quarantined,
            "jobs": len(prefill._jobs),
            "transfers": len(prefill._by_transfer),
            "prompts": len(prefill._scheduler._waiting) + len(prefill._scheduler._computing),
            "requests": len(decode._requests),
            "scheduled": len(decode._scheduler._requests),
            "arrivals": len(arrivals._arrivals) + len(arrivals._settled),
            "queued offers": len(arrivals._queue),
            "copies": self.tables._being_copied.total(),
            "steps": len(self.device.queue),
            "work": int(self.engine.has_work),
        }
        return [f"{self.peer.incarnation}: {count} {what}" for what, count in found.items() if count]


@dataclass(slots=True, eq=False)
class Call:
    """One choice of a request as the router sees it. ``outcome`` is empty until it is over."""

    request_id: RequestId
    task: PrefillTask
    prefill: Peer
    expected: list[int]
    finish: FinishReason
    legs: dict[int, Peer] = field(default_factory=dict)
    is_finished: bool = False
    outcome: str = ""

    @property
    def workers(self) -> set[Peer]:
        return {self.prefill, self.task.decode}

    def take(self, delta: TokenDelta, sender: Peer) -> None:
        """Every token comes once, from the right leg, in order, and is the reference's."""
        index = delta.index
        assert index not in self.legs, f"token {index} of {self.request_id} came twice"
        assert index < 2 or self.legs.get(index - 1) == sender, f"token {index} of {self.request_id} skips some"
        assert index > 0 or sender == self.prefill, "the first token is sampled by the prefill worker"
        self.legs[index] = sender
        self.is_finished |= delta.finish is not None
        if not self.expected:
            assert (index, delta.token_id, delta.finish) == (0, None, FinishReason.LENGTH)
            return
        assert delta.token_id == self.expected[index], f"token {index} of {self.request_id} is wrong"
        is_last = index == len(self.expected) - 1
        assert delta.finish == (self.finish if is_last else None), f"{self.request_id} ends at the wrong token"

    @property
    def is_complete(self) -> bool:
        """The end came and nothing before it is missing; tokens of two legs may overtake each other."""
        return self.is_finished and len(self.legs) == max(1, len(self.expected))


class Ring:
    """``shapes`` gives the role and the shape of each worker; a push fails at once with probability ``push_faults``.

    With probability ``corruption`` a byte of a push arrives as another.
    """

    def __init__(
        self,
        random: Random,
        shapes: dict[str, tuple[Role, Shape]],
        faults: Faults = NO_FAULTS,
        transport: str = "tcp",
        push_faults: float = 0.0,
        corruption: float = 0.0,
    ) -> None:
        self.now = 0.0
        self.random = random
        self.network = Network(random, faults, ROUTER)
        self.transport = transport
        self.push_faults = push_faults
        self.corruption = corruption
        self.calls: dict[RequestId, Call] = {}
        self.workers: dict[str, SimulatedWorker] = {}
        self.dead: list[Peer] = []
        self.asleep: set[str] = set()
        self._shapes = shapes
        self._num_lives = 0
        for name in shapes:
            self._bear(name)
        self._tell_peers()
        self.settle()

    # --- workers come and go ---------------------------------------------------------------------

    def _bear(self, name: str) -> None:
        self._num_lives += 1
        peer = Peer(f"tcp://{name}", Incarnation(f"{name}-{self._num_lives}"))
        self.workers[name] = SimulatedWorker(self, peer, *self._shapes[name])

    def kill(self, name: str) -> None:
        """Its pool and all it knew are gone; nobody has noticed yet."""
        worker = self.workers.pop(name)
        del self.network.inboxes[worker.peer.incarnation]
        self.dead.append(worker.peer)

    def bury(self) -> None:
        """The router notices all deaths, tells everybody, and the dead come back under a new incarnation."""
        dead = set(self.dead)
        self.dead.clear()
        for name in self._shapes.keys() - self.workers.keys():
            self._bear(name)
        self._tell_peers()
        self._end_calls_on(dead, "a worker died")

    def slander(self, name: str) -> None:
        """The router takes a live worker for dead; it says hello again, and everybody hears of it a second time."""
        slandered = self.workers.pop(name)
        self._tell_peers()
        self.workers[name] = slandered
        self._end_calls_on({slandered.peer}, "a worker is said to be dead")
        self._tell_peers()

    def lose_router(self, name: str) -> None:
        """This worker has not heard of its router for too long."""
        worker = self.workers[name]
        for part in worker.parts:
            part.lose(ROUTER, self.now)
        self._end_calls_on({worker.peer}, "a worker lost its router")

    def _end_calls_on(self, peers: set[Peer], reason: str) -> None:
        for call in self.open_calls:
            if call.workers & peers:
                self._fail(call, reason)

    def _tell_peers(self) -> None:
        infos = [PeerInfo(worker.peer, worker.card) for worker in self.workers.values()]
        for info in infos:
            self.network.send(ROUTER, info.peer, Peers(workers=infos))

    def _peer_of(self, name: str) -> Peer:
        """As the router knows it, which may be dead already."""
        if name in self.workers:
            return self.workers[name].peer
        return next(peer for peer in self.dead if peer.address == f"tcp://{name}")

    def _find(self, peer: Peer) -> SimulatedWorker | None:
        return next((worker for worker in self.workers.values() if worker.peer == peer), None)

    def push(self, sender: Peer, to: Peer, header: Push, payload: bytes) -> None:
        if self.random.random() < self.push_faults:
            raise TransferFailed("the link broke")
        if payload and self.random.random() < self.corruption:
            place = self.random.randrange(len(payload))
            payload = payload[:place] + bytes([payload[place] ^ 1 << self.random.randrange(8)]) + payload[place + 1 :]
        target = self._find(to)
        if self.transport == "tcp":
            self.network.send(sender, to, replace(header, transport="tcp"), payload)
            return
        if target is not None:
            for block in header.blocks:
                target.check_write(block)
            target.memory.land(header, payload)
        self.network.send(sender, to, replace(header, transport="shm"))

    # --- the router ------------------------------------------------------------------------------

    def submit(self, request: Request, prefill: str, decode: str) -> Call:
        """The call of the request itself; those of its forks are among ``calls``."""
        first, second = self._peer_of(prefill), self._peer_of(decode)
        task = PrefillTask(request=request, transfer_id=TransferId(request.request_id), decode=second)
        for choice in request.choices:
            expected = reference_output(choice)
            is_stop = bool(expected) and expected[-1] in choice.params.stop_token_ids
            finish = FinishReason.STOP if is_stop else FinishReason.LENGTH
            self.calls[choice.request_id] = Call(choice.request_id, task, first, expected, finish)
        self.network.send(ROUTER, first, task)
        return self.calls[request.request_id]

    def abort(self, call: Call) -> None:
        self._close(call, "aborted")

    def _fail(self, call: Call, reason: str) -> None:
        self._close(call, f"failed: {reason}")

    def _close(self, call: Call, outcome: str) -> None:
        """Like the router's dispatcher: whatever ends a request early is told to both legs."""
        call.outcome = outcome
        for peer in call.workers:
            self.network.send(ROUTER, peer, Abort(request_id=call.request_id))

    def route(self) -> None:
        """The router reads its mailbox."""
        inbox = self.network.inboxes[ROUTER.incarnation]
        while inbox:
            delivery = inbox.popleft()
            match delivery.message:
                case Tokens(deltas=deltas):
                    for delta in deltas:
                        self._on_token(delta, delivery.sender)
                case RequestFailed() as failed:
                    call = self.calls[failed.request_id]
                    if not call.outcome and not any(call.legs.keys() - {0}):
                        self._fail(call, failed.reason)

    def _on_token(self, delta: TokenDelta, sender: Peer) -> None:
        call = self.calls[delta.request_id]
        call.take(delta, sender)
        if call.outcome:
            self.network.send(ROUTER, sender, Abort(request_id=call.request_id))
        elif call.is_complete:
            call.outcome = "complete"

    # --- moves -----------------------------------------------------------------------------------

    def move(self) -> None:
        """One thing happens somewhere."""
        awake = [worker for name, worker in self.workers.items() if name not in self.asleep]
        moves = [worker.resume for worker in awake]
        moves += [worker.device.advance for worker in awake if worker.device.queue]
        if not self.network.is_empty:
            moves += [self.network.deliver_one] * 3
        if moves:
            self.random.choice(moves)()
        self.route()

    @property
    def is_quiet(self) -> bool:
        """Without the clock nothing would happen any more."""
        return self.network.is_empty and all(worker.is_quiet for worker in self.workers.values())

    @property
    def open_calls(self) -> list[Call]:
        return [call for call in self.calls.values() if not call.outcome]

    def settle(self, max_moves: int = 100_000) -> None:
        """Let everything happen that needs no clock."""
        for _ in range(max_moves):
            if self.is_quiet:
                return
            self.move()
        raise AssertionError(f"no rest after {max_moves} moves: {self.describe()}")

    def drain(self, max_seconds: float) -> None:
        """Let time pass, without further faults, until all is over and nothing is left behind."""
        self.network.faults = NO_FAULTS
        self.push_faults = self.corruption = 0.0
        end = self.now + max_seconds
        self.settle()
        while self.open_calls or self.leftovers:
            assert self.now < end, f"not over after {max_seconds} s: {self.describe()}"
            self.now += LEASE_SECONDS / 4
            for worker in self.workers.values():
                worker.resume()
            self.settle()

    @property
    def leftovers(self) -> list[str]:
        return [found for worker in self.workers.values() for found in worker.leftovers]

    def describe(self) -> str:
        stuck = [str(call.request_id) for call in self.open_calls]
        return f"open {stuck}, left {self.leftovers}, {[worker.pool.books() for worker in self.workers.values()]}"
