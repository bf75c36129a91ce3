"""What stands between the matrix products of a layer: norms with the residual sum, rotation, and the KV store."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import dependent_launch, let_next_start, wait_for_previous
from .sizes import cdiv, next_power_of_2

ELEMENTS_A_WARP = 512
TILE_ELEMENTS = 1024


def add_rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Add ``x`` to ``residual [n, size]`` in place -> the RMS norm of the sum, ``[n, size]``.

    ``x`` is ``[n, size]``, or ``[num_parts, n, size]`` whose parts are summed first in their order, or ``None`` (zero).
    All sums are float32; the new residual is rounded to its dtype before it is normed.
    """
    num_rows, size = residual.shape
    num_parts = 0 if x is None else x.numel() // residual.numel()
    normed = torch.empty_like(residual)
    block = next_power_of_2(size)
    num_warps = max(1, min(16, block // ELEMENTS_A_WARP))
    _add_rms_norm[(num_rows,)](
        residual if x is None else x, residual, weight, normed, size, eps,
        NUM_PARTS=num_parts, BLOCK=block, num_warps=num_warps, **dependent_launch(residual.device),
    )  # fmt: skip
    return normed


@triton.jit
def _add_rms_norm(
    x, residual, weight, normed, size, eps,
    NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    columns = tl.arange(0, BLOCK)
    is_inside = columns < size
    scale = tl.load(weight + columns, mask=is_inside, other=0.0).to(tl.float32)
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    places = row * size + columns
    hidden = tl.load(residual + places, mask=is_inside, other=0.0).to(tl.float32)
    if NUM_PARTS > 0:
        added = tl.load(x + places, mask=is_inside, other=0.0).to(tl.float32)
        for part in tl.static_range(1, NUM_PARTS):
            part_start = part * tl.num_programs(0).to(tl.int64) * size
            added += tl.load(x + part_start + places, mask=is_inside, other=0.0).to(tl.float32)
        rounded = (hidden + added).to(residual.dtype.element_ty)
        tl.store(residual + places, rounded, mask=is_inside)
        hidden = rounded.to(tl.float32)
    scaled = hidden * tl.rsqrt(tl.sum(hidden * hidden, 0) / size + eps)
    scaled = scaled.to(normed.dtype.element_ty).to(tl.float32)
    tl.store(normed + places, (scaled * scale).to(normed.dtype.element_ty), mask=is_inside)


def norm_rope_store(
    qkv: Tensor,
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    slots: Tensor,
    num_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    """Norm (if asked) and rotate the heads of q and k in place, and store K and V in a layer's view of the pool.

    ``qkv [n, (num_heads + 2 * num_kv_heads) * head_dim]``; ``kv [num_blocks, 2, num_kv_heads, block_size, head_dim]``,
    contiguous but for the first dimension. ``cos, sin`` are float32 ``[max_positions, head_dim / 2]``: row ``i`` of
    ``qkv`` turns by row ``positions[i]`` of them, by row ``i`` where ``positions`` is ``None``. ``slots [n]`` are
    ``block * block_size + offset``, negative for a row that is not stored. ``q_norm, k_norm [head_dim]``: both or none.
    """
    _, _, num_kv_heads, block_size, head_dim = kv.shape
    assert qkv.is_contiguous() and kv[0].is_contiguous(), "heads and pages lie one after the other"
    block_heads = min(next_power_of_2(num_kv_heads), max(1, TILE_ELEMENTS // next_power_of_2(head_dim)))
    num_parts = cdiv(num_heads, block_heads) + 2 * cdiv(num_kv_heads, block_heads)
    _norm_rope_store[(num_parts, len(qkv))](
        qkv, kv, cos, sin, slots if positions is None else positions, slots,
        qkv if q_norm is None else q_norm, qkv if k_norm is None else k_norm, eps, kv.stride(0),
        NUM_HEADS=num_heads, NUM_KV_HEADS=num_kv_heads, HEAD_DIM=head_dim, BLOCK_SIZE=block_size,
        HEADS=block_heads, HALF=next_power_of_2(head_dim // 2),
        HAS_NORM=q_norm is not None, HAS_POSITIONS=positions is not None,
        num_warps=2, **dependent_launch(qkv.device),
    )  # fmt: skip


@triton.jit
def _norm_rope_store(
    qkv, kv, cos, sin, positions, slots, q_norm, k_norm, eps, kv_block_stride,
    NUM_HEADS: tl.constexpr, NUM_KV_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    HEADS: tl.constexpr, HALF: tl.constexpr, HAS_NORM: tl.constexpr, HAS_POSITIONS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    Q_PARTS: tl.constexpr = (NUM_HEADS + HEADS - 1) // HEADS
    KV_PARTS: tl.constexpr = (NUM_KV_HEADS + HEADS - 1) // HEADS
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    angle_row = tl.load(positions + row).to(tl.int64) if HAS_POSITIONS else row
    slot = tl.load(slots + row).to(tl.int64)
    is_q, is_v = part < Q_PARTS, part >= Q_PARTS + KV_PARTS
    first_part = tl.where(is_q, 0, tl.where(is_v, Q_PARTS + KV_PARTS, Q_PARTS))
    first_head = tl.where(is_q, 0, tl.where(is_v, NUM_HEADS + NUM_KV_HEADS, NUM_HEADS))
    heads = (part - first_part) * HEADS + tl.arange(0, HEADS)
    pairs = tl.arange(0, HALF)
    is_pair = pairs < HALF_DIM
    is_inside = (heads < tl.where(is_q, NUM_HEADS, NUM_KV_HEADS))[:, None] & is_pair[None, :]
    width = (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM
    places = qkv + row * width + (first_head + heads)[:, None] * HEAD_DIM + pairs[None, :]
    low = tl.load(places, mask=is_inside, other=0.0)
    high = tl.load(places + HALF_DIM, mask=is_inside, other=0.0)
    c = tl.load(cos + angle_row * HALF_DIM + pairs, mask=is_pair, other=0.0)[None, :]
    s = tl.load(sin + angle_row * HALF_DIM + pairs, mask=is_pair, other=0.0)[None, :]
    dtype: tl.constexpr = qkv.dtype.element_ty
    if part < Q_PARTS + KV_PARTS:
        x, y = low.to(tl.float32), high.to(tl.float32)
        if HAS_NORM:
            norm = q_norm if is_q else k_norm
            scale = tl.rsqrt(tl.sum(x * x + y * y, 1) / HEAD_DIM + eps)[:, None]
            x_weight = tl.load(norm + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
            y_weight = tl.load(norm + HALF_DIM + pairs, mask=is_pair, other=0.0).to(tl.float32)[None, :]
            x = ((x * scale).to(dtype).to(tl.float32) * x_weight).to(dtype).to(tl.float32)
            y = ((y * scale).to(dtype).to(tl.float32) * y_weight).to(dtype).to(tl.float32)
        low, high = (x * c - y * s).to(dtype), (y * c + x * s).to(dtype)
        tl.store(places, low, mask=is_inside)
        tl.store(places + HALF_DIM, high, mask=is_inside)
    if (part >= Q_PARTS) & (slot >= 0):
        pages = tl.where(is_v, NUM_KV_HEADS, 0) + heads
        stored = kv + (slot // BLOCK_SIZE) * kv_block_stride + (slot % BLOCK_SIZE) * HEAD_DIM
        stored += pages[:, None] * (BLOCK_SIZE * HEAD_DIM) + pairs[None, :]
        tl.store(stored, low, mask=is_inside)
        tl.store(stored + HALF_DIM, high, mask=is_inside)
