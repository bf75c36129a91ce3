"""The start of a step on the device: block tables brought up to date, and ids that only the device knows filled in.

Every sequence has a *seat*, a row of ``seats int32 [num_seats, max_blocks]`` that lists its blocks from step to step,
so that a step uploads only what is new. A step's own tables stand in the order of its rows.
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCKS_AT_ONCE = 128


def seat_blocks(seats: Tensor, segments: Tensor, blocks: Tensor) -> None:
    """Write runs of blocks to their seats.

    ``segments int32 [num_segments, 4]``: seat, first column, number of blocks, where in ``blocks int32`` they begin.
    """
    _seat_blocks[(len(segments),)](
        seats, segments, blocks, seats.shape[1], FIELDS=segments.shape[1], BLOCKS=BLOCKS_AT_ONCE, num_warps=4
    )


def begin_step(token_ids: Tensor, rows: Tensor, sampled: Tensor, seats: Tensor, tables: Tensor) -> None:
    """Fill in pending ids, add the last block of each row to its seat, and copy the seats to the step's ``tables``.

    ``rows int32 [num_rows, 8]`` say of each sequence: the place in ``token_ids int32`` that takes a pending id; where
    that id is in ``sampled int64``, the ids drawn by the step before (-1: none is pending; a drawn id of -1 means that
    the request has ended, and any token does); its seat; the number of
    columns before its last block (-1: a padded row, left alone); its last block. Of ``tables int32 [num_rows,
    max_blocks]`` each row is written up to its last block.
    """
    _begin_step[(len(rows),)](
        token_ids, rows, sampled, seats, tables, seats.shape[1], tables.stride(0),
        FIELDS=rows.shape[1], BLOCKS=BLOCKS_AT_ONCE, num_warps=4,
    )  # fmt: skip


@triton.jit
def _seat_blocks(seats, segments, blocks, max_blocks, FIELDS: tl.constexpr, BLOCKS: tl.constexpr):
    segment = segments + tl.program_id(0) * FIELDS
    seat = seats + tl.load(segment).to(tl.int64) * max_blocks + tl.load(segment + 1)
    num_blocks, first = tl.load(segment + 2), tl.load(segment + 3)
    for start in range(0, num_blocks, BLOCKS):
        columns = start + tl.arange(0, BLOCKS)
        is_inside = columns < num_blocks
        tl.store(seat + columns, tl.load(blocks + first + columns, mask=is_inside, other=0), mask=is_inside)


@triton.jit
def _begin_step(
    token_ids, rows, sampled, seats, tables, max_blocks, table_stride, FIELDS: tl.constexpr, BLOCKS: tl.constexpr
):  # fmt: skip
    row = rows + tl.program_id(0) * FIELDS
    pending, last = tl.load(row + 1), tl.load(row + 3)
    if pending >= 0:
        tl.store(token_ids + tl.load(row), tl.maximum(tl.load(sampled + pending), 0).to(tl.int32))
    seat = seats + tl.load(row + 2).to(tl.int64) * max_blocks
    table = tables + tl.program_id(0).to(tl.int64) * table_stride
    for start in range(0, last, BLOCKS):
        columns = start + tl.arange(0, BLOCKS)
        is_before = columns < last
        tl.store(table + columns, tl.load(seat + columns, mask=is_before, other=0), mask=is_before)
    if last >= 0:
        block = tl.load(row + 4)
        tl.store(table + last, block)
        tl.store(seat + last, block)
