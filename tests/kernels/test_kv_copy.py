"""Copies of listed blocks, every byte checked, also those that must stay."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from crossdock.kernels import reference

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from crossdock.kernels import kv_copy  # noqa: E402
from crossdock.kernels.kv_copy import CopyShape  # noqa: E402

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
NUM_LAYERS, LAYER_BYTES = 4, 512


def random_pool(seed: int, num_blocks: int = 6, layer_bytes: int = LAYER_BYTES) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (num_blocks, NUM_LAYERS, layer_bytes)
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(DEVICE)


def blocks_of(*blocks: int) -> Tensor:
    return torch.tensor(blocks, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("layers", [range(4), range(1, 3), range(3, 4)])
def test_staged_blocks_arrive_in_other_blocks_and_nothing_else_changes(layers: range) -> None:
    source, destination = random_pool(1), random_pool(2)
    expected = destination.clone()
    staging = kv_copy.gather_blocks(source, blocks_of(5, 0, 3), layers)
    assert torch.equal(staging, reference.gather_blocks(source, blocks_of(5, 0, 3), layers))
    kv_copy.scatter_blocks(staging, blocks_of(2, 4, 1), layers, destination)
    reference.scatter_blocks(staging, blocks_of(2, 4, 1), layers, expected)
    assert torch.equal(destination, expected)
    assert torch.equal(destination[4, layers.start : layers.stop], source[0, layers.start : layers.stop])


SHAPES = {
    "one program": CopyShape(1),
    "two that fetch ahead": CopyShape(2, num_warps=8, tile_bytes=1024, num_stages=3),
    "more than there is to do": CopyShape(16, num_warps=4, tile_bytes=512),
    "streaming": CopyShape(3, num_warps=32, tile_bytes=128 << 10, is_streaming=True),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_blocks_go_from_address_to_address(shape: CopyShape) -> None:
    source, destination = random_pool(1), random_pool(2)
    expected = destination.clone()
    expected[[1, 0], 1:3] = source[[4, 2], 1:3]
    span = kv_copy.layer_span(source, range(1, 3))
    blocks = (blocks_of(4, 2), blocks_of(1, 0))
    kv_copy.copy_blocks(source.data_ptr(), destination.data_ptr(), *blocks, span, shape)
    assert torch.equal(destination, expected)


def test_spans_longer_than_a_tile_are_copied_to_their_end() -> None:
    source = random_pool(3, 2, kv_copy.LINK.tile_bytes // 2 + 48)
    destination = torch.zeros_like(source)
    kv_copy.copy_blocks(
        source.data_ptr(), destination.data_ptr(), blocks_of(1), blocks_of(0), kv_copy.layer_span(source, range(4))
    )
    assert torch.equal(destination[0], source[1])
    assert not destination[1].any()


def test_no_blocks_are_no_launch() -> None:
    assert kv_copy.gather_blocks(random_pool(1), blocks_of(), range(4)).shape == (0, 4, LAYER_BYTES)


class Recorded:
    """A kernel, or what was compiled of it, that counts its launches."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.num_launches = 0
        self.compiled: list[Recorded] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., "Recorded"]:
        def launch(*arguments: object, **options: int) -> Recorded:
            self.num_launches += 1
            self.kernel[grid](*arguments, **options)
            self.compiled.append(Recorded(self.kernel))
            return self.compiled[-1]

        return launch


def test_what_was_compiled_once_is_launched_as_it_is_with_other_blocks_in_other_pools(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kernel = Recorded(kv_copy._copy_spans)
    monkeypatch.setattr(kv_copy, "_copy_spans", kernel)
    monkeypatch.setattr(kv_copy, "_compiled", {})
    expected = random_pool(2)
    destination = expected.clone()
    for seed, sources, destinations in [(1, (4, 2), (1, 0)), (3, (0, 5, 1), (3, 5, 2))]:
        source = random_pool(seed)
        for layers in (range(1, 3), range(1)):
            lists = blocks_of(*sources), blocks_of(*destinations)
            span = kv_copy.layer_span(source, layers)
            kv_copy.copy_blocks(source.data_ptr(), destination.data_ptr(), *lists, span, CopyShape(2))
            expected[list(destinations), layers.start : layers.stop] = source[list(sources), layers.start : layers.stop]
    assert torch.equal(destination, expected)
    assert kernel.num_launches == 2, "one for each number of layers"
    assert [compiled.num_launches for compiled in kernel.compiled] == [1, 1]
