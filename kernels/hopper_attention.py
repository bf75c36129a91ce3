"""Prefill attention for Hopper in Gluon, Triton's language for layouts and barriers: what `prefill_attention` computes.

One program a multiprocessor, three groups of warps. The producer copies pages of K and V to shared memory with the
bulk tensor copy engine; two consumers have 64 rows of the query tile each and run unsynchronized, so that the softmax
of one meets the matrix products of the other; within a consumer the scores of a tile are computed while the values of
the tile before are added (Shah et al. 2024, FlashAttention-3). Tiles of keys are visited from the last to the first.
"""

from functools import cache

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from .sizes import cdiv

BLOCK_N = 128
NUM_STAGES = 2
SWIZZLE = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
CONSUMER_REGISTERS, PRODUCER_REGISTERS = gl.constexpr(224), gl.constexpr(56)
BEHIND_THE_POOL = gl.constexpr(1 << 30)

# Names of Triton 3.6, and of 3.9 where it has others.
group_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
load_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared
load_rows = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
HAS_REINTERPRET = gl.constexpr(hasattr(gl.shared_memory_descriptor, "reinterpret"))


def fits_hopper(q: Tensor, kv: Tensor) -> bool:
    """Whether `hopper_prefill_attention` takes these."""
    return (
        _is_hopper(q.device)
        and q.dtype in (torch.bfloat16, torch.float16)
        and kv.shape[4] in (64, 128)
        and kv.shape[3] in (16, 32, 64, 128)
    )


@cache
def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@cache
def _num_processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def hopper_prefill_attention(
    q: Tensor,
    kv: Tensor,
    query_starts: Tensor,
    starts: Tensor,
    block_tables: Tensor,
    out: Tensor,
    scale: float,
    softcap: float,
    window: int,
) -> None:
    """``scale`` and ``softcap`` are to the base 2, the rest as in `prefill_attention`."""
    num_blocks, _, num_kv_heads, block_size, head_dim = kv.shape
    group, num_seqs = q.shape[1] // num_kv_heads, len(starts)
    num_tiles = len(q) // (128 // group) + num_seqs
    num_rows = ((num_blocks - 1) * kv.stride(0) + kv[0].numel()) // head_dim
    rows = TensorDescriptor(kv, [num_rows, head_dim], [head_dim, 1], [block_size, 64], SWIZZLE)
    num_programs = min(_num_processors(q.device), num_tiles * num_kv_heads)
    _hopper_prefill_attention[(num_programs,)](
        rows, q, kv, query_starts, starts, block_tables, out, q.stride(0), out.stride(0), kv.stride(0) // head_dim,
        block_tables.stride(0), num_seqs, num_tiles, cdiv(num_tiles * num_kv_heads, num_programs), scale,
        softcap, NUM_KV_HEADS=num_kv_heads, GROUP=group, HEAD_DIM=head_dim, BLOCK_SIZE=block_size, WINDOW=window,
        HAS_SOFTCAP=softcap > 0, LOG2_SEQS=(num_seqs - 1).bit_length(), BLOCK_N=BLOCK_N, NUM_STAGES=NUM_STAGES,
        num_warps=4,
    )  # fmt: skip


@gluon.jit(do_not_specialize=["num_seqs", "num_tiles", "num_rounds"])  # they change from step to step
def _hopper_prefill_attention(
    pool_rows, q, kv, query_starts, starts, block_tables, out, q_stride, out_stride, block_rows, table_stride,
    num_seqs, num_tiles, num_rounds, scale, softcap,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, LOG2_SEQS: gl.constexpr, BLOCK_N: gl.constexpr,
    NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """A tile of ``[BLOCK_N, HEAD_DIM]`` lies as chunks of 64 columns, a chunk as pages one after the other."""
    dtype: gl.constexpr = q.dtype.element_ty
    swizzle: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    NUM_PAGES: gl.constexpr = NUM_STAGES * (HEAD_DIM // 64) * (BLOCK_N // BLOCK_SIZE)
    q_tiles = gl.allocate_shared_memory(dtype, [2, 64, HEAD_DIM], swizzle)
    k_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_N, HEAD_DIM], swizzle)
    v_tiles = gl.allocate_shared_memory(dtype, [NUM_STAGES, BLOCK_N, HEAD_DIM], swizzle)
    k_pages = _reinterpret(k_tiles, NUM_PAGES, BLOCK_SIZE, swizzle)
    v_pages = _reinterpret(v_tiles, NUM_PAGES, BLOCK_SIZE, swizzle)
    v_units = _reinterpret(v_tiles, NUM_PAGES * (BLOCK_SIZE // 16), 16, swizzle)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    k_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barrier)
    k_empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barrier)
    v_full = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barrier)
    v_empty = gl.allocate_shared_memory(gl.int64, [NUM_STAGES, 1], barrier)
    for slot in gl.static_range(NUM_STAGES):
        mbarrier.init(k_full.index(slot), BLOCK_N // BLOCK_SIZE)
        mbarrier.init(v_full.index(slot), BLOCK_N // BLOCK_SIZE)
        mbarrier.init(k_empty.index(slot), 2)
        mbarrier.init(v_empty.index(slot), 2)
    fence_async_shared()
    ring = (k_full, k_empty, v_full, v_empty)
    work = (query_starts, starts, num_seqs, num_tiles, num_rounds)
    gl.warp_specialize(
        [
            (_consume, (q, out, q_tiles.index(0), k_tiles, v_tiles, ring, work, q_stride, out_stride, scale, softcap,
                0, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, LOG2_SEQS, BLOCK_N, NUM_STAGES)),
            (_consume, (q, out, q_tiles.index(1), k_tiles, v_tiles, ring, work, q_stride, out_stride, scale, softcap,
                64, NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, WINDOW, HAS_SOFTCAP, LOG2_SEQS, BLOCK_N, NUM_STAGES)),
            (_produce, (pool_rows, kv, k_pages, v_pages, v_units, ring, work, block_tables, block_rows, table_stride,
                NUM_KV_HEADS, GROUP, HEAD_DIM, BLOCK_SIZE, WINDOW, LOG2_SEQS, BLOCK_N, NUM_STAGES)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def _reinterpret(tiles, number: gl.constexpr, rows: gl.constexpr, layout: gl.constexpr):
    """The same memory as ``[number, rows, 64]``."""
    if HAS_REINTERPRET:
        return tiles.reinterpret(tiles.dtype, [number, rows, 64], layout)
    else:
        return tiles._reinterpret(tiles.dtype, [number, rows, 64], layout)


@gluon.jit
def _tile_index(turn):
    """Forth and back through the programs, so that who gets a heavier tile in one round gets a lighter in the next."""
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    return turn * num_programs + gl.where(turn % 2 == 0, program, num_programs - 1 - program)


@gluon.jit
def _span(
    index, work, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr, LOG2_SEQS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Sequence, first row, number and first position of a tile's queries; its first key and number of key tiles.

    All scalars come from loads at uniform addresses, so that the compiler knows that no warp diverges; the result of a
    reduction over a vector would cost it that knowledge, and the kernel a third of its speed.
    """
    TILE_TOKENS: gl.constexpr = 128 // GROUP
    query_starts, starts, num_seqs, num_tiles, _ = work
    tile = num_tiles - 1 - index // NUM_KV_HEADS
    sequence = tile * 0
    for step in gl.static_range(LOG2_SEQS - 1, -1, -1):
        later = gl.minimum(sequence + (1 << step), num_seqs - 1)
        first_tile = gl.load(query_starts + later) // TILE_TOKENS + later
        sequence = gl.where(first_tile <= tile, later, sequence)
    row = gl.load(query_starts + sequence)
    first = (tile - row // TILE_TOKENS - sequence) * TILE_TOKENS
    num_queries = gl.minimum(gl.load(query_starts + sequence + 1) - row - first, TILE_TOKENS)
    position = gl.load(starts + sequence) + first
    begin = position * 0
    if WINDOW > 0:
        begin = gl.maximum(position - WINDOW + 1, 0) // BLOCK_SIZE * BLOCK_SIZE
    is_tile = (tile >= 0) & (num_queries > 0)
    num_key_tiles = gl.where(is_tile, gl.cdiv(position + num_queries - begin, BLOCK_N), 0)
    return sequence, row + first, num_queries, position, begin, num_key_tiles


@gluon.jit
def _produce(
    pool_rows, kv, k_pages, v_pages, v_units, ring, work, block_tables, block_rows, table_stride,
    NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    WINDOW: gl.constexpr, LOG2_SEQS: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """Rows of the pool that are no keys of the sequence become zeros in V; those of K are masked later."""
    k_full, k_empty, v_full, v_empty = ring
    PAGES: gl.constexpr = BLOCK_N // BLOCK_SIZE
    CHUNKS: gl.constexpr = HEAD_DIM // 64
    count = 0
    for turn in range(work[4]):
        index = _tile_index(turn)
        sequence, _, num_queries, position, begin, num_key_tiles = _span(
            index, work, NUM_KV_HEADS, GROUP, BLOCK_SIZE, WINDOW, LOG2_SEQS, BLOCK_N
        )
        end = position + num_queries
        lowest = gl.maximum(position - WINDOW + 1, 0) if WINDOW > 0 else 0
        num_blocks = gl.cdiv(end, BLOCK_SIZE)
        table = block_tables + sequence.to(gl.int64) * table_stride
        k_row = index % NUM_KV_HEADS * BLOCK_SIZE
        v_row = k_row + NUM_KV_HEADS * BLOCK_SIZE
        for key_tile in range(num_key_tiles - 1, -1, -1):
            slot, phase = count % NUM_STAGES, (count // NUM_STAGES + 1) & 1
            first = begin // BLOCK_SIZE + key_tile * PAGES
            rows = _first_rows(table, first, num_blocks, block_rows, PAGES)
            mbarrier.wait(k_empty.index(slot), phase)
            _copy_pages(pool_rows, rows, k_row, k_full.index(slot), k_pages, slot, BLOCK_SIZE, PAGES, CHUNKS)
            mbarrier.wait(v_empty.index(slot), phase)
            has_end = (end % BLOCK_SIZE > 0) & (end < (first + PAGES) * BLOCK_SIZE)
            if has_end | (first * BLOCK_SIZE < lowest):
                _copy_keys(
                    pool_rows, kv, table, first, num_blocks, block_rows, v_row, lowest, end, v_full.index(slot),
                    v_pages, v_units, slot, HEAD_DIM, BLOCK_SIZE, PAGES, CHUNKS,
                )  # fmt: skip
            else:
                _copy_pages(pool_rows, rows, v_row, v_full.index(slot), v_pages, slot, BLOCK_SIZE, PAGES, CHUNKS)
            count += 1


@gluon.jit
def _first_rows(table, first, num_blocks, block_rows, PAGES: gl.constexpr):
    """Where the blocks from ``first`` on begin in the pool; those that the sequence does not have lie behind it."""
    rows = ()
    for page in gl.static_range(PAGES):
        block = gl.load(table + gl.minimum(first + page, num_blocks - 1))
        row = gl.where(first + page < num_blocks, block * block_rows, BEHIND_THE_POOL)
        rows = rows + (row,)  # type: ignore[assignment]  # noqa: RUF005, Triton knows no other way
    return rows


@gluon.jit
def _copy_pages(
    pool_rows, rows, head_row, full, pages, slot, BLOCK_SIZE: gl.constexpr, PAGES: gl.constexpr, CHUNKS: gl.constexpr
):
    for page in gl.static_range(PAGES):
        _copy_page(pool_rows, rows[page] + head_row, full, pages, slot, page, BLOCK_SIZE, PAGES, CHUNKS)


@gluon.jit
def _copy_page(
    pool_rows, row, full, pages, slot, page, BLOCK_SIZE: gl.constexpr, PAGES: gl.constexpr, CHUNKS: gl.constexpr
):
    """Rows behind the pool are zeros."""
    mbarrier.expect(full, BLOCK_SIZE * CHUNKS * 128)
    for chunk in gl.static_range(CHUNKS):
        place = pages.index((slot * CHUNKS + chunk) * PAGES + page)
        load_box(pool_rows, [row, chunk * 64], full, place)


@gluon.jit
def _copy_keys(
    pool_rows, kv, table, first, num_blocks, block_rows, head_row, lowest, end, full, pages, units, slot,
    HEAD_DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr, PAGES: gl.constexpr, CHUNKS: gl.constexpr,
):  # fmt: skip
    """`_copy_pages`, with zeros for keys before ``lowest`` and from ``end`` on: their pages are copied by hand."""
    UNITS: gl.constexpr = BLOCK_SIZE // 16
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    unit_rows = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, 64, layout=gl.SliceLayout(0, layout))
    for page in range(PAGES):
        block = gl.load(table + gl.minimum(first + page, num_blocks - 1))
        row = gl.where(first + page < num_blocks, block * block_rows, BEHIND_THE_POOL) + head_row
        key = (first + page) * BLOCK_SIZE
        if (key < lowest) | ((key < end) & (key + BLOCK_SIZE > end)):
            for unit in range(UNITS):
                for chunk in range(CHUNKS):
                    keys = key + unit * 16 + unit_rows
                    is_key = (keys >= lowest) & (keys < end)
                    places = (row + unit * 16 + unit_rows).to(gl.int64) * HEAD_DIM + chunk * 64
                    values = gl.load(kv + places[:, None] + dims[None, :], mask=is_key[:, None], other=0.0)
                    units.index(((slot * CHUNKS + chunk) * PAGES + page) * UNITS + unit).store(values)
            fence_async_shared()
            mbarrier.arrive(full)
        else:
            _copy_page(pool_rows, row, full, pages, slot, page, BLOCK_SIZE, PAGES, CHUNKS)


@gluon.jit
def _consume(
    q, out, q_tile, k_tiles, v_tiles, ring, work, q_stride, out_stride, scale, softcap,
    FIRST_ROW: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr,
    BLOCK_SIZE: gl.constexpr, WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, LOG2_SEQS: gl.constexpr,
    BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr,
):  # fmt: skip
    """The 64 rows of each query tile from ``FIRST_ROW`` on."""
    v_full, v_empty = ring[2], ring[3]
    scores_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HEAD_DIM, 16])
    count = 0
    next_index = _tile_index(0)
    next_span = _span(next_index, work, NUM_KV_HEADS, GROUP, BLOCK_SIZE, WINDOW, LOG2_SEQS, BLOCK_N)
    _copy_queries(q, q_tile, next_index, next_span, q_stride, FIRST_ROW, NUM_KV_HEADS, GROUP, HEAD_DIM)
    for turn in range(work[4]):
        index, span = next_index, next_span
        num_queries, position, begin, num_key_tiles = span[2], span[3], span[4], span[5]
        next_index = _tile_index(turn + 1)
        next_span = _span(next_index, work, NUM_KV_HEADS, GROUP, BLOCK_SIZE, WINDOW, LOG2_SEQS, BLOCK_N)
        async_copy.wait_group(0)
        fence_async_shared()
        group_barrier()
        if num_key_tiles > 0:
            rows = FIRST_ROW + gl.arange(0, 64, layout=gl.SliceLayout(1, scores_layout))
            seen = (scale, softcap, begin, position + rows // GROUP)
            state = _start(
                num_key_tiles - 1, count, q_tile, k_tiles, ring, seen,
                HEAD_DIM, WINDOW, HAS_SOFTCAP, BLOCK_N, NUM_STAGES, scores_layout, out_layout,
            )  # fmt: skip
            count += 1
            # Tiles from the last on: some hidden by causality, all visible, some hidden by the window.
            end = position + num_queries
            causal = gl.minimum(gl.maximum(position + 1 - begin, 0) // BLOCK_N, num_key_tiles - 1)
            windowed = 0
            if WINDOW > 0:
                windowed = gl.minimum(gl.cdiv(gl.maximum(end - WINDOW - begin, 0), BLOCK_N), causal)
            for key_tile in range(num_key_tiles - 2, causal - 1, -1):
                state = _step(
                    state, key_tile, count, q_tile, k_tiles, v_tiles, ring, seen,
                    WINDOW, HAS_SOFTCAP, True, BLOCK_N, NUM_STAGES, scores_layout, out_layout,
                )  # fmt: skip
                count += 1
            for key_tile in range(causal - 1, windowed - 1, -1):
                state = _step(
                    state, key_tile, count, q_tile, k_tiles, v_tiles, ring, seen,
                    WINDOW, HAS_SOFTCAP, False, BLOCK_N, NUM_STAGES, scores_layout, out_layout,
                )  # fmt: skip
                count += 1
            if WINDOW > 0:
                for key_tile in range(windowed - 1, -1, -1):
                    state = _step(
                        state, key_tile, count, q_tile, k_tiles, v_tiles, ring, seen,
                        WINDOW, HAS_SOFTCAP, True, BLOCK_N, NUM_STAGES, scores_layout, out_layout,
                    )  # fmt: skip
                    count += 1
            # All warps are past the barrier behind their last scores, so the queries may go.
            _copy_queries(q, q_tile, next_index, next_span, q_stride, FIRST_ROW, NUM_KV_HEADS, GROUP, HEAD_DIM)
            acc, total, weights = state[0], state[2], state[3]
            slot = (count - 1) % NUM_STAGES
            mbarrier.wait(v_full.index(slot), (count - 1) // NUM_STAGES & 1)
            acc = warpgroup_mma(weights, v_tiles.index(slot), acc, is_async=True)
            acc, weights = warpgroup_mma_wait(0, [acc, weights])
            mbarrier.arrive(v_empty.index(slot))
            _store_out(acc, total, out, index, span, out_stride, FIRST_ROW, NUM_KV_HEADS, GROUP, HEAD_DIM, out_layout)
        else:
            _copy_queries(q, q_tile, next_index, next_span, q_stride, FIRST_ROW, NUM_KV_HEADS, GROUP, HEAD_DIM)


@gluon.jit
def _copy_queries(
    q, q_tile, index, span, q_stride, FIRST_ROW: gl.constexpr, NUM_KV_HEADS: gl.constexpr, GROUP: gl.constexpr,
    HEAD_DIM: gl.constexpr,
):  # fmt: skip
    """Start to copy a tile's queries; rows without one keep what was there."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = FIRST_ROW + gl.arange(0, 64, layout=gl.SliceLayout(1, layout))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
    tokens = rows // GROUP
    is_query = (tokens < span[2]) & (span[5] > 0)
    places = (span[1] + tokens).to(gl.int64) * q_stride + (index % NUM_KV_HEADS * GROUP + rows % GROUP) * HEAD_DIM
    load_rows(q_tile, q + places[:, None] + dims[None, :], is_query[:, None])
    async_copy.commit_group()


@gluon.jit
def _store_out(
    acc, total, out, index, span, out_stride, FIRST_ROW: gl.constexpr, NUM_KV_HEADS: gl.constexpr,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, out_layout: gl.constexpr,
):  # fmt: skip
    inverse = gl.convert_layout(1.0 / gl.where(total > 0, total, 1.0), gl.SliceLayout(1, out_layout))
    rows = FIRST_ROW + gl.arange(0, 64, layout=gl.SliceLayout(1, out_layout))
    dims = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, out_layout))
    tokens = rows // GROUP
    places = (span[1] + tokens).to(gl.int64) * out_stride + (index % NUM_KV_HEADS * GROUP + rows % GROUP) * HEAD_DIM
    values = (acc * inverse[:, None]).to(out.dtype.element_ty)
    gl.store(out + places[:, None] + dims[None, :], values, mask=(tokens < span[2])[:, None])


@gluon.jit
def _start(
    key_tile, count, q_tile, k_tiles, ring, seen, HEAD_DIM: gl.constexpr, WINDOW: gl.constexpr,
    HAS_SOFTCAP: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr, scores_layout: gl.constexpr,
    out_layout: gl.constexpr,
):  # fmt: skip
    """Nothing summed yet and the weights of the first tile: ``acc``, highest score, sum of weights, weights."""
    k_full, k_empty, _, _ = ring
    slot = count % NUM_STAGES
    mbarrier.wait(k_full.index(slot), count // NUM_STAGES & 1)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, layout=scores_layout)
    scores = warpgroup_mma(q_tile, k_tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, [scores])
    mbarrier.arrive(k_empty.index(slot))
    top = gl.full([64], -1e30, gl.float32, layout=gl.SliceLayout(1, scores_layout))
    total = gl.zeros([64], gl.float32, layout=gl.SliceLayout(1, scores_layout))
    weights, top, total, _ = _softmax(
        scores, top, total, key_tile, seen, WINDOW, HAS_SOFTCAP, True, BLOCK_N, scores_layout
    )
    acc = gl.zeros([64, HEAD_DIM], gl.float32, layout=out_layout)
    return acc, top, total, gl.convert_layout(weights.to(q_tile.dtype), gl.DotOperandLayout(0, out_layout, 2))


@gluon.jit
def _step(
    state, key_tile, count, q_tile, k_tiles, v_tiles, ring, seen, WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr,
    IS_MASKED: gl.constexpr, BLOCK_N: gl.constexpr, NUM_STAGES: gl.constexpr, scores_layout: gl.constexpr,
    out_layout: gl.constexpr,
):  # fmt: skip
    """Score a tile while the values of the one before are added up with its weights."""
    k_full, k_empty, v_full, v_empty = ring
    acc, top, total, weights = state
    slot, before = count % NUM_STAGES, (count - 1) % NUM_STAGES
    mbarrier.wait(k_full.index(slot), count // NUM_STAGES & 1)
    zeros = gl.zeros([64, BLOCK_N], gl.float32, layout=scores_layout)
    scores = warpgroup_mma(q_tile, k_tiles.index(slot).permute((1, 0)), zeros, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), (count - 1) // NUM_STAGES & 1)
    acc = warpgroup_mma(weights, v_tiles.index(before), acc, is_async=True)
    scores = warpgroup_mma_wait(1, [scores])
    mbarrier.arrive(k_empty.index(slot))
    new_weights, top, total, fade = _softmax(
        scores, top, total, key_tile, seen, WINDOW, HAS_SOFTCAP, IS_MASKED, BLOCK_N, scores_layout
    )
    acc, weights = warpgroup_mma_wait(0, [acc, weights])
    mbarrier.arrive(v_empty.index(before))
    acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, out_layout))[:, None]
    return acc, top, total, gl.convert_layout(new_weights.to(weights.dtype), weights.type.layout)


@gluon.jit
def _softmax(
    scores, top, total, key_tile, seen, WINDOW: gl.constexpr, HAS_SOFTCAP: gl.constexpr, IS_MASKED: gl.constexpr,
    BLOCK_N: gl.constexpr, scores_layout: gl.constexpr,
):  # fmt: skip
    """As in `paged_attention`: new weights, highest score, sum of weights, and what old sums fade by."""
    scale, softcap, begin, query_positions = seen
    factor = scale
    if HAS_SOFTCAP:
        scores = softcap - 2 * softcap / (gl.exp2(scores * (2 * 1.4426950408889634 * scale / softcap)) + 1)
        factor = 1.0
    if IS_MASKED:
        keys = begin + key_tile * BLOCK_N + gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, scores_layout))
        distance = query_positions[:, None] - keys[None, :]
        is_visible = distance >= 0
        if WINDOW > 0:
            is_visible = is_visible & (distance < WINDOW)
        scores = gl.where(is_visible, scores, float("-inf"))
    higher = gl.maximum(top, gl.max(scores, 1) * factor)
    weights = gl.exp2(scores * factor - higher[:, None])
    fade = gl.exp2(top - higher)
    return weights, higher, total * fade + gl.sum(weights, 1), fade
