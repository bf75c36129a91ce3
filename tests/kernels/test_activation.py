"""The gated activation against float64."""

import os

import pytest
import torch
from torch.nn import functional

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from crossdock.kernels import activation  # noqa: E402

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("size", [8, 1536, 2100])
def test_gate_and_up_lie_side_by_side(dtype: torch.dtype, size: int) -> None:
    generator = torch.Generator().manual_seed(size)
    gate_up = torch.randn(3, 2 * size, generator=generator).mul_(4).to(DEVICE, dtype)
    gate, up = gate_up.double().chunk(2, -1)
    exact = functional.silu(gate) * up
    assert (activation.silu_and_mul(gate_up).double() - exact).norm() / exact.norm() < TOLERANCE[dtype]


def test_gates_far_from_zero_are_closed_or_open() -> None:
    gate_up = torch.tensor([[-80.0, 0.0, 80.0, 3.0, 3.0, 3.0]], device=DEVICE)
    assert activation.silu_and_mul(gate_up)[0].tolist() == [pytest.approx(0, abs=1e-30), 0.0, 240.0]
