"""The layers of a decoder as small callables over tensors; no autograd, no module tree.

A layer reads the residual stream ``hidden [num_tokens, hidden_size]`` through a norm and adds to it in place. Norm and
product, product and sum are one step here, so that each kind of device may fuse them as it likes. What a layer is made
of are protocols; the classes below run anywhere and are fastest on a CPU.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from ..kernels import reference


class Linear(Protocol):
    """``x [num_tokens, in]`` -> ``[num_tokens, out]``; each way to hold a weight is a class of its own."""

    def __call__(self, x: Tensor) -> Tensor: ...


class ResidualLinear(Protocol):
    """``hidden += linear(x)``."""

    def __call__(self, x: Tensor, hidden: Tensor) -> None: ...


class Mlp(Protocol):
    """``hidden += mlp(norm(hidden))``."""

    def __call__(self, hidden: Tensor) -> None: ...


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """``weight [size]``."""

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        return reference.rms_norm(x, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class Affine:
    """Numbers of a linear layer on their way into a class: ``weight [out, in]``, ``bias [out]``."""

    weight: Tensor
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """``qkv`` norms what it reads; ``q_norm`` and ``k_norm`` are those of each head, before its rotation."""

    qkv: Linear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    o: ResidualLinear
    mlp: Mlp


# --- the classes of a CPU ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlainLinear:
    """``weight [out, in]``, ``bias [out]``."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return reference.linear(x, self.weight, self.bias)


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """The weight in the order that CPU kernels read it."""

    packed: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return reference.packed_linear(x, self.packed, self.bias)


def linear_layer(affine: Affine) -> Linear:
    """The fastest kind for a CPU; a packed one does not keep ``weight``."""
    if torch.backends.mkldnn.is_available():
        return PackedLinear(reference.pack_weight(affine.weight), affine.bias)
    return PlainLinear(affine.weight, affine.bias)


@dataclass(frozen=True, slots=True)
class NormedLinear:
    """``linear(norm(x))``."""

    norm: RmsNorm
    linear: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(self.norm(x))


@dataclass(frozen=True, slots=True)
class AddedLinear:
    """`ResidualLinear`."""

    linear: Linear

    def __call__(self, x: Tensor, hidden: Tensor) -> None:
        hidden += self.linear(x)


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """`Mlp`: ``down(silu(gate(x)) * up(x))``, gate and up in one matrix behind the norm."""

    gate_up: Linear
    down: Linear

    def __call__(self, hidden: Tensor) -> None:
        hidden += self.down(reference.silu_and_mul(self.gate_up(hidden)))


class CpuLayers:
    """Chooses the classes of a CPU."""

    def normed_linear(self, norm: RmsNorm, affine: Affine) -> Linear:
        return NormedLinear(norm, linear_layer(affine))

    def residual_linear(self, affine: Affine) -> ResidualLinear:
        return AddedLinear(linear_layer(affine))

    def mlp(self, norm: RmsNorm, gate_up: Affine, down: Affine) -> Mlp:
        return GatedMlp(NormedLinear(norm, linear_layer(gate_up)), linear_layer(down))
