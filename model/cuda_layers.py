"""The layers of a decoder on a GPU: cuBLAS for many rows, kernels of our own for few, norms and sums fused with both.

A row's result may depend on how many rows there are, since other kernels round differently.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.activation import silu_and_mul
from ..kernels.gemv import FEW_ROWS, InputNorm, gemv, gemv_add, gemv_silu, is_fast
from ..kernels.norm_rope import add_rms_norm
from .layers import Affine, Linear, Mlp, ResidualLinear, RmsNorm


@dataclass(frozen=True, slots=True)
class CudaNormedLinear:
    """``linear(norm(x))``."""

    norm: RmsNorm
    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        out = x.new_empty(len(x), len(self.weight))
        self.into(x, out)
        return out

    def into(self, x: Tensor, out: Tensor) -> None:
        """``out [num_tokens, out]``."""
        if len(x) == 1:
            gemv(x, self.weight, out, self.bias, InputNorm(self.norm.weight, self.norm.eps))
            return
        normed = add_rms_norm(None, x, self.norm.weight, self.norm.eps)
        if len(x) <= FEW_ROWS:
            gemv(normed, self.weight, out, self.bias)
        elif self.bias is None:
            torch.mm(normed, self.weight.t(), out=out)
        else:
            torch.addmm(self.bias, normed, self.weight.t(), out=out)


@dataclass(frozen=True, slots=True)
class CudaResidualLinear:
    """`ResidualLinear`: the product is added to the stream in float32 and rounded once."""

    weight: Tensor

    def __call__(self, x: Tensor, hidden: Tensor) -> None:
        if is_fast(len(x), self.weight):
            gemv_add(x, self.weight, hidden)
        else:
            hidden.addmm_(x, self.weight.t())


@dataclass(frozen=True, slots=True)
class BiasedResidualLinear:
    """`ResidualLinear` with a bias, which few models have."""

    product: CudaResidualLinear
    bias: Tensor

    def __call__(self, x: Tensor, hidden: Tensor) -> None:
        hidden += self.bias
        self.product(x, hidden)


@dataclass(frozen=True, slots=True)
class CudaGatedMlp:
    """`Mlp`: ``hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))``."""

    gate_up: CudaNormedLinear
    down: ResidualLinear

    def __call__(self, hidden: Tensor) -> None:
        self.down(self._gated(hidden), hidden)

    def _gated(self, hidden: Tensor) -> Tensor:
        norm, weight = self.gate_up.norm, self.gate_up.weight
        if not is_fast(len(hidden), weight) or self.gate_up.bias is not None:
            return silu_and_mul(self.gate_up(hidden))
        out = hidden.new_empty(len(hidden), len(weight) // 2)
        if len(hidden) == 1:
            gemv_silu(hidden, weight, out, InputNorm(norm.weight, norm.eps))
        else:
            gemv_silu(add_rms_norm(None, hidden, norm.weight, norm.eps), weight, out)
        return out


class CudaLayers:
    """Chooses the classes of a GPU."""

    def normed_linear(self, norm: RmsNorm, affine: Affine) -> Linear:
        return CudaNormedLinear(norm, affine.weight, affine.bias)

    def residual_linear(self, affine: Affine) -> ResidualLinear:
        product = CudaResidualLinear(affine.weight)
        return product if affine.bias is None else BiasedResidualLinear(product, affine.bias)

    def mlp(self, norm: RmsNorm, gate_up: Affine, down: Affine) -> Mlp:
        return CudaGatedMlp(CudaNormedLinear(norm, gate_up.weight, gate_up.bias), self.residual_linear(down))
