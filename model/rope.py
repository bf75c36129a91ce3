"""Rotary frequencies of every scaling.

The angles of a token depend on its position alone, never on the chunk or the prompt it came in: only then may
its cached key serve another request. That matters for dynamic scaling, where Transformers takes the frequencies
from the longest position of the forward pass. Here position ``p`` always has those of a sequence of ``p + 1``
tokens: equal to Transformers within ``original_length``, and beyond it while decoding token by token; a prompt
that is itself longer is rotated as if it had been decoded.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .spec import DynamicScaling, FrequencyFactors, LinearScaling, Llama3Scaling, RopeSpec, YarnScaling


@dataclass(frozen=True, slots=True)
class RopeRows:
    """The rotation of each row of a step, float32 ``[num_tokens, 1, head_dim]``.

    ``out = x * cos + roll(x, head_dim / 2) * sin``; the first half of ``sin`` carries the minus sign.
    """

    cos: Tensor
    sin: Tensor


class Rope:
    def __init__(self, spec: RopeSpec, head_dim: int, device: torch.device) -> None:
        self.scaling = spec.scaling
        self.theta = spec.theta
        self.exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        self.frequencies = scaled_frequencies(spec, self.exponents)
        self.attention_factor = spec.scaling.attention_factor if isinstance(spec.scaling, YarnScaling) else 1.0

    def rows(self, positions: Tensor) -> RopeRows:
        """Rotations for ``positions`` ``[num_tokens]``; computed once a step, used by all layers."""
        angles = positions[:, None].float() * self._frequencies_at(positions)
        cos, sin = angles.cos() * self.attention_factor, angles.sin() * self.attention_factor
        return RopeRows(torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1))

    def _frequencies_at(self, positions: Tensor) -> Tensor:
        if not isinstance(self.scaling, DynamicScaling):
            return self.frequencies
        return dynamic_frequencies(self.scaling, self.theta, self.exponents, positions + 1)


def scaled_frequencies(spec: RopeSpec, exponents: Tensor) -> Tensor:
    """Angle per position, ``[head_dim / 2]``, as Transformers' ``modeling_rope_utils`` defines each scaling."""
    plain = 1.0 / spec.theta**exponents
    match spec.scaling:
        case LinearScaling(factor):
            return plain / factor
        case FrequencyFactors(factors):
            return plain / torch.tensor(factors, device=exponents.device)
        case Llama3Scaling():
            return llama3_frequencies(spec.scaling, plain)
        case YarnScaling():
            return yarn_frequencies(spec.scaling, spec.theta, exponents)
        case _:
            return plain


def dynamic_frequencies(scaling: DynamicScaling, theta: float, exponents: Tensor, lengths: Tensor) -> Tensor:
    """``[num_tokens, head_dim / 2]``: the base grows with the length beyond the original one."""
    head_dim = 2 * len(exponents)
    ratio = lengths.clamp(min=scaling.original_length).float() / scaling.original_length
    base = theta * (scaling.factor * ratio - (scaling.factor - 1)) ** (head_dim / (head_dim - 2))
    return 1.0 / base[:, None] ** exponents


def llama3_frequencies(scaling: Llama3Scaling, plain: Tensor) -> Tensor:
    """Llama 3.1: ``smooth`` is 0 for wavelengths the training never saw whole, 1 for those it saw often."""
    turns = scaling.original_length * plain / (2 * math.pi)
    smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * plain / scaling.factor + smooth * plain


def yarn_frequencies(scaling: YarnScaling, theta: float, exponents: Tensor) -> Tensor:
    """YaRN: dimensions that turn often keep their frequency, slow ones are interpolated, a ramp between."""
    num_pairs = len(exponents)
    turns = (scaling.beta_fast, scaling.beta_slow)
    low, high = (_yarn_pair(scaling, theta, num_turns, num_pairs) for num_turns in turns)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * num_pairs - 1)
    pairs = torch.arange(num_pairs, dtype=torch.float32, device=exponents.device)
    ramp = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
    plain: Tensor = 1.0 / theta**exponents
    return plain / scaling.factor * ramp + plain * (1 - ramp)


def _yarn_pair(scaling: YarnScaling, theta: float, num_turns: float, num_pairs: int) -> float:
    """The pair of dimensions that turns ``num_turns`` times within the original length."""
    return num_pairs * math.log(scaling.original_length / (num_turns * 2 * math.pi)) / math.log(theta)
