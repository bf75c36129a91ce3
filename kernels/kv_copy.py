"""Blocks between pools, and between a pool and a staging buffer: the listed blocks, all or some of their layers.

Few programs with many bytes in flight each: a copy to another GPU is bound by the link, and should leave the chip to
the computation beside it.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sizes import cdiv

WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class CopyShape:
    """How a copy is spread over a chip: ``num_programs`` of ``num_warps`` warps, ``tile_bytes`` a turn of each.

    A thread has ``tile_bytes / (32 * num_warps)`` bytes under way. With more than one stage it also fetches the tiles
    of its next turns, through shared memory. ``is_streaming`` asks the caches to keep nothing of what is copied.
    """

    num_programs: int
    num_warps: int = 16
    tile_bytes: int = 64 << 10
    num_stages: int = 1
    is_streaming: bool = False


LINK = CopyShape(24)
"""To another GPU. A program moves 22 GB/s (measured on H200s), so 16 nearly fill the NVLinks and these do."""
LOCAL = CopyShape(264)
STAGING = CopyShape(48)
"""To and from a staging buffer: most processors stay free for a step and for NCCL's programs."""
BESIDE_LINK = CopyShape(16)
"""The same while a link reads or writes that memory, too: copies take the memory's speed from it. Eight prompts at once
travelled at 298 GB/s beside copies of 48 programs, 312 beside 16, 348 beside 12, which packed one alone too late."""


_compiled: dict[tuple[object, ...], Any] = {}
"""What Triton has made for such arguments; to find it again takes Triton longer than to launch it."""


@dataclass(frozen=True, slots=True)
class BlockSpan:
    """The bytes ``offset .. offset + size`` of every block, ``stride`` bytes apart; all multiples of 16."""

    offset: int
    size: int
    stride: int


def layer_span(pool: Tensor, layers: range) -> BlockSpan:
    """Of consecutive layers in ``pool [num_blocks, num_layers, layer_bytes]``, uint8, contiguous."""
    _, num_layers, layer_bytes = pool.shape
    return BlockSpan(layers.start * layer_bytes, len(layers) * layer_bytes, num_layers * layer_bytes)


def copy_blocks(
    source: int,
    destination: int,
    source_blocks: Tensor,
    destination_blocks: Tensor,
    span: BlockSpan,
    shape: CopyShape = LINK,
) -> None:
    """Copy the span of block ``source_blocks[i]`` to that of ``destination_blocks[i]``, pools of one layout.

    ``source`` and ``destination`` are the addresses of the pools, which may be mappings of another device's memory; the
    lists lie on the device that runs the copy. No two destinations may be the same.
    """
    start, stop = source + span.offset, destination + span.offset
    _launch(start, stop, source_blocks, destination_blocks, span, span.stride, span.stride, shape)


def gather_blocks(
    pool: Tensor, blocks: Tensor, layers: range, staging: Tensor | None = None, shape: CopyShape = STAGING
) -> Tensor:
    """Of ``pool [num_blocks, num_layers, layer_bytes]``, uint8 -> ``[len(blocks), len(layers), layer_bytes]``.

    That is ``staging`` if given.
    """
    if staging is None:
        staging = pool.new_empty(len(blocks), len(layers), pool.shape[2])
    span = layer_span(pool, layers)
    _launch(pool.data_ptr() + span.offset, staging.data_ptr(), blocks, None, span, span.stride, span.size, shape)
    return staging


def scatter_blocks(staging: Tensor, blocks: Tensor, layers: range, pool: Tensor, shape: CopyShape = STAGING) -> None:
    """The inverse of `gather_blocks`."""
    span = layer_span(pool, layers)
    _launch(staging.data_ptr(), pool.data_ptr() + span.offset, None, blocks, span, span.size, span.stride, shape)


def _launch(
    source: int,
    destination: int,
    source_blocks: Tensor | None,
    destination_blocks: Tensor | None,
    span: BlockSpan,
    source_stride: int,
    destination_stride: int,
    shape: CopyShape,
) -> None:
    """A list that is ``None`` stands for 0, 1, 2, …"""
    listed = source_blocks if source_blocks is not None else destination_blocks
    assert listed is not None, "one side at least is a pool"
    assert not (source | destination | span.size | source_stride | destination_stride) % 16, "16 bytes a load"
    num_tiles = cdiv(span.size, shape.tile_bytes)
    num_items = len(listed) * num_tiles
    if num_items == 0:
        return
    lists = [listed if blocks is None else blocks for blocks in (source_blocks, destination_blocks)]
    sizes = (source_stride // WORD_BYTES, destination_stride // WORD_BYTES, span.size // WORD_BYTES)
    constants = (
        source_blocks is not None, destination_blocks is not None, shape.tile_bytes // WORD_BYTES, shape.num_stages,
        "evict_first" if shape.is_streaming else "",
    )  # fmt: skip
    arguments = (source, destination, *lists, *sizes, num_tiles, num_items, *constants)
    alignments = (blocks.data_ptr() % 16 for blocks in lists)
    key = (listed.device, shape.num_warps, *alignments, *sizes, *constants)
    grid = (min(shape.num_programs, num_items), 1, 1)
    with torch.cuda.device_of(listed):
        if (compiled := _compiled.get(key)) is not None:
            compiled[grid](*arguments)
        else:
            _compiled[key] = _copy_spans[grid](*arguments, num_warps=shape.num_warps)


@triton.jit(do_not_specialize=["num_tiles", "num_items"])
def _copy_spans(
    source, destination, source_blocks, destination_blocks, source_stride, destination_stride, size,
    num_tiles, num_items,
    FROM_LIST: tl.constexpr, TO_LIST: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr, EVICTION: tl.constexpr,
):  # fmt: skip
    source = tl.multiple_of(source.to(tl.int64).to(tl.pointer_type(tl.int64)), 16)  # a small address comes as an int32
    destination = tl.multiple_of(destination.to(tl.int64).to(tl.pointer_type(tl.int64)), 16)
    for item in tl.range(tl.program_id(0), num_items, tl.num_programs(0), num_stages=STAGES):
        index = item // num_tiles
        words = (item % num_tiles) * TILE + tl.arange(0, TILE)
        is_inside = words < size
        source_block = (tl.load(source_blocks + index) if FROM_LIST else index).to(tl.int64)
        destination_block = (tl.load(destination_blocks + index) if TO_LIST else index).to(tl.int64)
        start = tl.multiple_of(source_block * source_stride, 2)
        data = tl.load(source + start + words, mask=is_inside, eviction_policy=EVICTION)
        start = tl.multiple_of(destination_block * destination_stride, 2)
        tl.store(destination + start + words, data, mask=is_inside, eviction_policy=EVICTION)
