"""Shared memory: what an address is trusted for, and what a push writes."""

import json
import os
from collections.abc import Iterator

import numpy as np
import pytest

from crossdock.core.kv_layout import KvLayout
from crossdock.core.messages import Incarnation, LeaseId, Peer, Push, TransportCard
from crossdock.core.part import TransferFailed
from crossdock.core.request import TransferId
from crossdock.kvtransfer.pool_bytes import PoolBytes
from crossdock.kvtransfer.shm import SharedPool, ShmTransport, allocate_shared, map_shared
from crossdock.kvtransfer.transport import BlockCopy, NotReachable

LAYOUT = KvLayout(num_layers=3, num_kv_heads=1, head_dim=2, block_size=2, dtype="bfloat16")
NUM_BLOCKS = 6
PEER = Peer("tcp://127.0.0.1:1", Incarnation("d"))
HEADER = Push(transfer_id=TransferId("t"), lease_id=LeaseId(0), generation=0, group=1, blocks=[5, 0], transport="shm")


@pytest.fixture
def shared() -> Iterator[SharedPool]:
    pool = allocate_shared(NUM_BLOCKS * LAYOUT.block_bytes)
    yield pool
    pool.close()


def changed(address: str, **fields: object) -> str:
    return json.dumps({**json.loads(address), **fields})


def test_memory_is_zero_and_what_one_writes_the_other_sees(shared: SharedPool) -> None:
    mapped = map_shared(shared.address)
    assert len(mapped) == len(shared.memory) == NUM_BLOCKS * LAYOUT.block_bytes
    assert not any(shared.memory)
    mapped[7] = 9
    assert shared.memory[7] == 9
    mapped.close()


def test_mapping_leaves_no_descriptor_open(shared: SharedPool) -> None:
    before = sorted(os.listdir("/proc/self/fd"))
    mapped = map_shared(shared.address)
    with pytest.raises(NotReachable):
        map_shared(changed(shared.address, token="0" * 32))
    mapped.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"host": "another"}, "another host"),
        ({"pid": 2**22 + 1}, "can't be opened"),
        ({"fd": 10**6}, "can't be opened"),
        ({"token": "0" * 32}, "another process has the peer's pid now"),
        ({"num_bytes": 10**9}, "another size"),
    ],
)
def test_an_address_that_is_not_the_peers_pool_is_not_mapped(
    shared: SharedPool, fields: dict[str, object], reason: str
) -> None:
    with pytest.raises(NotReachable, match=reason):
        map_shared(changed(shared.address, **fields))


@pytest.mark.parametrize("address", ["", "tcp://127.0.0.1:5", "{}", '{"pid": "x"}'])
def test_an_address_of_another_kind_is_not_reachable(address: str) -> None:
    with pytest.raises(NotReachable, match="no shared memory address"):
        map_shared(address)


class Pair:
    """Two pools of one process."""

    def __init__(self, shared: SharedPool) -> None:
        memory = memoryview(bytearray(os.urandom(NUM_BLOCKS * LAYOUT.block_bytes)))
        self.source = PoolBytes(memory, NUM_BLOCKS, LAYOUT, 2)
        self.target = PoolBytes(shared.memory, NUM_BLOCKS, LAYOUT, 2)
        self.transport = ShmTransport(self.source, shared)

    def open(self, num_blocks: int = NUM_BLOCKS) -> None:
        self.transport.open(PEER, self.transport.card, num_blocks)

    def push(self, *destinations: int) -> None:
        copy = BlockCopy([1, 2], list(destinations), self.source.groups[1])
        self.transport.push(PEER, HEADER, copy)


def test_a_push_writes_its_layers_of_its_blocks_and_nothing_else() -> None:
    shared = allocate_shared(NUM_BLOCKS * LAYOUT.block_bytes)
    pair = Pair(shared)
    pair.open()
    pair.open()
    pair.push(5, 0)
    expected = np.zeros_like(pair.target.array)
    expected[[5, 0], 1:] = pair.source.array[[1, 2], 1:]
    assert np.array_equal(pair.target.array, expected)


@pytest.mark.parametrize("outside", [NUM_BLOCKS, -1])
def test_a_destination_outside_the_peers_pool_is_refused_before_a_byte_is_written(outside: int) -> None:
    pair = Pair(allocate_shared(NUM_BLOCKS * LAYOUT.block_bytes))
    pair.open()
    with pytest.raises(TransferFailed, match="outside"):
        pair.push(0, outside)
    assert not pair.target.array.any()


def test_a_pool_larger_than_its_memory_is_not_reachable() -> None:
    pair = Pair(allocate_shared(NUM_BLOCKS * LAYOUT.block_bytes))
    with pytest.raises(NotReachable, match="smaller"):
        pair.open(NUM_BLOCKS + 1)


def test_a_peer_that_was_not_opened_or_is_forgotten_gets_nothing() -> None:
    pair = Pair(allocate_shared(NUM_BLOCKS * LAYOUT.block_bytes))
    with pytest.raises(TransferFailed, match="not mapped"):
        pair.push(0, 1)
    pair.open()
    pair.transport.forget(PEER)
    pair.transport.forget(PEER)
    with pytest.raises(TransferFailed, match="not mapped"):
        pair.push(0, 1)


def test_a_card_of_another_process_is_told_apart_by_its_token(shared: SharedPool) -> None:
    other = allocate_shared(NUM_BLOCKS * LAYOUT.block_bytes)
    forged = changed(shared.address, fd=json.loads(other.address)["fd"])
    with pytest.raises(NotReachable, match="another process"):
        map_shared(forged)
    assert TransportCard("shm", shared.address) != TransportCard("shm", other.address)
    other.close()
