"""Contexts cut into items of about equal size, so that decode fills the device at any batch, and the parts added up.

The plan is made on the device from the lengths there: a captured graph replays it, and the host never waits.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .sizes import next_power_of_2

SPLIT_TOKENS = 64
ITEM_FIELDS = 8
PROGRAMS_A_PROCESSOR = 2
MAX_SHARING_ROWS = 64


@dataclass(frozen=True, slots=True)
class DecodeWorkspace:
    """Memory of decode attention for up to ``max_rows`` sequences.

    ``items [max_rows + num_extra_items, 8]`` is the plan: sequence (-1: no item), first token, end token, the
    sequence's first item, its number of items; the last two also in ``spans [max_rows, 2]``. ``partial_out [num_items,
    num_kv_heads, num_queries, head_dim]`` and ``partial_lse [num_items, num_kv_heads, num_queries]`` hold the parts of
    split sequences; ``arrived [max_rows * num_kv_heads]`` counts those that are there and is zero between launches.
    """

    items: Tensor
    spans: Tensor
    partial_out: Tensor
    partial_lse: Tensor
    arrived: Tensor
    num_extra_items: int
    max_query_len: int


def decode_workspace(
    max_rows: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device,
    max_query_len: int = 1,
    num_programs: int | None = None,
) -> DecodeWorkspace:
    """``num_programs``, of all KV heads together, is what few long contexts are cut into; by default it fills a GPU."""
    num_part_rows = max_query_len * num_heads // num_kv_heads
    if num_programs is None:
        num_programs = torch.cuda.get_device_properties(device).multi_processor_count
        if num_part_rows <= MAX_SHARING_ROWS:
            num_programs *= PROGRAMS_A_PROCESSOR
    num_extra_items = max(1, num_programs // num_kv_heads)
    parts = (max_rows + num_extra_items, num_kv_heads, num_part_rows)
    return DecodeWorkspace(
        items=torch.full((parts[0], ITEM_FIELDS), -1, dtype=torch.int32, device=device),
        spans=torch.zeros(max_rows, 2, dtype=torch.int32, device=device),
        partial_out=torch.empty(*parts, head_dim, dtype=torch.float32, device=device),
        partial_lse=torch.empty(parts, dtype=torch.float32, device=device),
        arrived=torch.zeros(max_rows * num_kv_heads, dtype=torch.int32, device=device),
        num_extra_items=num_extra_items,
        max_query_len=max_query_len,
    )


def num_items(num_rows: int, workspace: DecodeWorkspace) -> int:
    """How many items there can be for ``num_rows`` sequences.

    A sequence has its share of ``num_extra_items``, rounded, and at least one: so fewer than one too many, or just one.
    """
    return num_rows + workspace.num_extra_items - 1


def plan_decode(lengths: Tensor, workspace: DecodeWorkspace, window: int = 0) -> None:
    """Cut the contexts into items; once a step, for all layers with this window (0: none).

    ``lengths  int32 [num_rows]`` count the tokens that a sequence's last query sees. Every sequence gets an item, also
    an empty one.
    """
    _plan_decode[(1,)](
        lengths, workspace.items, workspace.spans, len(lengths), workspace.num_extra_items,
        window + workspace.max_query_len - 1, HAS_WINDOW=window > 0,
        MAX_ROWS=next_power_of_2(len(workspace.spans)), MAX_ITEMS=next_power_of_2(len(workspace.items)),
        SPLIT_TOKENS=SPLIT_TOKENS, ITEM_FIELDS=ITEM_FIELDS, num_warps=4,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])  # one compilation for all batch sizes
def _plan_decode(
    lengths, items, spans, num_rows, num_extra_items, reach, HAS_WINDOW: tl.constexpr, MAX_ROWS: tl.constexpr,
    MAX_ITEMS: tl.constexpr, SPLIT_TOKENS: tl.constexpr, ITEM_FIELDS: tl.constexpr,
):  # fmt: skip
    """One program; ``reach`` is how many tokens back from the end the first query sees."""
    rows = tl.arange(0, MAX_ROWS)
    is_row = rows < num_rows
    length = tl.load(lengths + rows, mask=is_row, other=0)
    begin = tl.zeros([MAX_ROWS], tl.int32)
    if HAS_WINDOW:
        begin = tl.maximum(length - reach, 0) // SPLIT_TOKENS * SPLIT_TOKENS
    num_tiles = tl.cdiv(length - begin, SPLIT_TOKENS)
    share = tl.maximum(tl.cdiv(tl.sum(num_tiles), num_extra_items), 1)
    tiles_an_item = tl.maximum(tl.cdiv(num_tiles, tl.maximum((num_tiles + share // 2) // share, 1)), 1)
    num_items = tl.where(is_row, tl.maximum(tl.cdiv(num_tiles, tiles_an_item), 1), 0)
    first_item = tl.cumsum(num_items) - num_items
    tl.store(spans + rows * 2, first_item, mask=is_row)
    tl.store(spans + rows * 2 + 1, num_items, mask=is_row)
    for split in range(tl.max(num_items)):
        item = items + (first_item + split) * ITEM_FIELDS
        first = begin + split * tiles_an_item * SPLIT_TOKENS
        is_item = split < num_items
        tl.store(item, rows, mask=is_item)
        tl.store(item + 1, first, mask=is_item)
        tl.store(item + 2, tl.minimum(first + tiles_an_item * SPLIT_TOKENS, length), mask=is_item)
        tl.store(item + 3, first_item, mask=is_item)
        tl.store(item + 4, num_items, mask=is_item)
    unused = tl.sum(num_items) + tl.arange(0, MAX_ITEMS)
    no_sequence = tl.full([MAX_ITEMS], -1, tl.int32)
    tl.store(items + unused * ITEM_FIELDS, no_sequence, mask=unused < num_rows + num_extra_items - 1)


@triton.jit
def add_parts(
    partial_out, partial_lse, out, first_row, first_item, num_items, kv_head, num_queries, out_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, NUM_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, NUM_PARTS: tl.constexpr = 32,
):  # fmt: skip
    """The mean of a sequence's parts weighted by ``exp2(lse)``, for one KV head and ``BLOCK_ROWS`` of its rows.

    ``NUM_PARTS`` parts are loaded at once. ``out`` points to the KV head's first query head in the sequence's first
    token.
    """
    dims = tl.arange(0, BLOCK_D)
    rows = first_row + tl.arange(0, BLOCK_ROWS)
    tokens = rows // GROUP
    is_row = (rows < NUM_ROWS) & (tokens < num_queries)
    is_wanted = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    acc = tl.zeros([BLOCK_ROWS, BLOCK_D], tl.float32)
    top = tl.full([BLOCK_ROWS], -1e30, tl.float32)
    total = tl.zeros([BLOCK_ROWS], tl.float32)
    for first_part in range(0, num_items, NUM_PARTS):
        parts = first_part + tl.arange(0, NUM_PARTS)
        places = ((first_item + parts) * NUM_KV_HEADS + kv_head)[:, None] * NUM_ROWS + rows[None, :]
        is_part = (parts < num_items)[:, None] & is_row[None, :]
        is_read = (parts < num_items)[:, None, None] & is_wanted[None, :, :]
        elements = (places.to(tl.int64) * HEAD_DIM)[:, :, None] + dims[None, None, :]
        part = tl.load(partial_out + elements, mask=is_read, other=0.0)
        lse = tl.load(partial_lse + places, mask=is_part, other=float("-inf"))
        higher = tl.maximum(top, tl.max(lse, 0))
        weights, fade = tl.exp2(lse - higher[None, :]), tl.exp2(top - higher)
        acc = acc * fade[:, None] + tl.sum(part * weights[:, :, None], 0)
        total = total * fade + tl.sum(weights, 0)
        top = higher
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_rows = tokens.to(tl.int64) * out_stride + (rows % GROUP) * HEAD_DIM
    tl.store(out + out_rows[:, None] + dims[None, :], acc.to(out.dtype.element_ty), mask=is_wanted)
