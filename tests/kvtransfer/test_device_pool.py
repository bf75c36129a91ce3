"""A pool in a device's memory: what goes in through the host comes out again, and nothing else changes."""

import os

import pytest
import torch

from crossdock.core.kv_layout import KvLayout, LayerGroup
from crossdock.kvtransfer.device_pool import DevicePool
from crossdock.kvtransfer.pool_bytes import PoolBytes

from ..model.gpu import gpu_stream

LAYOUT = KvLayout(num_layers=4, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
NUM_BLOCKS = 6


@pytest.fixture
def pool() -> DevicePool:
    stream = gpu_stream()
    tensor = torch.randn(NUM_BLOCKS, *LAYOUT.block_shape).to(stream.device)
    return DevicePool(tensor, LAYOUT, 2, stream)


@pytest.mark.parametrize("layers", [LayerGroup(0, 4), LayerGroup(0, 2), LayerGroup(3, 4)])
def test_spans_that_are_written_are_read_again_and_nothing_else_changes(pool: DevicePool, layers: LayerGroup) -> None:
    before = pool.tensor.cpu()
    span_bytes = (layers.end - layers.first) * LAYOUT.layer_bytes
    payload = os.urandom(3 * span_bytes)
    pool.write([4, 0, 5], layers, memoryview(payload))
    assert pool.read([4, 0, 5], layers) == payload
    assert pool.read([5], layers) == payload[2 * span_bytes :]
    after = pool.tensor.cpu()
    before[[4, 0, 5], layers.first : layers.end] = after[[4, 0, 5], layers.first : layers.end]
    assert torch.equal(after, before)


def test_its_checksums_are_those_of_a_pool_in_host_memory_and_change_with_every_bit(pool: DevicePool) -> None:
    memory = bytearray(pool.read(range(NUM_BLOCKS), pool.all_layers))
    host = PoolBytes(memoryview(memory), NUM_BLOCKS, LAYOUT, 2)
    before = host.checksums([5, 0, 3])
    assert pool.checksums([5, 0, 3]) == before
    assert host.checksums([0, 5, 3]) != before
    place = 3 * LAYOUT.block_bytes + 2 * LAYOUT.layer_bytes + 7  # of the second layer group
    for bit in range(8):
        memory[place] ^= 1 << bit
        changed = host.checksums([5, 0, 3])
        assert changed[0] == before[0] and changed[1] != before[1]
        memory[place] ^= 1 << bit


def test_lists_for_kernels_lie_at_addresses_that_suit_them_all(pool: DevicePool) -> None:
    lists = pool.block_lists([5, 1, 2], [], [0, 4, 3])
    assert [blocks.tolist() for blocks in lists] == [[5, 1, 2], [], [0, 4, 3]]
    assert [blocks.data_ptr() % 16 for blocks in (lists[0], lists[2])] == [0, 0]


def test_lists_that_were_asked_for_lately_are_on_the_device_still(
    pool: DevicePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("crossdock.kvtransfer.device_pool.MAX_LISTS", 2)
    first = pool.block_lists([5, 1], [0])
    assert pool.block_lists((5, 1), range(1)) is first
    assert [blocks.tolist() for blocks in pool.block_lists([5], [1, 0])] == [[5], [1, 0]]
    assert pool.block_lists([5, 1], [0]) is first
    pool.block_list([3])
    assert pool.block_lists([5, 1], [0]) is not first, "the oldest has made room"


def test_its_groups_are_those_of_a_pool_in_host_memory(pool: DevicePool) -> None:
    assert pool.groups == (LayerGroup(0, 2), LayerGroup(2, 4))
    assert pool.group_bytes == (2 * LAYOUT.layer_bytes, 2 * LAYOUT.layer_bytes)
