"""The bytes of a pool, read and written by block and layer group."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.core.kv_layout import KvLayout, LayerGroup
from crossdock.core.messages import LeaseId, Push
from crossdock.core.request import TransferId
from crossdock.kvtransfer.pool_bytes import PoolBytes

LAYOUT = KvLayout(num_layers=5, num_kv_heads=2, head_dim=3, block_size=4, dtype="float32")
NUM_BLOCKS = 8


def make_pool(num_groups: int = 2) -> PoolBytes:
    return PoolBytes(memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes)), NUM_BLOCKS, LAYOUT, num_groups)


def elements(pool: PoolBytes) -> np.ndarray:
    """``[block, layer, K or V, kv head, token, head dim]``"""
    return pool.array.view(np.float32).reshape(NUM_BLOCKS, *LAYOUT.block_shape)


def numbered(first: float = 1.0) -> np.ndarray:
    """Every element of every block has a value of its own."""
    shape = (NUM_BLOCKS, *LAYOUT.block_shape)
    return np.arange(first, first + np.prod(shape), dtype=np.float32).reshape(shape)


def test_the_memory_is_block_major_and_may_be_longer_than_the_pool() -> None:
    memory = bytearray(NUM_BLOCKS * LAYOUT.block_bytes + 100)
    pool = PoolBytes(memoryview(memory), NUM_BLOCKS, LAYOUT, 2)
    pool.array[3, 2, :4] = 255
    start = 3 * LAYOUT.block_bytes + 2 * LAYOUT.layer_bytes
    assert [i for i, byte in enumerate(memory) if byte] == list(range(start, start + 4))


def test_group_sizes_add_up_to_a_block() -> None:
    pool = make_pool(num_groups=3)
    assert pool.groups == (LayerGroup(0, 1), LayerGroup(1, 3), LayerGroup(3, 5))
    assert pool.group_bytes == (192, 384, 384)
    assert sum(pool.group_bytes) == LAYOUT.block_bytes


@settings(max_examples=50, deadline=None)
@given(
    blocks=st.lists(st.integers(0, NUM_BLOCKS - 1), unique=True),
    targets=st.permutations(range(NUM_BLOCKS)),
    layers=st.sampled_from([LayerGroup(0, 5), LayerGroup(0, 2), LayerGroup(2, 5), LayerGroup(3, 4)]),
)
def test_what_is_read_and_written_elsewhere_has_every_element_at_its_place(
    blocks: list[int], targets: list[int], layers: LayerGroup
) -> None:
    source, target = make_pool(), make_pool()
    elements(source)[...] = numbered()
    elements(target)[...] = -numbered()
    expected = elements(target).copy()
    for block, destination in zip(blocks, targets, strict=False):
        expected[destination, layers.first : layers.end] = numbered()[block, layers.first : layers.end]
    target.write(targets[: len(blocks)], layers, source.read(blocks, layers))
    assert np.array_equal(elements(target), expected)


def test_a_push_lands_in_the_layers_of_its_group() -> None:
    source, target = make_pool(), make_pool()
    elements(source)[...] = numbered()
    header = Push(
        transfer_id=TransferId("t"), lease_id=LeaseId(0), generation=0, group=1, blocks=[6, 2], transport="tcp"
    )
    target.land(header, memoryview(source.read([0, 1], source.groups[1])))
    assert np.array_equal(elements(target)[6, 2:], numbered()[0, 2:])
    assert np.array_equal(elements(target)[2, 2:], numbered()[1, 2:])
    assert not elements(target)[:, :2].any()


def test_a_payload_of_the_wrong_length_is_a_fault_of_the_caller() -> None:
    pool = make_pool()
    with pytest.raises(ValueError, match="reshape"):
        pool.write([0], pool.all_layers, b"x" * (LAYOUT.block_bytes - 1))
