"""Matrix products of few rows, bound by reading the weight once: ``x [m, k] @ weight [n, k].T`` for 1 to 32 rows.

One row multiplies in float32 lanes, several rows on the matrix units with the weight as the left operand. Every program
reads its first piece of the weight before it waits for the kernel before it: that hides the start of each product
behind the end of the last. No sum is taken in an order that depends on timing, so results repeat to the last bit.
"""

from dataclasses import dataclass
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .activation import silu
from .dependent_launch import dependent_launch, let_next_start, wait_for_previous
from .sizes import cdiv, next_power_of_2

MAX_ROWS = 32
FEW_ROWS = 16
"""Up to so many rows every product is faster than cuBLAS', up to `MAX_ROWS` those of large weights. Measured on an H200
with the shapes of an 8B model: with 32 rows gate-up gains 3.6 µs and down 2.9, while qkv and o lose 2.
"""
LARGE = 1 << 25
"""Elements."""
NUM_PARTS = 4
FEWEST_UNSPLIT = 80


@dataclass(frozen=True, slots=True)
class InputNorm:
    """RMS norm of the input row: ``weight [k]``."""

    weight: Tensor
    eps: float


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program has in hand: ``rows`` of the weight and ``depth`` columns, which it moves through one of
    ``num_parts`` spans, 1 or `NUM_PARTS`; the program that ends last sums the parts of its rows.
    """

    rows: int
    depth: int
    num_parts: int = 1
    num_warps: int = 4
    num_stages: int = 1


def gemv(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, norm: InputNorm | None = None) -> None:
    """``out [m, n] = norm(x) [m, k] @ weight [n, k].T + bias``; ``norm`` for one row only."""
    _launch(x, weight, out, out if bias is None else bias, norm, "plain" if bias is None else "bias", len(weight))


def gemv_add(x: Tensor, weight: Tensor, residual: Tensor) -> None:
    """``residual [m, n] += x @ weight.T`` in place, rounded once."""
    _launch(x, weight, residual, residual, None, "add", len(weight))


def gemv_silu(x: Tensor, weight: Tensor, out: Tensor, norm: InputNorm | None = None) -> None:
    """``out [m, n] = silu(norm(x) @ gate.T) * (norm(x) @ up.T)``, ``weight [2 * n, k]`` gate then up; rounded once."""
    _launch(x, weight, out, out, norm, "silu", len(weight) // 2)


def is_fast(num_rows: int, weight: Tensor) -> bool:
    """Whether the product is worth it here."""
    return num_rows <= FEW_ROWS or (num_rows <= MAX_ROWS and weight.numel() >= LARGE)


def tile_for_one_row(weight: Tensor, is_gated: bool) -> Tile:
    """32 KiB, of several rows: all of it is on its way before the wait. Measured in the engine, on an H200."""
    depth = min(8192 // weight.itemsize, next_power_of_2(weight.shape[1]))
    return Tile(max(1, 32768 // weight.itemsize // depth // (2 if is_gated else 1)), depth, num_warps=8)


def tile_for_few_rows(weight: Tensor, is_gated: bool, batch: int) -> Tile:
    """The fewer the programs, the more each must have on its way; very few are split. ``batch`` is 16 or 32 rows."""
    num_programs, is_small = cdiv(len(weight), 64), batch <= FEW_ROWS
    depth = max(16, min(256 // weight.itemsize, next_power_of_2(weight.shape[1])))
    if num_programs < FEWEST_UNSPLIT and not is_gated:
        return Tile(64, depth, NUM_PARTS, num_stages=4 if is_small else 3)
    if is_gated and not is_small:
        return Tile(64, max(16, depth // 2), num_stages=4)
    return Tile(64, depth, num_stages=6 if num_programs < 132 and not is_gated else 4)


@cache
def arrivals(device: torch.device) -> Tensor:
    """Counters of the parts that are done, for the products of one stream; each leaves multiples of `NUM_PARTS`.

    They must be there before the first graph is captured.
    """
    counters = torch.zeros(FEWEST_UNSPLIT, dtype=torch.int32, device=device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # other streams may use them first
    return counters


def _launch(
    x: Tensor, weight: Tensor, out: Tensor, addend: Tensor, norm: InputNorm | None, epilogue: str, num_outputs: int
) -> None:
    num_rows, depth = x.shape
    assert 1 <= num_rows <= MAX_ROWS, "more rows are a matrix product"
    assert x.is_contiguous() and weight.is_contiguous() and out.is_contiguous(), "rows lie one after the other"
    early, is_gated = dependent_launch(x.device), epilogue == "silu"
    if num_rows == 1:
        tile = tile_for_one_row(weight, is_gated)
        _one_row[(cdiv(num_outputs, tile.rows),)](
            x, weight, out, addend, x if norm is None else norm.weight, 0.0 if norm is None else norm.eps, num_outputs,
            K=depth, EPILOGUE=epilogue, HAS_NORM=norm is not None, ROWS=tile.rows, DEPTH=tile.depth,
            num_warps=tile.num_warps, **early,
        )  # fmt: skip
        return
    assert norm is None, "several rows are normed beforehand"
    batch = FEW_ROWS if num_rows <= FEW_ROWS else MAX_ROWS
    tile = tile_for_few_rows(weight, is_gated, batch)
    parts = x.new_empty(tile.num_parts if tile.num_parts > 1 else 0, batch, num_outputs, dtype=torch.float32)
    _few_rows[(cdiv(num_outputs, tile.rows), tile.num_parts)](
        x, weight, out, addend, parts, arrivals(x.device), num_rows, num_outputs,
        K=depth, EPILOGUE=epilogue, NUM_PARTS=tile.num_parts, BATCH=batch,
        ROWS=tile.rows, DEPTH=tile.depth, num_warps=tile.num_warps, num_stages=tile.num_stages, **early,
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
    for start in tl.static_range(0, K, DEPTH):
        is_inside = start + columns < K
        row = tl.load(x + start + columns, mask=is_inside, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += row * row
            row *= tl.load(norm_weight + start + columns, mask=is_inside, other=0.0).to(tl.float32)
        sums += tile.to(tl.float32) * row[None, :]
        if IS_GATED:
            up_sums += up_tile.to(tl.float32) * row[None, :]
        if start + DEPTH < K:
            tile = _weight_tile(places, columns, start + DEPTH, K)
            up_tile = _weight_tile(up_places, columns, start + DEPTH, K) if IS_GATED else tile
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


@triton.jit(do_not_specialize=["M"])
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
        if tl.atomic_add(arrived + tl.program_id(0), 1) % NUM_PARTS == NUM_PARTS - 1:
            total = tl.load(parts + outputs, mask=is_inside, other=0.0, cache_modifier=".cg")
            for part in tl.static_range(1, NUM_PARTS):
                total += tl.load(parts + part * part_size + outputs, mask=is_inside, other=0.0, cache_modifier=".cg")
            _finish(total, total, out, addend, outputs, rows, N, is_inside, EPILOGUE)


@triton.jit
def _finish(sums, up_sums, out, addend, outputs, rows, N, is_inside, EPILOGUE: tl.constexpr):
    if EPILOGUE == "silu":
        sums = silu(sums) * up_sums
    elif EPILOGUE == "bias":
        sums += tl.load(addend + rows, mask=rows < N, other=0.0).to(tl.float32)[:, None]
    elif EPILOGUE == "add":
        sums += tl.load(addend + outputs, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + outputs, sums.to(out.dtype.element_ty), mask=is_inside)
