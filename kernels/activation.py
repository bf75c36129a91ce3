"""The gated activation of the MLP."""

import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import dependent_launch, let_next_start, wait_for_previous
from .sizes import cdiv

BLOCK = 2048


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``gate_up [n, 2 * size]``, gate first -> ``[n, size]``; in float32, rounded once."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(num_rows, size)
    grid = (cdiv(size, BLOCK), num_rows)
    _silu_and_mul[grid](gate_up, out, size, BLOCK=BLOCK, num_warps=4, **dependent_launch(out.device))
    return out


@triton.jit
def silu(x):
    """``x * sigmoid(x)`` of float32."""
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _silu_and_mul(gate_up, out, size, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1).to(tl.int64)
    is_inside = columns < size
    gate = tl.load(gate_up + row * 2 * size + columns, mask=is_inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + (row * 2 + 1) * size + columns, mask=is_inside, other=0.0).to(tl.float32)
    tl.store(out + row * size + columns, (silu(gate) * up).to(out.dtype.element_ty), mask=is_inside)
