"""KV from one process to another over a link, without an engine: how much of the limit each transport reaches.

Two processes with a pool each, linked by `Links` as two workers are: the probe runs first. A prompt is pushed layer
group by layer group from random blocks to random blocks, or, as ``joined``, all that is there in one push, as a worker
does with layer groups of which it hears together; its time ends when the receiver knows that everything has
landed, by the clock that all processes of a host share (``CLOCK_MONOTONIC``). Checksums of both sides are compared in
every round.
"""

import os
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection

import numpy as np
import torch
import zmq

from crossdock.benchmarks.transfer_shapes import Work
from crossdock.core.block_pool import BlockPool
from crossdock.core.kv_layout import KvLayout
from crossdock.core.mailbox import Mailbox
from crossdock.core.messages import Incarnation, LeaseId, Link, PeerInfo, Push, Role, WorkerCard
from crossdock.core.part import Delivery
from crossdock.core.request import TransferId
from crossdock.kvtransfer import nccl_library, pieces
from crossdock.kvtransfer.links import Links
from crossdock.kvtransfer.offers import Offers, Owner, offers_of_gpu, offers_of_host
from crossdock.kvtransfer.pool_bytes import NUM_STAGING, PASSED, Mark, PoolBytes, PoolMemory
from crossdock.kvtransfer.shm import allocate_shared

NUM_GROUPS = 4
LEASE_SECONDS = 10.0
RUN_BLOCKS = 7
"""What two pools give a prompt that have been full for long, while prompts of 4 to 600 blocks came and went."""
NUM_ROUNDS = 5
MAX_PROBE_SECONDS = 60.0
MAX_PUSH_SECONDS = 30.0
TRANSFER = TransferId("t")
STAGED = (NUM_STAGING, pieces.RAMP_BYTES >> 20, nccl_library.NUM_CTAS, 16, 48)
"""The last numbers of a `StagedVariant`, as in workers."""


@dataclass(frozen=True, slots=True)
class StagedVariant:
    """How `ucx` and `nccl` stage, as in ``256x4x128x32x16x48``.

    MiB of the largest piece, buffers a side, MiB of the smallest piece, thread blocks of NCCL, those of the kernel that
    packs and lands beside a busy link, and where nothing else travels; the last ones may be left out and are as in
    workers.
    """

    name: str

    @property
    def numbers(self) -> list[int]:
        said = [int(number) for number in self.name.split("x")]
        return [*said, *STAGED[len(said) - 1 :]]


@dataclass(frozen=True, slots=True)
class Setting:
    """What both sides are made of; the decode side takes the last GPU.

    A prompt's blocks lie in runs of ``run_blocks`` on either side.
    """

    device: str
    layout: KvLayout
    num_blocks: int
    transport: str
    staged: StagedVariant | None = None
    run_blocks: int = RUN_BLOCKS


@dataclass(frozen=True, slots=True)
class CopyVariant:
    """Numbers for `kernels.kv_copy.CopyShape`, as in ``24x16x64x1``: programs, warps, KiB a tile, stages.

    With an ``s`` behind them the caches are asked to keep nothing.
    """

    name: str

    @property
    def numbers(self) -> list[int]:
        return [int(number) for number in self.name.removesuffix("s").split("x")]


@dataclass(frozen=True, slots=True)
class LinkRow:
    """``variant`` says what differs from what workers do.

    Of ``milliseconds`` the loop of the sender spends ``push_us`` on each push, and knows after ``copied_ms`` that all
    copies have ended.
    """

    transport: str
    variant: str
    num_tokens: int
    num_at_once: int
    gigabytes_per_second: float
    milliseconds: float
    copied_ms: float
    push_us: float


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds since the first of ``num_pushes``.

    All are begun, no copy is under way any more, the receiver has everything.
    """

    num_pushes: int
    pushed: float
    copied: float
    landed: float


class LinkFailed(RuntimeError):
    """A transport did not work; the message says what."""


class Side:
    """One process: pool, transport, links and mailbox, and a loop like a worker's."""

    def __init__(self, setting: Setting, role: Role) -> None:
        self.mailbox = Mailbox("127.0.0.1", 0, Incarnation(role.value))
        self.setting = setting
        self._staging: tuple[int, int] | tuple[()] = ()
        if setting.staged is not None:
            piece_mib, num_buffers, ramp_mib, nccl_library.NUM_CTAS, *_ = setting.staged.numbers
            pieces.RAMP_BYTES = ramp_mib << 20
            self._staging = piece_mib << 20, num_buffers
        self.wake = os.eventfd(0, os.EFD_NONBLOCK)
        self.memory, offers = self._pool_and_offers(role)
        if setting.transport not in offers:
            raise LinkFailed(f"{setting.transport} does not reach this pool; {', '.join(offers)} would")
        self.transport = offers[setting.transport]()
        self.card = WorkerCard(
            role=role,
            model="benchmark",
            layout=setting.layout,
            num_blocks=setting.num_blocks,
            max_model_len=1,
            max_num_seqs=1,
            vocab_size=1,
            num_layer_groups=NUM_GROUPS,
            transports=(self.transport.card,),
        )
        pool = BlockPool(setting.num_blocks)
        post = self.mailbox.send
        self.links = Links(self.mailbox.peer, self.card, [self.transport], pool, self.memory, post, LEASE_SECONDS)
        self.poller = zmq.Poller()
        for source in (self.mailbox.poll_socket, self.wake, *(inbox.poll_socket for inbox in self.links.inboxes)):
            self.poller.register(source, zmq.POLLIN)

    def _pool_and_offers(self, role: Role) -> tuple[PoolMemory, Offers]:
        setting = self.setting
        wake = partial(os.eventfd_write, self.wake, 1)
        owner = Owner(self.mailbox.peer, "127.0.0.1", b"benchmark", LEASE_SECONDS, wake)
        num_bytes = setting.num_blocks * setting.layout.block_bytes
        if setting.device == "cpu":
            shared = allocate_shared(num_bytes)
            host_pool = PoolBytes(shared.memory, setting.num_blocks, setting.layout, NUM_GROUPS, *self._staging)
            host_pool.array.reshape(-1)[:] = np.random.default_rng().integers(0, 255, num_bytes, np.uint8)
            return host_pool, offers_of_host(host_pool, shared, owner)
        from crossdock.kernels import kv_copy
        from crossdock.kvtransfer.device_pool import DevicePool
        from crossdock.model.device_stream import CudaStream

        if setting.staged is not None:
            kv_copy.BESIDE_LINK, kv_copy.STAGING = map(kv_copy.CopyShape, setting.staged.numbers[-2:])
        gpu = torch.device("cuda", torch.cuda.device_count() - 1 if role is Role.DECODE else 0)
        torch.cuda.set_device(gpu)
        tensor = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device=gpu).view(setting.num_blocks, -1)
        torch.cuda.synchronize()
        pool = DevicePool(tensor, setting.layout, NUM_GROUPS, CudaStream(gpu), *self._staging)
        return pool, offers_of_gpu(pool, owner)

    @property
    def info(self) -> PeerInfo:
        return PeerInfo(self.mailbox.peer, self.card)

    def vary(self, variant: CopyVariant) -> None:
        """Spread copies otherwise from now on."""
        from crossdock.kernels.kv_copy import CopyShape
        from crossdock.kvtransfer.cuda_ipc import CudaIpcTransport

        assert isinstance(self.transport, CudaIpcTransport), "only its kernel has variants"
        programs, warps, kib, stages = variant.numbers
        self.transport.shape = CopyShape(programs, warps, kib << 10, stages, variant.name.endswith("s"))

    def turn(self, seconds: float, take: Callable[[Delivery], None]) -> None:
        self.links.wait(self.poller, seconds)
        with suppress(BlockingIOError):
            os.eventfd_read(self.wake)
        for mailbox in (self.mailbox, *self.links.inboxes):
            while (delivery := mailbox.receive()) is not None:
                if not self.links.handle(delivery, time.monotonic()):
                    take(delivery)
        self.links.sweep(time.monotonic())


def be_decode(setting: Setting, parent: Connection) -> None:
    """Land what comes, and say so when all that was announced is here."""
    side = Side(setting, Role.DECODE)
    parent.send(side.info)
    sender, router = parent.recv()
    side.links.update(router, [sender, side.info], time.monotonic())
    num_awaited = num_landed = 0
    deadline = 0.0
    landing: Mark = PASSED

    def take(delivery: Delivery) -> None:
        nonlocal num_landed, landing
        if isinstance(delivery.message, Push):
            if len(delivery.payload):
                landing = side.links.land(delivery.message, delivery.payload)
            num_landed += len(delivery.message.blocks) * delivery.message.num_groups

    while True:
        while num_awaited and time.monotonic() < deadline:
            side.turn(0.0, take)
            if num_landed == num_awaited:
                landing.synchronize()
                parent.send(time.monotonic())
                num_awaited = num_landed = 0
        side.turn(0.001, take)
        if parent.poll():
            order = parent.recv()
            if order is None:
                return
            if isinstance(order, int):
                num_awaited, deadline = order, time.monotonic() + MAX_PUSH_SECONDS
            else:
                parent.send(side.memory.checksums(order))


@dataclass(slots=True)
class Pair:
    """The prefill side in this process, and the way to the decode side in the other."""

    side: Side
    decode: PeerInfo
    child: Connection

    def timed(self, work: Work, num_together: int) -> Timed:
        """The round of median length, with so many layer groups a push."""
        rounds = sorted((self._push_all(work, num_together) for _ in range(NUM_ROUNDS)), key=lambda timed: timed.landed)
        return rounds[NUM_ROUNDS // 2]

    def _push_all(self, work: Work, num_together: int) -> Timed:
        """Raises `LinkFailed` if that which has landed is not what was sent."""
        side = self.side
        num_blocks, a_prompt = work.num_blocks, work.num_blocks // work.num_at_once
        sources, destinations = (_some_blocks(side.setting, num_blocks) for _ in range(2))
        self.child.send(num_blocks * NUM_GROUPS)
        time.sleep(0.01)  # the child has read it
        begun = time.monotonic()
        for group in range(0, NUM_GROUPS, num_together):
            for first in range(0, num_blocks, a_prompt):
                piece = slice(first, first + a_prompt)
                header = Push(
                    transfer_id=TRANSFER,
                    lease_id=LeaseId(0),
                    generation=0,
                    group=group,
                    blocks=destinations[piece],
                    transport="",
                    num_groups=num_together,
                )
                side.links.push(self.decode.peer, header, sources[piece])
        pushed = time.monotonic()
        self._let_copies_end(pushed + MAX_PUSH_SECONDS)
        copied = time.monotonic()
        while not self.child.poll():
            side.turn(0.001, _nothing_comes)
            if time.monotonic() > pushed + MAX_PUSH_SECONDS:
                raise LinkFailed(f"{work} had not landed after {MAX_PUSH_SECONDS:.0f} s")
        landed: float = self.child.recv()
        self.child.send(destinations)
        if self.child.recv() != side.memory.checksums(sources):
            raise LinkFailed(f"{work}: what landed is not what was sent")
        num_pushes = NUM_GROUPS // num_together * work.num_at_once
        return Timed(num_pushes, pushed - begun, copied - begun, landed - begun)

    def _let_copies_end(self, deadline: float) -> None:
        while self.side.links.is_copying and time.monotonic() < deadline:
            self.side.turn(0.001, _nothing_comes)


def _some_blocks(setting: Setting, num_blocks: int) -> list[int]:
    """Random ones, in runs as long as the setting says."""
    starts = range(0, setting.num_blocks - setting.run_blocks + 1, setting.run_blocks)
    chosen = random.sample(starts, -(-num_blocks // setting.run_blocks))
    return [block for start in chosen for block in range(start, start + setting.run_blocks)][:num_blocks]


def _nothing_comes(delivery: Delivery) -> None:
    raise LinkFailed(f"the decode side says {delivery.message}")


@contextmanager
def linked(setting: Setting) -> Iterator[Pair]:
    """Two processes that have probed each other. Raises `LinkFailed`."""
    here, there = get_context("spawn").Pipe()
    child = get_context("spawn").Process(target=be_decode, args=(setting, there), daemon=True)
    child.start()
    there.close()
    try:
        side = Side(setting, Role.PREFILL)
        decode: PeerInfo = here.recv()
        router = Mailbox("127.0.0.1", 0, Incarnation("router"))
        here.send((side.info, router.peer))
        side.links.update(router.peer, [side.info, decode], time.monotonic())
        pair = Pair(side, decode, here)
        end = time.monotonic() + MAX_PROBE_SECONDS
        while (told := router.receive()) is None:
            side.turn(0.001, _nothing_comes)
            if time.monotonic() > end:
                raise LinkFailed(f"no link within {MAX_PROBE_SECONDS:.0f} s")
        assert isinstance(told.message, Link), "nothing else is told to a router"
        if told.message.error:
            raise LinkFailed(told.message.error)
        yield pair
        here.send(None)
        child.join(10)
        side.links.close()
    except EOFError:
        raise LinkFailed("the decode side has ended") from None
    finally:
        child.kill()
        child.join()


def measure_link(setting: Setting, works: Sequence[Work], variants: Sequence[CopyVariant] = ()) -> Iterator[LinkRow]:
    """Two rows a work, for each of the variants if there are any. Raises `LinkFailed`."""
    label = setting.staged.name if setting.staged is not None else ""
    if setting.run_blocks != RUN_BLOCKS:
        label = f"runs of {setting.run_blocks}"
    with linked(setting) as pair:
        for variant in variants or (None,):
            if variant is not None:
                pair.side.vary(variant)
            for work, num_together in product(works, (1, NUM_GROUPS)):
                timed = pair.timed(work, num_together)
                named = variant.name if variant is not None else label
                yield LinkRow(
                    setting.transport,
                    " ".join(filter(None, (named, "joined" if num_together > 1 else ""))),
                    work.num_tokens,
                    work.num_at_once,
                    work.num_blocks * setting.layout.block_bytes / timed.landed / 1e9,
                    1e3 * timed.landed,
                    1e3 * timed.copied,
                    1e6 * timed.pushed / timed.num_pushes,
                )
