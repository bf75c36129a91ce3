"""Attention on a GPU over paged KV: decode rows first in a step, prompts behind them, each with a kernel of its own."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..kernels.norm_rope import norm_rope_store
from ..kernels.paged_attention import decode_attention, prefill_attention
from ..kernels.split_context import DecodeWorkspace, decode_workspace, plan_decode
from .attention import StepAttention
from .kv_tensors import KvTensors
from .layers import DecoderLayer
from .rope import Rope
from .spec import DecoderSpec
from .step_shapes import MAX_SHORT_PROMPTS, SHORT_PROMPT

WHOLE_PROMPT_STEP = 4096


@dataclass(frozen=True, slots=True)
class DeviceDecodes:
    """The first rows of a step: ``lengths int32 [n]`` (0: padding), ``tables int32 [n, max_blocks]``."""

    lengths: Tensor
    tables: Tensor


@dataclass(frozen=True, slots=True)
class DevicePrompts:
    """The rows behind: ``query_starts int32 [n + 1]``, ``starts, lengths int32 [n]``, ``tables int32 [n, max_blocks]``.

    The host knows whether all are at most `SHORT_PROMPT` tokens, and their positions unless they are replayed.
    """

    query_starts: Tensor
    starts: Tensor
    lengths: Tensor
    tables: Tensor
    is_short: bool
    spans: tuple[range, ...]


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

    def __init__(
        self, spec: DecoderSpec, rotations: RotationTable, max_decodes: int, num_programs: int | None = None
    ) -> None:
        """``num_programs``: see `split_context`."""

        def workspace(max_rows: int, max_queries: int) -> DecodeWorkspace:
            heads, device = (spec.num_heads, spec.num_kv_heads, spec.head_dim), rotations.cos.device
            return decode_workspace(max_rows, *heads, device, max_queries, num_programs)

        windows = {window or 0 for window in spec.windows}
        self._decodes = {window: workspace(max_decodes, 1) for window in windows}
        self._shorts = {window: workspace(MAX_SHORT_PROMPTS, SHORT_PROMPT) for window in windows}
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
        heads = qkv.view(len(qkv), -1, spec.head_dim)
        out = qkv.new_empty(len(qkv), spec.num_heads, spec.head_dim)
        first = 0
        if decodes := self.batch.decodes:
            first = len(decodes.lengths)
            decode_attention(
                heads[:first, : spec.num_heads], kv, decodes.tables, decodes.lengths, out[:first],
                self.decode_workspaces[window], spec.attention_scale, window,
            )  # fmt: skip
        if prompts := self.batch.prompts:
            self._attend_prompts(prompts, heads[first:], kv, out[first:], window)
        return out.view(len(qkv), -1)

    def _attend_prompts(self, prompts: DevicePrompts, heads: Tensor, kv: Tensor, out: Tensor, window: int) -> None:
        q, scale = heads[:, : self.spec.num_heads], self.spec.attention_scale
        if prompts.is_short:
            workspace, starts = self.short_workspaces[window], prompts.query_starts
            decode_attention(q, kv, prompts.tables, prompts.lengths, out, workspace, scale, window, 0.0, starts)
        elif is_whole_prompt(prompts.spans, heads.dtype, window):
            attend_whole_prompt(heads, out, self.spec.num_heads, scale)
        else:
            starts = (prompts.query_starts, prompts.starts)
            prefill_attention(q, kv, *starts, prompts.tables, out, scale, window)

    def _store(self, layer: DecoderLayer, qkv: Tensor, kv: Tensor) -> None:
        q_norm, k_norm, table = layer.q_norm, layer.k_norm, self.rotations
        norm_rope_store(
            qkv, kv, table.cos, table.sin, self.batch.positions, self.batch.slots, self.spec.num_heads,
            q_norm.weight if q_norm else None, k_norm.weight if k_norm else None, q_norm.eps if q_norm else 0.0,
        )  # fmt: skip


def is_whole_prompt(spans: tuple[range, ...], dtype: torch.dtype, window: int) -> bool:
    """Whether cuDNN attends to these prompts, faster than our kernel does: one long prompt from its beginning on.

    It makes a plan for every length, which takes longer than it gains, so lengths are few.
    """
    if len(spans) != 1 or window or dtype not in (torch.float16, torch.bfloat16):
        return False
    return spans[0].start == 0 and len(spans[0]) % WHOLE_PROMPT_STEP == 0


def attend_whole_prompt(heads: Tensor, out: Tensor, num_heads: int, scale: float) -> None:
    """``heads [num_tokens, num_heads + 2 * num_kv_heads, head_dim]`` -> ``out [num_tokens, num_heads, head_dim]``."""
    num_kv_heads = (heads.shape[1] - num_heads) // 2
    q, k, v = (x.transpose(0, 1)[None] for x in heads.split([num_heads, num_kv_heads, num_kv_heads], 1))
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    out.copy_(attended[0].transpose(0, 1))
