"""Norms, rotation and the KV store against their twins in float64; outputs hold NaN before."""

import os
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from crossdock.kernels import reference

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from crossdock.kernels import norm_rope  # noqa: E402

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
EPS = 1e-5

each_dtype = pytest.mark.parametrize("dtype", TOLERANCE)


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(DEVICE, dtype)


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


# --- add and norm ----------------------------------------------------------------------------


@each_dtype
@pytest.mark.parametrize("size", [576, 1024, 80])
def test_the_sum_goes_to_the_residual_and_its_norm_is_returned(dtype: torch.dtype, size: int) -> None:
    x, residual, weight = (normal(3, size, dtype=dtype, seed=i) for i in range(3))
    total = (x.double() + residual.double()).to(dtype)
    normed = norm_rope.add_rms_norm(x, residual, weight[0], EPS)
    assert error(residual, total) < TOLERANCE[dtype]
    assert error(normed, functional.rms_norm(total.double(), (size,), weight[0].double(), EPS)) < TOLERANCE[dtype]


def test_the_first_norm_has_nothing_to_add() -> None:
    residual, weight = normal(2, 64), normal(64)
    before = residual.clone()
    normed = norm_rope.add_rms_norm(None, residual, weight, EPS)
    assert torch.equal(residual, before)
    assert error(normed, functional.rms_norm(before, (64,), weight, EPS)) < 1e-6


def test_parts_of_a_product_are_summed_in_their_order() -> None:
    parts, residual, weight = normal(3, 2, 64), normal(2, 64, dtype=torch.float16), normal(64, dtype=torch.float16)
    total = (parts[0] + parts[1] + parts[2] + residual.float()).half()
    norm_rope.add_rms_norm(parts, residual, weight, EPS)
    assert error(residual, total) < 1e-3


@each_dtype
def test_the_twin_of_add_rms_norm_agrees(dtype: torch.dtype) -> None:
    parts, weight = normal(2, 3, 96, dtype=torch.float32), normal(96, dtype=dtype)
    ours, twins = normal(3, 96, dtype=dtype), normal(3, 96, dtype=dtype)
    normed = norm_rope.add_rms_norm(parts, ours, weight, EPS)
    assert error(normed, reference.add_rms_norm(parts, twins, weight, EPS)) < TOLERANCE[dtype]
    assert error(ours, twins) < TOLERANCE[dtype]


# --- norm, rotate and store ------------------------------------------------------------------


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    num_blocks: int = 5


@dataclass(frozen=True)
class Step:
    """Rows of one step and the middle layer of a pool of three."""

    qkv: Tensor
    kv: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor | None
    slots: Tensor
    num_heads: int

    def run(self, module: object, q_norm: Tensor | None = None, k_norm: Tensor | None = None) -> None:
        table = (self.cos, self.sin, self.positions, self.slots, self.num_heads)
        module.norm_rope_store(self.qkv, self.kv, *table, q_norm, k_norm, EPS)  # type: ignore[attr-defined]

    def exact(self) -> "Step":
        pool = torch.full((len(self.kv), 3, *self.kv.shape[1:]), torch.nan, dtype=torch.float64, device=DEVICE)
        cos, sin = self.cos.double(), self.sin.double()
        return Step(self.qkv.double(), pool[:, 1], cos, sin, self.positions, self.slots, self.num_heads)


def step_of(shape: Shape, slots: list[int], dtype: torch.dtype = torch.float32, has_positions: bool = True) -> Step:
    width = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
    pool_shape = (shape.num_blocks, 3, 2, shape.num_kv_heads, shape.block_size, shape.head_dim)
    pool = torch.full(pool_shape, torch.nan, dtype=dtype, device=DEVICE)
    angles = normal(50 if has_positions else len(slots), shape.head_dim // 2)
    positions = torch.arange(len(slots), dtype=torch.int32, device=DEVICE) * 7 % 50 if has_positions else None
    qkv, at = normal(len(slots), width, dtype=dtype), torch.tensor(slots, dtype=torch.int32, device=DEVICE)
    return Step(qkv, pool[:, 1], angles.cos(), angles.sin(), positions, at, shape.num_heads)


def assert_equal_steps(step: Step, exact: Step, tolerance: float) -> None:
    assert error(step.qkv, exact.qkv) < tolerance
    assert torch.equal(step.kv.isnan(), exact.kv.isnan())
    assert error(step.kv.nan_to_num(), exact.kv.nan_to_num()) < tolerance


SHAPES = [
    Shape(),
    Shape(num_heads=9, num_kv_heads=3),
    Shape(num_heads=8, num_kv_heads=8, head_dim=80, block_size=32),
    Shape(num_heads=2, num_kv_heads=1, head_dim=256),
    Shape(num_heads=20, num_kv_heads=20, head_dim=128, block_size=128, num_blocks=2),
]


@each_dtype
@pytest.mark.parametrize("shape", SHAPES)
def test_heads_are_rotated_in_place_and_k_and_v_stored(shape: Shape, dtype: torch.dtype) -> None:
    step = step_of(shape, [17, 0, shape.block_size * shape.num_blocks - 1], dtype)
    exact = step.exact()
    step.run(norm_rope)
    exact.run(reference)
    assert_equal_steps(step, exact, TOLERANCE[dtype])


@each_dtype
def test_heads_are_normed_before_the_rotation(dtype: torch.dtype) -> None:
    step = step_of(Shape(), [3, 4, 5], dtype)
    exact, q_norm, k_norm = step.exact(), normal(64, dtype=dtype, seed=1), normal(64, dtype=dtype, seed=2)
    step.run(norm_rope, q_norm, k_norm)
    exact.run(reference, q_norm.double(), k_norm.double())
    assert_equal_steps(step, exact, TOLERANCE[dtype])


def test_rows_without_a_slot_are_rotated_but_stored_nowhere() -> None:
    step = step_of(Shape(), [-1, 20, -1])
    exact = step.exact()
    step.run(norm_rope)
    exact.run(reference)
    assert_equal_steps(step, exact, 1e-5)
    assert int((~step.kv.isnan()).sum()) == 2 * 2 * 64


def test_without_positions_each_row_brings_its_own_rotation() -> None:
    step = step_of(Shape(), [1, 2, 3], has_positions=False)
    exact = step.exact()
    step.run(norm_rope)
    exact.run(reference)
    assert_equal_steps(step, exact, 1e-5)


def test_v_is_stored_as_it_is_and_a_turn_of_ninety_degrees_swaps_the_halves() -> None:
    step = step_of(Shape(num_heads=1, num_kv_heads=1), [0])
    step.cos.zero_()
    step.sin.fill_(1.0)
    q, k, v = step.qkv.view(3, 2, 32).clone()
    step.run(norm_rope)
    assert torch.equal(step.qkv.view(3, 2, 32)[0], torch.stack((-q[1], q[0])))
    assert torch.equal(step.kv[0, 0, 0, 0], torch.cat((-k[1], k[0])))
    assert torch.equal(step.kv[0, 1, 0, 0], v.flatten())
