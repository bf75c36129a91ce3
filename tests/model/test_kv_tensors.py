"""The pool's memory, as tensors for the kernels and as bytes for transfers."""

import numpy as np
import pytest
import torch

from crossdock.core.kv_layout import KvLayout
from crossdock.model.kv_tensors import KvTensors


def layout(dtype: str = "float32") -> KvLayout:
    return KvLayout(num_layers=3, num_kv_heads=2, head_dim=4, block_size=8, dtype=dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_bytes_are_the_tensors_memory_by_block_and_layer(dtype: str) -> None:
    kv = KvTensors(layout(dtype), 5)
    kv.tensor[3, 1] = 1.5
    written = kv.bytes.any(2)
    assert kv.bytes.shape == (5, 3, layout(dtype).layer_bytes)
    assert written.tolist() == [[(block, layer) == (3, 1) for layer in range(3)] for block in range(5)]
    kv.bytes[4, 2] = kv.bytes[3, 1]
    assert torch.equal(kv.tensor[4, 2], kv.tensor[3, 1])


def test_a_layer_is_a_view_across_all_blocks() -> None:
    kv = KvTensors(layout(), 5)
    kv.layers[2][4, 1, 0, 7] = 9.0
    assert kv.tensor[4, 2, 1, 0, 7].tolist() == [9.0] * 4
    assert kv.tensor.count_nonzero() == 4


def test_memory_of_ones_own_starts_as_zeros() -> None:
    assert not KvTensors(layout(), 5).tensor.any()


def test_a_given_buffer_is_used_in_place_even_if_it_is_longer() -> None:
    buffer = bytearray(5 * layout().block_bytes + 100)
    kv = KvTensors(layout(), 5, memoryview(buffer))
    kv.tensor[4, 2, 1, 1, 7, 3] = 1.0
    assert np.frombuffer(buffer, np.float32, count=5 * layout().block_bytes // 4)[-1] == 1.0
    assert not any(buffer[-100:])
