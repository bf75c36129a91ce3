"""From a checkpoint to a `Transformer`, one tensor at a time, so that memory peaks near the weights' own size."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from .attention import PagedAttention
from .layers import GatedMlp, Linear, RmsNorm
from .rope import Rope
from .spec import DecoderSpec
from .transformer import DecoderLayer, Transformer

CPU = torch.device("cpu")


class Weights(Protocol):
    """A checkpoint's tensors, by the names and in the shapes that Transformers gives them."""

    def names(self) -> Collection[str]: ...

    def get(self, name: str) -> Tensor: ...


def build_transformer(
    spec: DecoderSpec,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device = CPU,
    on_progress: Callable[[int, int], None] | None = None,
) -> Transformer:
    """Raises ``ValueError`` naming the weights that are missing or have another shape than the spec says.

    With tied embeddings an output head in the checkpoint is ignored, as Transformers does. ``on_progress(done,
    total)`` counts layers.
    """
    shapes = dict(weight_shapes(spec))
    missing = [name for name in shapes if name not in weights.names()]
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} weights: {', '.join(missing[:8])}")
    reader = _Reader(weights, shapes, dtype, device)
    embedding = reader.matrix(f"{spec.names.embedding}.weight")
    layers = []
    for index in range(spec.num_layers):
        layers.append(_layer(spec, spec.names.layer.format(layer=index), reader))
        if on_progress is not None:
            on_progress(index + 1, spec.num_layers)
    return Transformer(
        spec=spec,
        embedding=embedding,
        layers=tuple(layers),
        final_norm=reader.norm(spec.names.final_norm, spec.norm_eps),
        lm_head=Linear(embedding) if spec.has_tied_embeddings else reader.linear(spec.names.lm_head),
        rope=Rope(spec.rope, spec.head_dim, device),
        attention=PagedAttention(spec),
    )


def random_transformer(spec: DecoderSpec, seed: int, dtype: torch.dtype) -> Transformer:
    """A model of the right size that says nothing sensible, for benchmarks."""
    return build_transformer(spec, RandomWeights(spec, seed), dtype)


def weight_shapes(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every weight that the spec needs."""
    names, hidden = spec.names, spec.hidden_size
    yield f"{names.embedding}.weight", (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        for name, shape in _layer_shapes(spec):
            yield names.layer.format(layer=index) + name, shape
    yield f"{names.final_norm}.weight", (hidden,)
    if not spec.has_tied_embeddings:
        yield f"{names.lm_head}.weight", (spec.vocab_size, hidden)


def _layer_shapes(spec: DecoderSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    names, hidden, inner = spec.names, spec.hidden_size, spec.intermediate_size
    norms = {names.input_norm: hidden, names.mlp_norm: hidden}
    if spec.has_qk_norm:
        norms |= {names.q_norm: spec.head_dim, names.k_norm: spec.head_dim}
    for name, size in norms.items():
        yield f"{name}.weight", (size,)
    q, k, v = names.qkv
    for name, num_out, num_in, has_bias in (
        (q, spec.q_size, hidden, spec.has_qkv_bias),
        (k, spec.kv_size, hidden, spec.has_qkv_bias),
        (v, spec.kv_size, hidden, spec.has_qkv_bias),
        (names.o, hidden, spec.q_size, spec.has_o_bias),
        *((name, inner, hidden, spec.has_mlp_bias) for name in names.gate_up),
        (names.down, hidden, inner, spec.has_mlp_bias),
    ):
        yield f"{name}.weight", (num_out, num_in)
        if has_bias:
            yield f"{name}.bias", (num_out,)


def _layer(spec: DecoderSpec, prefix: str, reader: "_Reader") -> DecoderLayer:
    names, eps = spec.names, spec.norm_eps
    return DecoderLayer(
        input_norm=reader.norm(prefix + names.input_norm, eps),
        qkv=reader.linear(*(prefix + name for name in names.qkv)),
        q_norm=reader.norm(prefix + names.q_norm, eps) if spec.has_qk_norm else None,
        k_norm=reader.norm(prefix + names.k_norm, eps) if spec.has_qk_norm else None,
        o=reader.linear(prefix + names.o),
        mlp_norm=reader.norm(prefix + names.mlp_norm, eps),
        mlp=GatedMlp(
            reader.linear(*(prefix + name for name in names.gate_up)), reader.linear(prefix + names.down)
        ),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads weights into the dtype, onto the device and into the layers they belong to."""

    weights: Weights
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device

    def matrix(self, *names: str) -> Tensor:
        """One tensor of the rows of all ``names``, one after the other."""
        shapes = [self.shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        fused = torch.empty((rows, *shapes[0][1:]), dtype=self.dtype, device=self.device)
        for part, name in zip(fused.split([shape[0] for shape in shapes]), names, strict=True):
            part.copy_(self._read(name))
        return fused

    def linear(self, *names: str) -> Linear:
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in self.shapes]
        return Linear(self.matrix(*(f"{name}.weight" for name in names)), self.matrix(*biases) if biases else None)

    def norm(self, name: str, eps: float) -> RmsNorm:
        return RmsNorm(self.matrix(f"{name}.weight"), eps)

    def _read(self, name: str) -> Tensor:
        weight = self.weights.get(name)
        if weight.shape != self.shapes[name]:
            raise ValueError(f"weight {name} has shape {tuple(weight.shape)}, the config says {self.shapes[name]}")
        return weight


class RandomWeights:
    """`Weights` drawn anew at each reading: norms are ones, all else has variance ``1 / fan-in``."""

    def __init__(self, spec: DecoderSpec, seed: int) -> None:
        self._shapes = dict(weight_shapes(spec))
        self._generator = torch.Generator().manual_seed(seed)

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def get(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape) if name.endswith(".weight") else torch.zeros(shape)
        weight: Tensor = torch.randn(shape, generator=self._generator) / prod(shape[1:]) ** 0.5
        return weight
