"""Blocks from the memory of one GPU process into that of another: CUDA IPC, and UCX over the same pools.

Two real processes. With two GPUs they lie on different ones; without any, the stand-ins of `gpu_side` take their place.
"""

import random
import select
import time
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from crossdock.core.messages import Commit, LeaseId, Push, TransportCard
from crossdock.core.part import Delivery
from crossdock.kvtransfer.cuda_memory import CudaError, batches
from crossdock.kvtransfer.lease import Lease
from crossdock.kvtransfer.receiver import Change, Receiver, ReceiverState
from crossdock.kvtransfer.transport import NotReachable

from ..model.gpu import HAS_GPU
from . import host_driver
from .gpu_side import (
    LAYOUT,
    NUM_BLOCKS,
    NUM_GROUPS,
    Order,
    Side,
    SideProcess,
    T,
    peer,
    push_header,
    random_bytes,
    side_process,
)

SENDER_SEED, POISON = 5, 0xA5
needs_gpu = pytest.mark.skipif(
    not HAS_GPU, reason="UCX takes no tensors of a CPU: run this file where torch sees a GPU"
)
TRANSPORTS = ["cuda_ipc", "cuda_ipc by kernel", pytest.param("ucx", marks=needs_gpu)]


@pytest.fixture(scope="module", autouse=True)
def driver() -> Iterator[None]:
    patch = pytest.MonkeyPatch() if HAS_GPU else host_driver.stand_in()
    yield
    patch.undo()


@pytest.fixture(scope="module", params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def sender(driver: None, transport: str) -> Iterator[SideProcess]:
    with side_process("p", transport, SENDER_SEED) as started:
        yield started


@pytest.fixture
def receiver(sender: SideProcess, transport: str) -> Iterator[Side]:
    """A poisoned pool that the sender has opened under the name ``d``."""
    side = Side("d", transport, 1, is_far=True)
    side.fill(np.full_like(random_bytes(0), POISON))
    assert sender.do(Order(verb="open", to="d", card=side.transport.card)) == ""
    yield side
    assert sender.do(Order(verb="forget", to="d")) == ""
    side.transport.close()


def pushed(sender: SideProcess, receiver: Side, group: int, sources: list[int], destinations: list[int]) -> None:
    """A push that has landed; UCX brings it in pieces."""
    to = receiver.me.incarnation
    sender.say(Order(verb="push", to=to, group=group, sources=sources, destinations=destinations))
    missing = set(destinations)
    inbox = receiver.transport.inbox
    end = time.monotonic() + 30.0
    while inbox is not None and missing:
        assert time.monotonic() < end, "not within 30 s"
        delivery = inbox.receive()
        if delivery is None:
            select.select([inbox.poll_socket], [], [], 0.1)
        elif delivery.sender == peer("p"):
            assert isinstance(delivery.message, Push)
            receiver.pool.land(delivery.message, delivery.payload)
            missing.difference_update(delivery.message.blocks)
    assert sender.line() == b'""\n'


def expected(pushes: list[tuple[list[int], list[int], range]]) -> np.ndarray:
    """The poisoned pool after these copies of the sender's blocks."""
    content, source = np.full_like(random_bytes(0), POISON), random_bytes(SENDER_SEED)
    for sources, destinations, layers in pushes:
        content[destinations, layers.start : layers.stop] = source[sources, layers.start : layers.stop]
    return content


MANY = NUM_BLOCKS // 2
SHUFFLED = random.Random(3).sample(range(NUM_BLOCKS), NUM_BLOCKS)
BLOCKS = {
    "one": ([3], [NUM_BLOCKS - 1]),
    "adjacent": (list(range(2, 2 + MANY)), list(range(NUM_BLOCKS - MANY, NUM_BLOCKS))),
    "backwards": (list(range(MANY)), list(range(MANY))[::-1]),
    "scattered": (SHUFFLED[:MANY], SHUFFLED[-MANY:]),
    "a source for several": ([7, 7, 1], [0, 5, 2]),
}


@pytest.mark.parametrize("blocks", BLOCKS.values(), ids=BLOCKS)
def test_the_listed_blocks_land_byte_for_byte_and_nothing_else_changes(
    sender: SideProcess, receiver: Side, blocks: tuple[list[int], list[int]]
) -> None:
    pushes = []
    for group in range(NUM_GROUPS):
        pushed(sender, receiver, group, *blocks)
        layers = receiver.group(group)
        pushes.append((*blocks, range(layers.first, layers.end)))
        assert np.array_equal(receiver.content, expected(pushes)), f"after group {group}"


def test_what_was_pushed_has_the_checksums_of_its_sources(sender: SideProcess, receiver: Side) -> None:
    sources, destinations = BLOCKS["scattered"]
    for group in range(NUM_GROUPS):
        pushed(sender, receiver, group, sources, destinations)
    receiver_sums = receiver.pool.checksums(destinations)
    receiver.fill(random_bytes(SENDER_SEED))
    assert receiver_sums == receiver.pool.checksums(sources)


def test_a_peer_that_was_forgotten_or_a_block_that_is_not_there_gets_nothing(
    sender: SideProcess, receiver: Side, transport: str
) -> None:
    assert "the peer" in sender.do(Order(verb="push", to="nobody", sources=[1], destinations=[1]))
    if transport != "ucx":
        for block in (NUM_BLOCKS, -1):
            refused = sender.do(Order(verb="push", to="d", sources=[1], destinations=[block]))
            assert refused == "a destination lies outside the peer's pool"
    assert np.array_equal(receiver.content, expected([]))


COMMIT = Commit(transfer_id=T, lease_id=LeaseId(4), generation=2, num_block_groups=NUM_GROUPS, first_token_ids=[7])


def test_bytes_of_a_stale_generation_are_never_attached_to(sender: SideProcess, receiver: Side) -> None:
    lease = Lease(LeaseId(4), 3, peer("p").incarnation, 10.0, 10.0)
    machine = Receiver(T, lease, 0, [6], receiver.pool.group_bytes)
    for group in range(NUM_GROUPS):
        pushed(sender, receiver, group, [2], [6])
        assert machine.handle(Delivery(peer("p"), push_header(group, [6], "cuda_ipc")), 1.0).change is None
    assert machine.handle(Delivery(peer("p"), COMMIT), 1.1).change is None
    assert machine.state is ReceiverState.RESERVED


def test_a_pool_that_is_freed_and_made_anew_is_reached_by_its_new_card_alone(
    sender: SideProcess, receiver: Side, transport: str
) -> None:
    """The next incarnation has fewer blocks, maybe at the same address."""
    pushed(sender, receiver, 0, [1], [2])
    assert sender.do(Order(verb="forget", to="d")) == ""
    old = Side("d", transport, 1, is_far=True)
    assert sender.do(Order(verb="open", to="d", card=old.transport.card)) == ""
    pushed(sender, old, 0, [1], [2])
    assert sender.do(Order(verb="forget", to="d")) == ""
    old.transport.close()
    del old
    torch.cuda.empty_cache()
    num_blocks = NUM_BLOCKS - 4
    anew = Side("d2", transport, 9, is_far=True, num_blocks=num_blocks)
    assert sender.do(Order(verb="open", to="d2", card=anew.transport.card, num_blocks=num_blocks)) == ""
    before = receiver.content
    pushed(sender, anew, 1, [8, 3], [0, num_blocks - 1])
    layers, wanted = anew.group(1), random_bytes(9, num_blocks).copy()
    wanted[[0, num_blocks - 1], layers.first : layers.end] = random_bytes(SENDER_SEED)[
        [8, 3], layers.first : layers.end
    ]
    assert np.array_equal(anew.content, wanted)
    assert np.array_equal(receiver.content, before)
    assert sender.do(Order(verb="forget", to="d2")) == ""
    anew.transport.close()


def test_a_card_that_promises_more_than_there_is_leads_nowhere(sender: SideProcess, receiver: Side) -> None:
    if receiver.transport.card.name == "cuda_ipc":
        told = sender.do(Order(verb="open", to="x", card=receiver.transport.card, num_blocks=NUM_BLOCKS + 1))
        assert told == "the peer's memory is smaller than its pool"
    for address in ("", "{}", '{"host":"h","handle":"AA==","offset":0,"num_bytes":9}'):
        with pytest.raises(NotReachable):
            receiver.transport.open(peer("x"), TransportCard("cuda_ipc", address), 1)


def test_a_sender_killed_in_mid_push_leaves_a_pool_that_works_and_blocks_in_quarantine(
    sender: SideProcess, receiver: Side, transport: str
) -> None:
    machine = Receiver(T, Lease(LeaseId(4), 2, peer("q").incarnation, 10.0, 10.0), 0, [6], receiver.pool.group_bytes)
    with side_process("q", transport, 6) as doomed:
        assert doomed.do(Order(verb="open", to="d", card=receiver.transport.card)) == ""
        doomed.say(Order(verb="flood", to="d", sources=[1], destinations=[6]))
        assert doomed.line() == b'"another one"\n', "one push is over, and others are under way"
        doomed.kill()
    assert machine.handle(Delivery(peer("q"), push_header(0, [6], "cuda_ipc")), 0.9).change is None
    assert machine.handle(Delivery(peer("q"), COMMIT), 1.0).change is None, "two layer groups are missing"
    assert machine.lose(3.0).change is Change.QUARANTINE
    if receiver.transport.inbox is not None:
        receiver.transport.forget(peer("q"))
    receiver.fill(expected([]))
    pushed(sender, receiver, 2, [4], [6])
    layers = receiver.group(2)
    assert np.array_equal(receiver.content, expected([([4], [6], range(layers.first, layers.end))]))
    assert machine.tick(13.0).change is Change.END_QUARANTINE


def test_a_sender_outlives_a_receiver_that_was_killed(sender: SideProcess, receiver: Side, transport: str) -> None:
    with side_process("o", transport, 8) as doomed:
        assert sender.do(Order(verb="open", to="o", card=doomed.card)) == ""
        doomed.kill()
    push = Order(verb="push", to="o", sources=[1], destinations=[2])
    if transport != "ucx":
        assert sender.do(push) == "", "memory that is mapped lasts"
    assert sender.do(Order(verb="forget", to="o")) == ""
    assert sender.do(push) != ""
    pushed(sender, receiver, 0, [1], [2])
    layers = receiver.group(0)
    assert np.array_equal(receiver.content, expected([([1], [2], range(layers.first, layers.end))]))


@pytest.mark.parametrize("transport", ["cuda_ipc"], indirect=True, scope="module")
def test_memory_that_the_driver_will_not_unmap_is_told_and_ends_nobody(
    sender: SideProcess, receiver: Side, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(address: int, device: torch.device) -> None:
        raise CudaError("CUDA_ERROR_UNKNOWN")

    receiver.transport.open(peer("p"), sender.card, NUM_BLOCKS)
    monkeypatch.setattr("crossdock.kvtransfer.cuda_ipc.unmap_memory", refuse)
    receiver.transport.forget(peer("p"))
    assert "the memory of control of p stays mapped: CUDA_ERROR_UNKNOWN" in caplog.text


def test_the_layer_groups_of_the_pool_are_whole(receiver: Side) -> None:
    assert sum(receiver.pool.group_bytes) == LAYOUT.block_bytes


def test_pieces_go_in_growing_batches_each_copied_while_the_next_is_told() -> None:
    assert list(batches(512)) == [range(48), range(48, 124), range(124, 246), range(246, 442), range(442, 512)]
    assert list(batches(48)) == [range(48)]
    assert list(batches(49)) == [range(48), range(48, 49)]
    assert list(batches(0)) == []
