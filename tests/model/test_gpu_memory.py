"""The arithmetic of a GPU's pool."""

import pytest

from crossdock.model.gpu_memory import GIB, GpuMemory


def test_the_pool_gets_what_its_share_of_the_memory_leaves() -> None:
    memory = GpuMemory(total=100 * GIB, utilization=0.9, in_use=20 * GIB, activations=8 * GIB, graphs=2 * GIB)
    assert memory.for_pool == 60 * GIB
    assert memory.num_blocks(block_bytes=7 * GIB, at_least=2) == 8


def test_no_room_is_explained_with_all_numbers() -> None:
    memory = GpuMemory(total=16 * GIB, utilization=0.5, in_use=5 * GIB, activations=2 * GIB, graphs=GIB // 2)
    expected = (
        r"0\.5 of 16\.00 GiB is 8\.00 GiB, of which 5\.00 GiB are in use, the largest step takes 2\.00 GiB and graphs "
        r"0\.50 GiB; that leaves 0\.50 GiB, and 2 blocks take 4\.00 GiB"
    )
    with pytest.raises(ValueError, match=expected):
        memory.num_blocks(block_bytes=2 * GIB, at_least=2)
