"""From a checkpoint to a `Transformer`, one tensor at a time, so that memory peaks near the weights' own size."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypedDict

import torch
from torch import Tensor

from .attention import AttentionBackend, PagedAttention
from .batch import Batch
from .layers import Affine, CpuLayers, DecoderLayer, Linear, Mlp, ResidualLinear, RmsNorm
from .rope import Rope
from .spec import DecoderSpec
from .transformer import B, Transformer

CPU = torch.device("cpu")


class Weights(Protocol):
    """A checkpoint's tensors, by the names and in the shapes that Transformers gives them."""

    def names(self) -> Collection[str]: ...

    def get(self, name: str) -> Tensor: ...


class LayerKinds(Protocol):
    """Which classes the layers of a device are made of."""

    def normed_linear(self, norm: RmsNorm, affine: Affine) -> Linear:
        """Reads the residual stream: ``linear(norm(x))``."""

    def residual_linear(self, affine: Affine) -> ResidualLinear: ...

    def mlp(self, norm: RmsNorm, gate_up: Affine, down: Affine) -> Mlp: ...


def build_transformer(
    spec: DecoderSpec,
    weights: Weights,
    dtype: torch.dtype,
    on_progress: Callable[[int, int], None] | None = None,
) -> Transformer[Batch]:
    """A model for the CPU; see `assemble`."""
    attention = PagedAttention(spec, Rope(spec.rope, spec.head_dim, CPU))
    return assemble(spec, weights, dtype, CPU, CpuLayers(), attention, on_progress)


def assemble(
    spec: DecoderSpec,
    weights: Weights,
    dtype: torch.dtype,
    device: torch.device,
    kinds: LayerKinds,
    attention: AttentionBackend[B],
    on_progress: Callable[[int, int], None] | None = None,
) -> Transformer[B]:
    """Raises ``ValueError`` naming the weights that are missing or have another shape than the spec says.

    With tied embeddings an output head in the checkpoint is ignored, as Transformers does. ``on_progress(done,
    total)`` counts layers.
    """
    shapes = dict(weight_shapes(spec))
    missing = [name for name in shapes if name not in weights.names()]
    if missing:
        raise ValueError(f"the checkpoint lacks {len(missing)} weights: {', '.join(missing[:8])}")
    reader = _Reader(weights, shapes, dtype, device, spec.norm_eps)
    embedding = reader.matrix(f"{spec.names.embedding}.weight")
    layers = []
    for index in range(spec.num_layers):
        layers.append(_layer(spec, index, reader, kinds))
        if on_progress is not None:
            on_progress(index + 1, spec.num_layers)
    head = Affine(embedding) if spec.has_tied_embeddings else reader.affine(spec.names.lm_head)
    final_norm = reader.norm(spec.names.final_norm)
    return Transformer(
        spec=spec,
        embedding=embedding,
        layers=tuple(layers),
        head=kinds.normed_linear(final_norm, head),
        final_norm=final_norm,
        attention=attention,
    )


def random_transformer(spec: DecoderSpec, seed: int, dtype: torch.dtype) -> Transformer[Batch]:
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


def _layer(spec: DecoderSpec, index: int, reader: "_Reader", kinds: LayerKinds) -> DecoderLayer:
    names, prefix = spec.names, spec.names.layer.format(layer=index)

    def affine(*modules: str) -> Affine:
        return reader.affine(*(prefix + module for module in modules))

    def norm(module: str) -> RmsNorm:
        return reader.norm(prefix + module)

    return DecoderLayer(
        qkv=kinds.normed_linear(norm(names.input_norm), affine(*names.qkv)),
        q_norm=norm(names.q_norm) if spec.has_qk_norm else None,
        k_norm=norm(names.k_norm) if spec.has_qk_norm else None,
        o=kinds.residual_linear(affine(names.o)),
        mlp=kinds.mlp(norm(names.mlp_norm), affine(*names.gate_up), affine(names.down)),
    )


@dataclass(frozen=True, slots=True)
class _Reader:
    """Reads weights into the dtype and onto the device."""

    weights: Weights
    shapes: Mapping[str, tuple[int, ...]]
    dtype: torch.dtype
    device: torch.device
    norm_eps: float

    def matrix(self, *names: str) -> Tensor:
        """One tensor of the rows of all ``names``, one after the other."""
        shapes = [self.shapes[name] for name in names]
        rows = sum(shape[0] for shape in shapes)
        fused = torch.empty((rows, *shapes[0][1:]), dtype=self.dtype, device=self.device)
        for part, name in zip(fused.split([shape[0] for shape in shapes]), names, strict=True):
            part.copy_(self._read(name))
        return fused

    def affine(self, *names: str) -> Affine:
        biases = [f"{name}.bias" for name in names if f"{name}.bias" in self.shapes]
        weight = self.matrix(*(f"{name}.weight" for name in names))
        return Affine(weight, self.matrix(*biases) if biases else None)

    def norm(self, name: str) -> RmsNorm:
        return RmsNorm(self.matrix(f"{name}.weight"), self.norm_eps)

    def _read(self, name: str) -> Tensor:
        weight = self.weights.get(name)
        if weight.shape != self.shapes[name]:
            raise ValueError(f"weight {name} has shape {tuple(weight.shape)}, the config says {self.shapes[name]}")
        return weight


class RandomWeights:
    """`Weights` drawn anew at each reading: norms are ones, all else has variance ``1 / fan-in``."""

    def __init__(
        self, spec: DecoderSpec, seed: int, dtype: torch.dtype = torch.float32, device: torch.device = CPU
    ) -> None:
        self._shapes = dict(weight_shapes(spec))
        self._generator = torch.Generator(device).manual_seed(seed)
        self._kind: _Kind = {"dtype": dtype, "device": device}

    def names(self) -> Collection[str]:
        return self._shapes.keys()

    def get(self, name: str) -> Tensor:
        shape = self._shapes[name]
        if len(shape) == 1:
            return torch.ones(shape, **self._kind) if name.endswith(".weight") else torch.zeros(shape, **self._kind)
        weight = torch.randn(shape, generator=self._generator, **self._kind)
        return weight.mul_(prod(shape[1:]) ** -0.5)


class _Kind(TypedDict):
    dtype: torch.dtype
    device: torch.device
