"""Matrix products of few rows, bound by reading the weight once: ``x [m, k] @ weight [n, k].T`` for 1 to 16 rows.

One row multiplies in float32 lanes, several rows on the matrix units with the weight as the left operand. No sum is
split in an order that depends on timing, so results repeat to the last bit. Every program reads its first piece of the
weight before it waits for the kernel before it, which hides the start-up of each product behind the end of the last.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import silu
from .dependent_launch import dependent_launch, let_next_start, wait_for_previous

MAX_ROWS = 16
MAX_COUNTERS = 4096


@dataclass(frozen=True, slots=True)
class InputNorm:
    """RMS norm of the input row: ``weight [k]``."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Tile:
    """``rows`` of the weight and ``depth`` of its columns at a time, in ``num_parts`` spans of columns."""

    rows: int
    depth: int
    num_parts: int = 1
    num_warps: int = 4
    num_stages: int = 1


def gemv(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, norm: InputNorm | None = None) -> None:
    """``out [m, n] = norm(x) [m, k] @ weight [n, k].T + bias``; ``norm`` for one row only."""
    _launch(x, weight, out, out if bias is None else bias, norm, "bias" if bias is not None else "plain", len(weight))


def gemv_add(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """``residual [m, n] += x @ weight.T`` in place, rounded once."""
    _launch(x, weight, residual, residual, None, "add", len(weight))


def gemv_silu(x: Tensor, weight: Tensor, out: Tensor, norm: InputNorm | None = None) -> None:
    """``out [m, n] = silu(norm(x) @ gate.T) * (norm(x) @ up.T)``, ``weight [2 * n, k]`` gate then up; rounded once."""
    _launch(x, weight, out, out, norm, "silu", len(weight) // 2)


def tile_for(num_rows: int, num_outputs: int, depth: int, is_gated: bool) -> Tile:
    """What was fastest on an H200 for the shapes of an 8B model."""
    if num_rows == 1:
        return Tile(4 if is_gated else 8, min(512, triton.next_power_of_2(depth)))
    return Tile(16, min(256, triton.next_power_of_2(depth)), num_warps=2, num_stages=4)


@cache
def arrivals(device: torch.device) -> Tensor:
    """Counters of the parts that are done, for the products of one stream; every product leaves them at zero."""
    return torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, addend: Tensor, norm: InputNorm | None, epilogue: str, num_outputs: int
) -> None:
    num_rows, depth = x.shape
    assert 1 <= num_rows <= MAX_ROWS, "more rows are a matrix product"
    tile = tile_for(num_rows, num_outputs, depth, epilogue == "silu")
    grid = (triton.cdiv(num_outputs, tile.rows), tile.num_parts)
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages, **dependent_launch(x.device)}
    if num_rows == 1:
        _one_row[grid](
            x, weight, out, addend, x if norm is None else norm.weight, 0.0 if norm is None else norm.eps, num_outputs,
            K=depth, EPILOGUE=epilogue, HAS_NORM=norm is not None, ROWS=tile.rows, DEPTH=tile.depth, **options,
        )  # fmt: skip
        return
    assert norm is None, "several rows are normed beforehand"
    parts = x.new_empty(tile.num_parts if tile.num_parts > 1 else 0, MAX_ROWS, num_outputs, dtype=torch.float32)
    _few_rows[grid](
        x, weight, out, addend, parts, arrivals(x.device), num_rows, num_outputs,
        K=depth, EPILOGUE=epilogue, NUM_PARTS=tile.num_parts, BATCH=MAX_ROWS,
        ROWS=tile.rows, DEPTH=tile.depth, **options,
    )  # fmt: skip


@triton.jit
def _one_row(
    x, weight, out, addend, norm_weight, eps, N,
    K: tl.constexpr, EPILOGUE: tl.constexpr, HAS_NORM: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    IS_GATED: tl.constexpr = EPILOGUE == "silu"
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, DEPTH)
    places = weight + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K + columns[None, :]
    up_places = places + N.to(tl.int64) * K if IS_GATED else places
    tile = _weight_tile(places, columns, 0, K)
    up_tile = _weight_tile(up_places, columns, 0, K) if IS_GATED else tile
    wait_for_previous(EARLY)
    sums = tl.zeros((ROWS, DEPTH), tl.float32)
    up_sums = tl.zeros((ROWS, DEPTH), tl.float32) if IS_GATED else sums
    squares = tl.zeros((DEPTH,), tl.float32)
    for k in range(0, K, DEPTH):
        is_inside = k + columns < K
        this, up_this = tile, up_tile
        tile = _weight_tile(places, columns, k + DEPTH, K)
        row = tl.load(x + k + columns, mask=is_inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += row * row
            row *= tl.load(norm_weight + k + columns, mask=is_inside, other=0.0).to(tl.float32)
        sums += this.to(tl.float32) * row[None, :]
        if IS_GATED:
            up_tile = _weight_tile(up_places, columns, k + DEPTH, K)
            up_sums += up_this.to(tl.float32) * row[None, :]
    scale = tl.rsqrt(tl.sum(squares, 0) / K + eps) if HAS_NORM else 1.0
    value = tl.sum(sums, 1) * scale
    if IS_GATED:
        value = silu(value) * (tl.sum(up_sums, 1) * scale)
    elif EPILOGUE != "plain":
        value += tl.load(addend + rows, mask=rows < N, other=0.0).to(tl.float32)
    tl.store(out + rows, value.to(out.dtype.element_ty), mask=rows < N)


@triton.jit
def _weight_tile(places, columns, start, K: tl.constexpr):
    return tl.load(places + start, mask=(start + columns < K)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _few_rows(
    x, weight, out, addend, parts, arrived, M, N,
    K: tl.constexpr, EPILOGUE: tl.constexpr, NUM_PARTS: tl.constexpr, BATCH: tl.constexpr,
    ROWS: tl.constexpr, DEPTH: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    IS_GATED: tl.constexpr = EPILOGUE == "silu"
    PART: tl.constexpr = (K + NUM_PARTS * DEPTH - 1) // (NUM_PARTS * DEPTH) * DEPTH
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    columns = tl.program_id(1) * PART + tl.arange(0, DEPTH)
    batch = tl.arange(0, BATCH)
    places = weight + tl.minimum(rows, N - 1).to(tl.int64)[:, None] * K + columns[None, :]
    up_places = places + N.to(tl.int64) * K if IS_GATED else places
    x_places = x + batch[None, :] * K + columns[:, None]
    tile = _weight_tile(places, columns, 0, K)
    up_tile = _weight_tile(up_places, columns, 0, K) if IS_GATED else tile
    wait_for_previous(EARLY)
    x_tile = tl.load(x_places, mask=(batch < M)[None, :] & (columns < K)[:, None], other=0.0)
    sums = tl.dot(tile, x_tile, input_precision="ieee")
    up_sums = tl.dot(up_tile, x_tile, input_precision="ieee") if IS_GATED else sums
    for k in range(DEPTH, PART, DEPTH):
        x_tile = tl.load(x_places + k, mask=(batch < M)[None, :] & (k + columns < K)[:, None], other=0.0)
        sums = tl.dot(_weight_tile(places, columns, k, K), x_tile, sums, input_precision="ieee")
        if IS_GATED:
            up_sums = tl.dot(_weight_tile(up_places, columns, k, K), x_tile, up_sums, input_precision="ieee")
    outputs = batch[None, :].to(tl.int64) * N + rows[:, None]
    is_inside = (batch < M)[None, :] & (rows < N)[:, None]
    if NUM_PARTS == 1:
        _finish(sums, up_sums, out, addend, outputs, rows, N, is_inside, EPILOGUE)
    else:
        part_size = BATCH * N.to(tl.int64)
        tl.store(parts + tl.program_id(1) * part_size + outputs, sums, mask=is_inside)
        tl.debug_barrier()
        if tl.atomic_add(arrived + tl.program_id(0), 1) == NUM_PARTS - 1:
            total = tl.load(parts + outputs, mask=is_inside, other=0.0, cache_modifier=".cg")
            for part in tl.static_range(1, NUM_PARTS):
                total += tl.load(parts + part * part_size + outputs, mask=is_inside, other=0.0, cache_modifier=".cg")
            _finish(total, total, out, addend, outputs, rows, N, is_inside, EPILOGUE)
            tl.store(arrived + tl.program_id(0), 0)


@triton.jit
def _finish(sums, up_sums, out, addend, outputs, rows, N, is_inside, EPILOGUE: tl.constexpr):
    if EPILOGUE == "silu":
        sums = silu(sums) * up_sums
    elif EPILOGUE == "bias":
        sums += tl.load(addend + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    elif EPILOGUE == "add":
        sums += tl.load(addend + outputs, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + outputs, sums.to(out.dtype.element_ty), mask=is_inside)
