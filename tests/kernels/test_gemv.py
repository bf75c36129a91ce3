"""Products of few rows against float64, every shape with outputs poisoned first."""

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from crossdock.kernels import gemv  # noqa: E402

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
# The interpreter's matrix product is no good in bfloat16.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-3}

each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)
each_num_rows = pytest.mark.parametrize("num_rows", [1, 2, 16, 17, 32])
each_size = pytest.mark.parametrize(("num_outputs", "depth"), [(64, 256), (70, 200), (34, 1100)])


@dataclass(frozen=True)
class Product:
    x: Tensor
    weight: Tensor

    @property
    def exact(self) -> Tensor:
        return self.x.double() @ self.weight.double().T

    def output(self, num_outputs: int) -> Tensor:
        return torch.full((len(self.x), num_outputs), torch.nan, dtype=self.x.dtype, device=DEVICE)


def product(num_rows: int, num_outputs: int, depth: int, dtype: torch.dtype) -> Product:
    generator = torch.Generator().manual_seed(num_rows + num_outputs)
    x, weight = (torch.randn(n, depth, generator=generator).to(DEVICE, dtype) for n in (num_rows, num_outputs))
    return Product(x, weight / depth**0.5)


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


@each_dtype
@each_num_rows
@each_size
def test_rows_times_weight(num_rows: int, num_outputs: int, depth: int, dtype: torch.dtype) -> None:
    p = product(num_rows, num_outputs, depth, dtype)
    out, bias = p.output(num_outputs), p.weight[:, 0].contiguous()
    gemv.gemv(p.x, p.weight, out)
    assert error(out, p.exact) < TOLERANCE[dtype]
    gemv.gemv(p.x, p.weight, out, bias)
    assert error(out, p.exact + bias.double()) < TOLERANCE[dtype]


@each_dtype
@each_num_rows
def test_the_product_is_added_to_the_residual(num_rows: int, dtype: torch.dtype) -> None:
    p = product(num_rows, 70, 200, dtype)
    residual = product(num_rows, 1, 70, dtype).x.clone()
    expected = residual.double() + p.exact
    gemv.gemv_add(p.x, p.weight, residual)
    assert error(residual, expected) < TOLERANCE[dtype]


@each_dtype
@each_num_rows
def test_gate_and_up_meet_in_the_product(num_rows: int, dtype: torch.dtype) -> None:
    p = product(num_rows, 70, 200, dtype)
    out = p.output(35)
    gemv.gemv_silu(p.x, p.weight, out)
    gate, up = p.exact.chunk(2, -1)
    assert error(out, functional.silu(gate) * up) < TOLERANCE[dtype]


@each_dtype
def test_one_row_is_normed_on_the_way(dtype: torch.dtype) -> None:
    p = product(1, 70, 200, dtype)
    norm = gemv.InputNorm(product(1, 1, 200, dtype).x[0], 1e-5)
    normed = functional.rms_norm(p.x.double(), (200,), norm.weight.double(), norm.eps)
    exact = normed @ p.weight.double().T
    out, gated = p.output(70), p.output(35)
    gemv.gemv(p.x, p.weight, out, norm=norm)
    gemv.gemv_silu(p.x, p.weight, gated, norm)
    gate, up = exact.chunk(2, -1)
    assert error(out, exact) < TOLERANCE[dtype]
    assert error(gated, functional.silu(gate) * up) < TOLERANCE[dtype]


@pytest.mark.parametrize("num_parts", [1, gemv.NUM_PARTS])
def test_parts_of_a_row_meet_in_one_order_whoever_ends_last(num_parts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemv, "tile_for_few_rows", lambda *_: gemv.Tile(16, 64, num_parts))
    p = product(5, 70, 600, torch.float32)
    for _ in range(2):
        out, residual = p.output(70), torch.ones(5, 70, device=DEVICE)
        gemv.gemv(p.x, p.weight, out)
        gemv.gemv_add(p.x, p.weight, residual)
        assert error(out, p.exact) < 1e-5
        assert error(residual, p.exact + 1) < 1e-5


def test_a_row_has_the_same_product_beside_any_others() -> None:
    p = product(16, 70, 200, torch.float32)
    together, alone = p.output(70), p.output(70)
    gemv.gemv(p.x, p.weight, together)
    gemv.gemv(p.x[:2], p.weight, alone[:2])
    assert torch.equal(together[:2], alone[:2])
