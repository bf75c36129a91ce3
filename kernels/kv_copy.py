"""Blocks between pools, and between a pool and a staging buffer: the listed blocks, all or some of their layers.

Few programs with many bytes in flight each: a copy to another GPU is bound by the link, and should leave the chip to
the computation beside it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

WORD_BYTES = 8
CHUNK_WORDS = 8192
NUM_WARPS = 16
LINK_PROGRAMS = 16
"""So many programs come within a tenth of what the NVLinks of one GPU carry."""
LOCAL_PROGRAMS = 264


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
    num_programs: int = LINK_PROGRAMS,
) -> None:
    """Copy the span of block ``source_blocks[i]`` to that of ``destination_blocks[i]``, pools of one layout.

    ``source`` and ``destination`` are the addresses of the pools, which may be mappings of another device's memory; the
    lists lie on the device that runs the copy. No two destinations may be the same.
    """
    start, stop = source + span.offset, destination + span.offset
    _launch(start, stop, source_blocks, destination_blocks, span, span.stride, span.stride, num_programs)


def gather_blocks(pool: Tensor, blocks: Tensor, layers: range, staging: Tensor | None = None) -> Tensor:
    """Of ``pool [num_blocks, num_layers, layer_bytes]``, uint8 -> ``[len(blocks), len(layers), layer_bytes]``.

    That is ``staging`` if given.
    """
    if staging is None:
        staging = pool.new_empty(len(blocks), len(layers), pool.shape[2])
    span = layer_span(pool, layers)
    _launch(
        pool.data_ptr() + span.offset, staging.data_ptr(), blocks, None, span, span.stride, span.size, LOCAL_PROGRAMS
    )
    return staging


def scatter_blocks(staging: Tensor, blocks: Tensor, layers: range, pool: Tensor) -> None:
    """The inverse of `gather_blocks`."""
    span = layer_span(pool, layers)
    _launch(
        staging.data_ptr(), pool.data_ptr() + span.offset, None, blocks, span, span.size, span.stride, LOCAL_PROGRAMS
    )


def _launch(
    source: int,
    destination: int,
    source_blocks: Tensor | None,
    destination_blocks: Tensor | None,
    span: BlockSpan,
    source_stride: int,
    destination_stride: int,
    num_programs: int,
) -> None:
    """A list that is ``None`` stands for 0, 1, 2, …"""
    listed = source_blocks if source_blocks is not None else destination_blocks
    assert listed is not None, "one side at least is a pool"
    assert not (source | destination | span.size | source_stride | destination_stride) % 16, "16 bytes a load"
    num_chunks = triton.cdiv(span.size, WORD_BYTES * CHUNK_WORDS)
    num_items = len(listed) * num_chunks
    if num_items == 0:
        return
    with torch.cuda.device_of(listed):
        _copy_spans[(min(num_programs, num_items),)](
            source, destination,
            listed if source_blocks is None else source_blocks,
            listed if destination_blocks is None else destination_blocks,
            source_stride // WORD_BYTES, destination_stride // WORD_BYTES, span.size // WORD_BYTES,
            num_chunks, num_items,
            FROM_LIST=source_blocks is not None, TO_LIST=destination_blocks is not None, CHUNK=CHUNK_WORDS,
            num_warps=NUM_WARPS,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_chunks", "num_items"])
def _copy_spans(
    source, destination, source_blocks, destination_blocks, source_stride, destination_stride, size,
    num_chunks, num_items, FROM_LIST: tl.constexpr, TO_LIST: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    source = tl.multiple_of(source.to(tl.int64).to(tl.pointer_type(tl.int64)), 16)  # a small address comes as an int32
    destination = tl.multiple_of(destination.to(tl.int64).to(tl.pointer_type(tl.int64)), 16)
    for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
        index = item // num_chunks
        words = (item % num_chunks) * CHUNK + tl.arange(0, CHUNK)
        is_inside = words < size
        source_block = (tl.load(source_blocks + index) if FROM_LIST else index).to(tl.int64)
        destination_block = (tl.load(destination_blocks + index) if TO_LIST else index).to(tl.int64)
        start = tl.multiple_of(source_block * source_stride, 2)
        data = tl.load(source + start + words, mask=is_inside)
        start = tl.multiple_of(destination_block * destination_stride, 2)
        tl.store(destination + start + words, data, mask=is_inside)
