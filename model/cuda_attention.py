"""Attention on a GPU over paged KV: decode rows first in a step, prompts behind them, each with a kernel of its own."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.norm_rope import norm_rope_store
from ..kernels.paged_attention import decode_attention, prefill_attention
from ..kernels.split_context import DecodeWorkspace, decode_workspace, plan_decode
from .attention import StepAttention
from .kv_tensors import KvTensors
from .layers import DecoderLayer
from .rope import Rope
from .spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class DeviceDecodes:
    """The first rows of a step: ``lengths int32 [n]`` (0: padding), ``tables int32 [n, max_blocks]``."""

    lengths: Tensor
    tables: Tensor


@dataclass(frozen=True, slots=True)
class DevicePrompts:
    """The rows behind: ``query_starts int32 [n + 1]``, ``starts int32 [n]``, ``tables int32 [n, max_blocks]``."""

    query_starts: Tensor
    starts: Tensor
    tables: Tensor


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A step's rows on the device, int32 all: ``token_ids, positions, slots [num_tokens]``, ``outputs [num_outputs]``."""

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    decodes: DeviceDecodes | None
    prompts: DevicePrompts | None
    outputs: Tensor | None


@dataclass(frozen=True, slots=True)
class RotationTable:
    """``cos, sin float32 [max_positions, head_dim / 2]``; every position has the same angles in every request."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, rope: Rope, max_positions: int) -> "RotationTable":
        rows = rope.rows(torch.arange(max_positions, device=rope.exponents.device))
        half = rows.cos.shape[-1] // 2
        return cls(rows.cos[:, 0, :half].contiguous(), rows.sin[:, 0, half:].contiguous())


class CudaAttention:
    """`AttentionBackend` of a GPU."""

    def __init__(self, spec: DecoderSpec, rotations: RotationTable, max_decodes: int, num_programs: int | None = None) -> None:
        """``num_programs``: see `decode_workspace`."""
        self.spec = spec
        self.rotations = rotations
        heads = (spec.num_heads, spec.num_kv_heads, spec.head_dim)
        self._workspaces = {
            window or 0: decode_workspace(max_decodes, *heads, rotations.cos.device, num_programs=num_programs)
            for window in set(spec.windows)
        }

    def plan(self, batch: DeviceBatch, kv: KvTensors) -> StepAttention:
        if batch.decodes is not None:
            for window, workspace in self._workspaces.items():
                plan_decode(batch.decodes.lengths, workspace, window)
        return _CudaStep(self.spec, self.rotations, self._workspaces, batch, kv)


@dataclass(frozen=True, slots=True)
class _CudaStep:
    spec: DecoderSpec
    rotations: RotationTable
    workspaces: dict[int, DecodeWorkspace]
    batch: DeviceBatch
    kv: KvTensors

    def __call__(self, index: int, layer: DecoderLayer, qkv: Tensor) -> Tensor:
        spec, kv, window = self.spec, self.kv.layers[index], self.spec.windows[index] or 0
        self._store(layer, qkv, kv)
        q = qkv.view(len(qkv), -1, spec.head_dim)[:, : spec.num_heads]
        out = qkv.new_empty(len(qkv), spec.num_heads, spec.head_dim)
        num_decodes = 0
        if decodes := self.batch.decodes:
            num_decodes = len(decodes.lengths)
            decode_attention(
                q[:num_decodes], kv, decodes.tables, decodes.lengths, out[:num_decodes], self.workspaces[window],
                spec.attention_scale, window,
            )  # fmt: skip
        if prompts := self.batch.prompts:
            prefill_attention(
                q[num_decodes:], kv, prompts.query_starts, prompts.starts, prompts.tables, out[num_decodes:],
                spec.attention_scale, window,
            )  # fmt: skip
        return out.view(len(qkv), -1)

    def _store(self, layer: DecoderLayer, qkv: Tensor, kv: Tensor) -> None:
        q_norm, k_norm, table = layer.q_norm, layer.k_norm, self.rotations
        norm_rope_store(
            qkv, kv, table.cos, table.sin, self.batch.positions, self.batch.slots, self.spec.num_heads,
            q_norm.weight if q_norm else None, k_norm.weight if k_norm else None, q_norm.eps if q_norm else 0.0,
        )  # fmt: skip
