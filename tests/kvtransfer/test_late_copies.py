"""Staging on a device that runs copies when it likes: nothing is sent, used again or called done before its time."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from crossdock.core.kv_layout import KvLayout, LayerGroup
from crossdock.core.mailbox import Mailbox
from crossdock.core.messages import Incarnation, LeaseId, Peer, Push
from crossdock.core.request import TransferId
from crossdock.kvtransfer.nccl import NcclTransport
from crossdock.kvtransfer.pieces import RAMP_BYTES, PackingPieces, next_bytes
from crossdock.kvtransfer.transport import BlockCopy, LinkDown, NotReachable
from crossdock.kvtransfer.ucx import UcxTransport

from ..parts import turn_until
from .late_pool import LatePool
from .stub_network import stub_network, stub_path

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=16, block_size=16, dtype="float32")
NUM_BLOCKS = 16
KEY = b"key"


def header(blocks: list[int]) -> Push:
    return Push(transfer_id=TransferId("t"), lease_id=LeaseId(0), generation=0, group=0, blocks=blocks, transport="")


class Side:
    """A pool with one block a staging buffer, and its transport; that of ``p`` has random bytes."""

    def __init__(self, name: str, transport: str) -> None:
        self.me = Peer(f"control of {name}", Incarnation(name))
        num_bytes = NUM_BLOCKS * LAYOUT.block_bytes
        memory = bytearray(np.random.default_rng(1).bytes(num_bytes) if name == "p" else num_bytes)
        self.pool = LatePool(memoryview(memory), NUM_BLOCKS, LAYOUT, 1, staging_bytes=1)
        self.transport: UcxTransport | NcclTransport
        if transport == "ucx":
            self.transport = UcxTransport(self.pool, self.me, KEY, 50.0)
        else:
            mailbox = Mailbox("127.0.0.1", 0, Incarnation(name))
            self.transport = NcclTransport(self.pool, stub_network(stub_path()), mailbox, KEY, 50.0, lambda: None)
        self.arrived: list[int] = []

    def turn(self) -> None:
        while (delivery := self.transport.inbox.receive()) is not None:
            assert isinstance(delivery.message, Push)
            self.pool.land(delivery.message, delivery.payload)
            self.arrived += delivery.message.blocks


class Pair:
    def __init__(self, transport: str) -> None:
        self.prefill, self.decode = Side("p", transport), Side("d", transport)
        self.prefill.transport.open(self.decode.me, self.decode.transport.card, NUM_BLOCKS)

    def push(self, blocks: list[int]) -> PackingPieces:
        copy = BlockCopy(blocks, blocks, self.prefill.pool.all_layers)
        return self.prefill.transport.push(self.decode.me, header(blocks), copy)

    def run_until(self, is_done: Callable[[], object]) -> None:
        turn_until(is_done, self.prefill.turn, self.decode.turn)

    def run_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.run_until(lambda: time.monotonic() > end)

    def holds(self, blocks: list[int]) -> bool:
        return bool(np.array_equal(self.decode.pool.array[blocks], self.prefill.pool.array[blocks]))


@pytest.fixture
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = Pair(request.param)
    yield made
    made.prefill.transport.close()
    made.decode.transport.close()


ucx = pytest.mark.parametrize("pair", ["ucx"], indirect=True)
both = pytest.mark.parametrize("pair", ["ucx", "nccl"], indirect=True)


@ucx
def test_bytes_leave_and_their_sources_are_free_only_when_they_are_packed(pair: Pair) -> None:
    pool = pair.prefill.pool
    packing = pair.push([3, 5])
    pair.run_for(0.05)
    assert (pool.num_launched, pair.decode.arrived, packing.is_done) == (2, [], False)
    pool.run(1)
    pair.run_until(lambda: pair.decode.arrived)
    assert (pair.decode.arrived, packing.is_done) == ([3], False)
    pool.run(1)
    assert packing.is_done
    pair.run_until(lambda: len(pair.decode.arrived) == 2)
    pair.decode.pool.run(2)
    assert pair.holds([3, 5])


@ucx
def test_a_buffer_is_filled_again_only_when_its_bytes_have_landed(pair: Pair) -> None:
    pool, blocks = pair.decode.pool, list(range(NUM_BLOCKS))
    pair.prefill.pool.is_late = False
    pair.push(blocks)
    pair.run_for(0.05)
    assert pair.decode.arrived == blocks[: pool.num_staging]
    for count in range(pool.num_staging + 1, NUM_BLOCKS + 1):
        pool.run(1)
        pair.run_until(lambda: len(pair.decode.arrived) == count)  # noqa: B023
    pool.run(pool.num_staging)
    assert pair.holds(blocks)


@ucx
def test_the_loop_does_not_sleep_while_a_copy_runs_whose_end_is_no_event(pair: Pair) -> None:
    packing = pair.push([3])
    pair.run_for(0.05)
    assert (packing.wakes, pair.prefill.transport.is_moving, pair.decode.transport.is_moving) == (False, True, False)
    pair.prefill.pool.run(1)
    pair.run_until(lambda: pair.decode.arrived)
    pair.run_for(0.05)
    assert (packing.wakes, pair.prefill.transport.is_moving, pair.decode.transport.is_moving) == (True, False, True)
    pair.decode.pool.run(1)
    pair.run_for(0.05)
    assert not pair.decode.transport.is_moving


@both
def test_more_than_all_buffers_hold_arrives_whole_however_late_copies_run(pair: Pair) -> None:
    blocks = list(range(NUM_BLOCKS))
    packing = pair.push(blocks)

    def is_here() -> bool:
        for side in (pair.prefill, pair.decode):
            side.pool.run(min(1, side.pool.num_launched))
        return len(pair.decode.arrived) == NUM_BLOCKS

    pair.run_until(is_here)
    pair.decode.pool.run(pair.decode.pool.num_launched)
    assert packing.is_done and pair.holds(blocks)


@both
def test_only_the_copies_beside_which_nothing_travels_may_take_all_of_the_memory(pair: Pair) -> None:
    pair.push([1, 4, 2])
    pair.run_for(0.05)
    pair.prefill.pool.is_late = False
    pair.prefill.pool.run(pair.prefill.pool.num_launched)
    pair.run_until(lambda: len(pair.decode.arrived) == 3)
    assert (pair.prefill.pool.beside_link, pair.decode.pool.beside_link) == ([False, True, True], [True, True, False])


@both
def test_a_peer_is_forgotten_when_nothing_is_copied_for_it_any_more(pair: Pair) -> None:
    pair.push([0])
    pair.prefill.transport.forget(pair.decode.me)
    assert pair.prefill.pool.num_launched == 0


@both
def test_random_pushes_copies_and_sudden_ends_bring_right_bytes_or_none(pair: Pair) -> None:
    chance = random.Random(7)
    for _ in range(120):
        with suppress(LinkDown):
            pair.push(chance.sample(range(NUM_BLOCKS), chance.randrange(1, 9)))
        for side in (pair.prefill, pair.decode):
            side.pool.run(chance.randrange(side.pool.num_launched + 1))
        pair.run_for(chance.random() * 0.01)
        if chance.random() < 0.08:
            pair.prefill.transport.forget(pair.decode.me)
            pair.decode.transport.inbox.forget(pair.prefill.me)
        with suppress(NotReachable):
            pair.prefill.transport.open(pair.decode.me, pair.decode.transport.card, NUM_BLOCKS)
    pair.decode.pool.run(pair.decode.pool.num_launched)
    landed = sorted(set(pair.decode.arrived))
    assert len(pair.decode.arrived) > 2 * NUM_BLOCKS and pair.holds(landed)
    others = [block for block in range(NUM_BLOCKS) if block not in landed]
    assert not pair.decode.pool.array[others].any()


# --- how a push is cut ---------------------------------------------------------------------------------


def test_pieces_grow_from_an_idle_link_on_and_shrink_towards_the_end() -> None:
    unit, sizes, left = RAMP_BYTES, list[int](), 16 * RAMP_BYTES
    while left:
        sizes.append(min(left, next_bytes(sum(sizes), left, is_last=True)))
        left -= sizes[-1]
    assert [size / unit for size in sizes] == [1, 1, 2, 4, 4, 2, 1, 1]
    assert next_bytes(4 * unit, 4 * unit, is_last=False) == 4 * unit, "others follow"


@pytest.mark.parametrize(
    ("is_end", "others_wait", "num_blocks"), [(True, False, 4), (True, True, 8), (False, False, 8)]
)
def test_only_the_end_of_a_transfer_shrinks(is_end: bool, others_wait: bool, num_blocks: int) -> None:
    blocks = list(range(8))
    copy = BlockCopy(blocks, blocks, LayerGroup(0, 2))
    pieces = PackingPieces(Peer("", Incarnation("")), header(blocks), copy, 8, RAMP_BYTES, is_end, lambda: None)
    _, piece = pieces.take(8 * RAMP_BYTES, others_wait)
    assert len(piece.sources) == num_blocks


def test_what_is_dropped_is_no_piece_any_more() -> None:
    copy = BlockCopy([1, 2, 3], [4, 5, 6], LayerGroup(0, 2))
    pieces = PackingPieces(Peer("", Incarnation("")), header([4, 5, 6]), copy, 2, 1, True, lambda: None)
    message, piece = pieces.take(0, others_wait=False)
    assert (message, piece.sources, piece.destinations) == (header([4, 5]), [1, 2], [4, 5])
    assert (pieces.num_left, pieces.is_done) == (1, False)
    pieces.drop()
    assert (pieces.num_left, pieces.is_done) == (0, True)
