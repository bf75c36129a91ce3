"""The layers of a decoder as small callables over tensors; no autograd, no module tree."""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..kernels import reference


@dataclass(frozen=True, slots=True)
class Linear:
    """``weight [out, in]``, ``bias [out]``."""

    weight: Tensor
    bias: Tensor | None = None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return reference.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """``down(silu(gate(x)) * up(x))``, gate and up in one matrix."""

    gate_up: Linear
    down: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(reference.silu_and_mul(self.gate_up(x)))
