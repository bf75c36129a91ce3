"""Attention over paged KV in Triton: decode (few queries a sequence) and prefill (many); twins in `reference`.

A layer's KV is a view ``kv [num_blocks, K or V, num_kv_heads, block_size, head_dim]`` of the pool, contiguous within
a block; the tokens of a sequence lie in the blocks that its row of ``block_tables`` lists. Key ``j`` is visible to the
query at position ``i`` iff ``0 <= i - j`` and, with ``window > 0``, ``i - j < window``; ``softcap > 0`` makes a score
``s`` into ``softcap * tanh(s / softcap)``. Slots that no query sees are not read, whatever they hold.

The query heads that share a KV head are rows of one tile, so that K and V are read once for all of them. Softmax is
online (Milakov and Gimelshein 2018), in float32 and to the base 2. Every launch can be captured in a CUDA graph: grids
follow from shapes alone.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import NOT_EARLY, dependent_launch, let_next_start, wait_for_previous
from .hopper_attention import fits_hopper, hopper_prefill_attention
from .sizes import cdiv, next_power_of_2
from .split_context import ITEM_FIELDS, DecodeWorkspace, add_parts, num_items

DECODE_TILE_BYTES = 1 << 14
PART_ELEMENTS = 512
MAX_ROWS_IN_ONE_KERNEL = 16


def decode_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    out: Tensor,
    workspace: DecodeWorkspace,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    query_starts: Tensor | None = None,
) -> None:
    """Attend with the last tokens of each sequence; ``q, out  [num_tokens, num_heads, head_dim]``.

    ``block_tables  int32 [num_rows, max_blocks]``. ``lengths  int32 [num_rows]`` count the tokens that a sequence's
    last query sees, itself included; 0 is a padded row, whose outputs are zeros. The queries of sequence ``i`` are rows
    ``query_starts[i] .. query_starts[i + 1]`` (int32), at most ``max_query_len`` of the workspace; without
    ``query_starts`` each has just ``max_query_len``. `plan_decode` ran for these lengths and this window.
    """
    _, _, num_kv_heads, block_size, head_dim = kv.shape
    group = q.shape[1] // num_kv_heads
    block_m = max(16, next_power_of_2(workspace.max_query_len * group))
    block_d = next_power_of_2(head_dim)
    block_n, num_warps, num_stages = decode_tile(block_m, block_d * kv.element_size())
    block_rows = max(1, PART_ELEMENTS // block_d)
    is_one_kernel = workspace.max_query_len * group <= MAX_ROWS_IN_ONE_KERNEL
    queries = lengths if query_starts is None else query_starts
    kinds = {
        "NUM_KV_HEADS": num_kv_heads, "GROUP": group, "MAX_QUERY_LEN": workspace.max_query_len,
        "HAS_QUERY_STARTS": query_starts is not None, "HEAD_DIM": head_dim, "BLOCK_ROWS": block_rows,
        "BLOCK_D": block_d, **_launch_kind(q, len(lengths)),
    }  # fmt: skip
    _decode_attention[(num_items(len(lengths), workspace) * num_kv_heads,)](
        q, kv, queries, block_tables, lengths, out,
        workspace.items, workspace.partial_out, workspace.partial_lse, workspace.arrived,
        q.stride(0), out.stride(0), kv.stride(0), block_tables.stride(0), *_to_base_2(scale, softcap),
        BLOCK_SIZE=block_size, WINDOW=window, HAS_SOFTCAP=softcap > 0, ITEM_FIELDS=ITEM_FIELDS,
        IS_ONE_KERNEL=is_one_kernel, BLOCK_M=block_m, BLOCK_N=block_n,
        num_warps=num_warps, num_stages=num_stages, **kinds,
    )  # fmt: skip
    if not is_one_kernel:
        num_row_blocks = cdiv(workspace.max_query_len * group, block_rows)
        _add_parts[(num_row_blocks, num_kv_heads, len(lengths))](
            queries, workspace.spans, workspace.partial_out, workspace.partial_lse, out, out.stride(0),
            num_warps=4, **kinds,
        )  # fmt: skip


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    query_starts: Tensor,
    starts: Tensor,
    block_tables: Tensor,
    out: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """Causal attention of prompt chunks whose own KV is already stored; ``q, out  [num_tokens, num_heads, head_dim]``.

    The queries of sequence ``i`` are rows ``query_starts[i] .. query_starts[i + 1]`` at positions ``starts[i]`` on
    (int32 both, ``[num_seqs + 1]`` and ``[num_seqs]``); ``block_tables  int32 [num_seqs, max_blocks]`` list the blocks
    from position 0 on. Rows outside of all sequences are left alone.
    """
    if fits_hopper(q, kv):
        where = (q, kv, query_starts, starts, block_tables, out)
        hopper_prefill_attention(*where, *_to_base_2(scale, softcap), window)
        return
    num_seqs = len(starts)
    _, _, num_kv_heads, block_size, head_dim = kv.shape
    group = q.shape[1] // num_kv_heads
    block_d = next_power_of_2(head_dim)
    block_m, block_n, num_warps, num_stages = prefill_tile(group, block_d * kv.element_size())
    _prefill_attention[(len(q) // (block_m // group) + num_seqs, num_kv_heads)](
        q, kv, query_starts, starts, block_tables, out,
        q.stride(0), out.stride(0), kv.stride(0), block_tables.stride(0), num_seqs, *_to_base_2(scale, softcap),
        NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, WINDOW=window,
        HAS_SOFTCAP=softcap > 0, LOG2_SEQS=(num_seqs - 1).bit_length(),
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_D=block_d, num_warps=num_warps, num_stages=num_stages,
    )  # fmt: skip


def decode_tile(block_m: int, row_bytes: int) -> tuple[int, int, int]:
    """``BLOCK_N, num_warps, num_stages`` for keys of ``row_bytes``; measured on an H200 at 256."""
    return max(16, DECODE_TILE_BYTES // row_bytes), 4 if block_m < 128 else 8, 3


def prefill_tile(group: int, row_bytes: int) -> tuple[int, int, int, int]:
    """``BLOCK_M, BLOCK_N, num_warps, num_stages``, likewise."""
    block_m, block_n, num_stages = (128, 128, 3) if row_bytes <= 256 else (64, 32, 2)
    return max(block_m, next_power_of_2(group)), block_n, 8, num_stages


def _launch_kind(q: Tensor, num_rows: int) -> dict[str, bool]:
    """One row alone is not started early, nor does it let the next kernel start.

    The products of one row that follow fill the chip with programs that wait: on an H200 that made a step of the 8B
    shape take 5.0 ms instead of 4.0. With two rows an early start gains 3 %, from eight on nothing is lost or gained.
    """
    return dependent_launch(q.device) if num_rows > 1 else NOT_EARLY


def _to_base_2(scale: float, softcap: float) -> tuple[float, float]:
    return scale * math.log2(math.e), softcap * math.log2(math.e)


@triton.jit
def _decode_attention(
    q, kv, query_starts, block_tables, lengths, out, items, partial_out, partial_lse, arrived,
    q_stride, out_stride, block_stride, table_stride, scale, softcap,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MAX_QUERY_LEN: tl.constexpr, HAS_QUERY_STARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    ITEM_FIELDS: tl.constexpr, IS_ONE_KERNEL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program for each item and KV head; the last one of a split sequence adds its parts up."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    index, kv_head = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(0) % NUM_KV_HEADS
    item = items + index * ITEM_FIELDS
    sequence = tl.load(item)
    if sequence < 0:
        return
    begin, end, first_item, num_items = tl.load(item + 1), tl.load(item + 2), tl.load(item + 3), tl.load(item + 4)
    first_query, num_queries = _queries_of(sequence, query_starts, MAX_QUERY_LEN, HAS_QUERY_STARTS)
    position = tl.load(lengths + sequence) - num_queries

    m, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens = m // GROUP
    is_query = tokens < num_queries
    is_wanted = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    rows = (first_query + tokens).to(tl.int64)
    columns = (kv_head * GROUP + m % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(q + (rows * q_stride)[:, None] + columns, mask=is_wanted, other=0.0)
    acc, top = _start(BLOCK_M, BLOCK_D)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc, top, total = _attend(
        acc, top, total, queries, kv + kv_head * (BLOCK_SIZE * HEAD_DIM),
        block_tables + sequence.to(tl.int64) * table_stride, position + tokens, position - WINDOW + 1, begin, end,
        block_stride, scale, softcap, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, WINDOW, HAS_SOFTCAP, True,
    )  # fmt: skip
    total = tl.where(total > 0, total, 1.0)
    acc = acc / total[:, None]
    if num_items == 1:
        tl.store(out + (rows * out_stride)[:, None] + columns, acc.to(out.dtype.element_ty), mask=is_wanted)
        return
    NUM_ROWS: tl.constexpr = MAX_QUERY_LEN * GROUP
    places = (index * NUM_KV_HEADS + kv_head).to(tl.int64) * NUM_ROWS + m
    tl.store(partial_out + (places * HEAD_DIM)[:, None] + dims[None, :], acc, mask=is_wanted)
    tl.store(partial_lse + places, top + tl.log2(total), mask=is_query)
    if IS_ONE_KERNEL:
        tl.debug_barrier()
        counter = arrived + sequence * NUM_KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == num_items - 1:
            tl.store(counter, 0)
            out_rows = out + first_query.to(tl.int64) * out_stride + kv_head * GROUP * HEAD_DIM
            for first_row in range(0, NUM_ROWS, BLOCK_ROWS):
                add_parts(
                    partial_out, partial_lse, out_rows, first_row, first_item, num_items, kv_head, num_queries,
                    out_stride, NUM_KV_HEADS, GROUP, NUM_ROWS, HEAD_DIM, BLOCK_ROWS, BLOCK_D,
                )  # fmt: skip


@triton.jit
def _add_parts(
    query_starts, spans, partial_out, partial_lse, out, out_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, MAX_QUERY_LEN: tl.constexpr, HAS_QUERY_STARTS: tl.constexpr,
    HEAD_DIM: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What `_decode_attention` leaves when parts are too large for one program: a program for ``BLOCK_ROWS`` each."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    first_row, kv_head, sequence = tl.program_id(0) * BLOCK_ROWS, tl.program_id(1), tl.program_id(2)
    first_item, num_items = tl.load(spans + sequence * 2), tl.load(spans + sequence * 2 + 1)
    if num_items == 1:
        return
    first_query, num_queries = _queries_of(sequence, query_starts, MAX_QUERY_LEN, HAS_QUERY_STARTS)
    out_rows = out + first_query.to(tl.int64) * out_stride + kv_head * GROUP * HEAD_DIM
    add_parts(
        partial_out, partial_lse, out_rows, first_row, first_item, num_items, kv_head, num_queries,
        out_stride, NUM_KV_HEADS, GROUP, MAX_QUERY_LEN * GROUP, HEAD_DIM, BLOCK_ROWS, BLOCK_D,
    )  # fmt: skip


@triton.jit
def _queries_of(sequence, query_starts, MAX_QUERY_LEN: tl.constexpr, HAS_QUERY_STARTS: tl.constexpr):
    """First row and number of a sequence's queries."""
    if HAS_QUERY_STARTS:
        first = tl.load(query_starts + sequence)
        return first, tl.load(query_starts + sequence + 1) - first
    else:
        return sequence * MAX_QUERY_LEN, MAX_QUERY_LEN


@triton.jit
def _prefill_attention(
    q, kv, query_starts, starts, block_tables, out,
    q_stride, out_stride, block_stride, table_stride, num_seqs, scale, softcap,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, LOG2_SEQS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """A program for each KV head and tile of ``BLOCK_M // GROUP`` queries, those with most keys first.

    Sequence ``s`` owns the tiles from ``query_starts[s] // TILE_TOKENS + s`` on: never too few, at most one too many.
    """
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    sequence = tile * 0
    for step in tl.static_range(LOG2_SEQS - 1, -1, -1):
        later = tl.minimum(sequence + (1 << step), num_seqs - 1)
        first_tile = tl.load(query_starts + later) // TILE_TOKENS + later
        sequence = tl.where(first_tile <= tile, later, sequence)
    sequence_row = tl.load(query_starts + sequence)
    num_queries = tl.load(query_starts + sequence + 1) - sequence_row
    first = (tile - sequence_row // TILE_TOKENS - sequence) * TILE_TOKENS
    if first >= num_queries:
        return

    m, dims = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_D)
    tokens = m // GROUP
    is_query = (tokens < TILE_TOKENS) & (first + tokens < num_queries)
    is_wanted = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    rows = (sequence_row + first + tokens).to(tl.int64)
    columns = (kv_head * GROUP + m % GROUP)[:, None] * HEAD_DIM + dims[None, :]
    queries = tl.load(q + (rows * q_stride)[:, None] + columns, mask=is_wanted, other=0.0)

    keys = kv + kv_head * (BLOCK_SIZE * HEAD_DIM)
    table = block_tables + sequence.to(tl.int64) * table_stride
    position = tl.load(starts + sequence) + first
    positions = position + tokens
    end = position + tl.minimum(TILE_TOKENS, num_queries - first)
    acc, top = _start(BLOCK_M, BLOCK_D)
    total = tl.zeros([BLOCK_M], tl.float32)
    lowest = position - WINDOW + 1
    begin = 0
    if WINDOW > 0:
        begin = tl.maximum(lowest, 0) // BLOCK_SIZE * BLOCK_SIZE
        all_see = begin + tl.cdiv(tl.maximum(end - WINDOW - begin, 0), BLOCK_N) * BLOCK_N
        acc, top, total = _attend(
            acc, top, total, queries, keys, table, positions, lowest, begin, tl.minimum(all_see, end), block_stride,
            scale, softcap, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, WINDOW, HAS_SOFTCAP, True,
        )  # fmt: skip
        begin = all_see
    some_see = begin + tl.maximum(position + 1 - begin, 0) // BLOCK_N * BLOCK_N
    acc, top, total = _attend(
        acc, top, total, queries, keys, table, positions, lowest, begin, some_see, block_stride,
        scale, softcap, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, WINDOW, HAS_SOFTCAP, False,
    )  # fmt: skip
    acc, top, total = _attend(
        acc, top, total, queries, keys, table, positions, lowest, some_see, end, block_stride,
        scale, softcap, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE, BLOCK_N, WINDOW, HAS_SOFTCAP, True,
    )  # fmt: skip
    acc = acc / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(out + (rows * out_stride)[:, None] + columns, acc.to(out.dtype.element_ty), mask=is_wanted)


@triton.jit
def _start(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The sum and the highest score of a softmax over nothing; finite, so that hidden tiles make no NaN."""
    return tl.zeros([BLOCK_M, BLOCK_D], tl.float32), tl.full([BLOCK_M], -1e30, tl.float32)


@triton.jit
def _attend(
    acc, top, total, queries, keys, table, query_positions, lowest, begin, end, block_stride, scale, softcap,
    NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr, HAS_SOFTCAP: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """Add the keys ``begin .. end`` to a softmax; all queries see them unless ``IS_MASKED``, and tiles are whole.

    ``acc`` is the sum of values weighted by ``exp2(score - top)``, ``total`` that of the weights, ``top`` the highest
    score. With a window, keys before ``lowest`` are not read. Blocks are looked up a tile ahead of their keys.
    """
    BLOCK_D: tl.constexpr = acc.shape[1]
    dims = tl.arange(0, BLOCK_D)
    positions = begin + tl.arange(0, BLOCK_N)
    blocks = tl.load(table + positions // BLOCK_SIZE, mask=positions < end, other=0)
    for first in range(begin, end, BLOCK_N):
        positions = first + tl.arange(0, BLOCK_N)
        places = blocks.to(tl.int64) * block_stride + (positions % BLOCK_SIZE) * HEAD_DIM
        next_positions = positions + BLOCK_N
        blocks = tl.load(table + next_positions // BLOCK_SIZE, mask=next_positions < end, other=0)
        k_pointers = keys + places[:, None] + dims[None, :]
        v_pointers = k_pointers + NUM_KV_HEADS * BLOCK_SIZE * HEAD_DIM
        if IS_MASKED:
            is_key = positions < end
            if WINDOW > 0:
                is_key &= positions >= lowest
            is_read = is_key[:, None] & (dims < HEAD_DIM)[None, :]
            k = tl.load(k_pointers, mask=is_read, other=0.0)
            v = tl.load(v_pointers, mask=is_read, other=0.0)
        elif HEAD_DIM < BLOCK_D:
            k = tl.load(k_pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
            v = tl.load(v_pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
        else:
            k, v = tl.load(k_pointers), tl.load(v_pointers)
        scores = tl.dot(queries, tl.trans(k), input_precision="ieee")
        factor = scale
        if HAS_SOFTCAP:  # tanh(x) = 1 - 2 / (exp(2 x) + 1)
            scores = softcap - 2 * softcap / (tl.exp2(scores * (2 * 1.4426950408889634 * scale / softcap)) + 1)
            factor = 1.0
        if IS_MASKED:
            distance = query_positions[:, None] - positions[None, :]
            is_visible = (distance >= 0) & is_key[None, :]
            if WINDOW > 0:
                is_visible &= distance < WINDOW
            scores = tl.where(is_visible, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1) * factor)
        weights = tl.exp2(scores * factor - higher[:, None])
        fade = tl.exp2(top - higher)
        total = total * fade + tl.sum(weights, 1)
        acc = tl.dot(weights.to(v.dtype), v, acc * fade[:, None], input_precision="ieee")
        top = higher
    return acc, top, total
