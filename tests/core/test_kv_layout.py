"""Sizes and layer groups of a block."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.core.kv_layout import KvLayout

LAYOUT = KvLayout(num_layers=10, num_kv_heads=2, head_dim=64, block_size=16, dtype="bfloat16")


def test_a_block_holds_k_and_v_of_all_layers() -> None:
    assert LAYOUT.block_shape == (10, 2, 2, 16, 64)
    assert LAYOUT.layer_bytes == 2 * 2 * 16 * 64 * 2 == 8192
    assert LAYOUT.block_bytes == 81_920


def test_float32_takes_twice_the_bytes_of_bfloat16() -> None:
    assert KvLayout(10, 2, 64, 16, "float32").block_bytes == 2 * LAYOUT.block_bytes


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(ValueError, match="KV dtype 'int3' is not one of"):
        KvLayout(10, 2, 64, 16, "int3")


def test_tokens_fill_whole_blocks() -> None:
    assert [LAYOUT.num_blocks_for(num_tokens) for num_tokens in (0, 1, 16, 17, 32, 33)] == [0, 1, 1, 2, 2, 3]


def test_ten_layers_in_four_groups() -> None:
    assert [(group.first, group.end) for group in LAYOUT.layer_groups(4)] == [(0, 2), (2, 5), (5, 7), (7, 10)]


def test_there_are_no_more_groups_than_layers() -> None:
    assert len(LAYOUT.layer_groups(100)) == 10


@given(st.integers(1, 130), st.integers(1, 130))
def test_groups_cover_every_layer_once_and_are_of_like_size(num_layers: int, num_groups: int) -> None:
    groups = KvLayout(num_layers, 1, 8, 16, "float32").layer_groups(num_groups)
    assert [layer for group in groups for layer in range(group.first, group.end)] == list(range(num_layers))
    sizes = {group.end - group.first for group in groups}
    assert max(sizes) - min(sizes) <= 1
