"""Attention on a GPU over paged KV: decode rows first in a step, prompts behind them, each with a kernel of its own."""

from collections.abc import Mapping
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
from .step_shapes import FEW_PROMPTS, SHORT_PROMPT


@dataclass(frozen=True, slots=True)
class DeviceDecodes:
    """The first rows of a step: ``lengths int32 [n]`` (0: padding), ``tables int32 [n, max_blocks]``."""

    lengths: Tensor
    tables: Tensor


@dataclass(frozen=True, slots=True)
class DevicePrompts:
    """The rows behind: ``query_starts int32 [n + 1]``, ``starts, lengths int32 [n]``, ``tables int32 [n, max_blocks]``.

    ``is_short``: none is longer than `SHORT_PROMPT` tokens.
    """

    query_starts: Tensor
    starts: Tensor
    lengths: Tensor
    tables: Tensor
    is_short: bool


@dataclass(frozen=True, slots=True)
class DeviceBatch:
    """A step's rows on the device, int32: ``token_ids, positions, slots [num_tokens]``, ``outputs [num_outputs]``."""

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

    def __init__(
        self, spec: DecoderSpec, rotations: RotationTable, max_decodes: int, num_programs: int | None = None
    ) -> None:
        """``num_programs``: see `split_context`."""

        def workspace(max_rows: int, max_queries: int) -> DecodeWorkspace:
            heads, device = (spec.num_heads, spec.num_kv_heads, spec.head_dim), rotations.cos.device
            return decode_workspace(max_rows, *heads, device, max_queries, num_programs)

        windows = {window or 0 for window in spec.windows}
        self._decodes = {window: workspace(max_decodes, 1) for window in windows}
        self._shorts = {window: workspace(FEW_PROMPTS, SHORT_PROMPT) for window in windows}
        self._spec = spec
        self._rotations = rotations

    def plan(self, batch: DeviceBatch, kv: KvTensors) -> StepAttention:
        if batch.decodes is not None:
            for window, workspace in self._decodes.items():
                plan_decode(batch.decodes.lengths, workspace, window)
        if batch.prompts is not None and batch.prompts.is_short:
            for window, workspace in self._shorts.items():
                plan_decode(batch.prompts.lengths, workspace, window)
        return _CudaStep(self._spec, self._rotations, self._decodes, self._shorts, batch, kv)


@dataclass(frozen=True, slots=True)
class _CudaStep:
    spec: DecoderSpec
    rotations: RotationTable
    decode_workspaces: Mapping[int, DecodeWorkspace]
    short_workspaces: Mapping[int, DecodeWorkspace]
    batch: DeviceBatch
    kv: KvTensors

    def __call__(self, index: int, layer: DecoderLayer, qkv: Tensor) -> Tensor:
        spec, kv, window = self.spec, self.kv.layers[index], self.spec.windows[index] or 0
        self._store(layer, qkv, kv)
        q = qkv.view(len(qkv), -1, spec.head_dim)[:, : spec.num_heads]
        out = qkv.new_empty(len(qkv), spec.num_heads, spec.head_dim)
        first = 0
        if decodes := self.batch.decodes:
            first = len(decodes.lengths)
            decode_attention(
                q[:first], kv, decodes.tables, decodes.lengths, out[:first],
                self.decode_workspaces[window], spec.attention_scale, window,
            )  # fmt: skip
        if prompts := self.batch.prompts:
            self._attend_prompts(prompts, q[first:], kv, out[first:], window)
        return out.view(len(qkv), -1)

    def _attend_prompts(self, prompts: DevicePrompts, q: Tensor, kv: Tensor, out: Tensor, window: int) -> None:
        query_starts, scale = prompts.query_starts, self.spec.attention_scale
        if prompts.is_short:
            workspace = self.short_workspaces[window]
            decode_attention(q, kv, prompts.tables, prompts.lengths, out, workspace, scale, window, 0.0, query_starts)
        else:
            prefill_attention(q, kv, query_starts, prompts.starts, prompts.tables, out, scale, window)

    def _store(self, layer: DecoderLayer, qkv: Tensor, kv: Tensor) -> None:
        q_norm, k_norm, table = layer.q_norm, layer.k_norm, self.rotations
        norm_rope_store(
            qkv, kv, table.cos, table.sin, self.batch.positions, self.batch.slots, self.spec.num_heads,
            q_norm.weight if q_norm else None, k_norm.weight if k_norm else None, q_norm.eps if q_norm else 0.0,
        )  # fmt: skip
