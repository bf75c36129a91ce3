"""The seam between the network and the kernel that reads the paged KV: plan once a step, run once a layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from ..kernels import reference
from .batch import Batch, PromptSpan
from .kv_tensors import KvTensors
from .layers import DecoderLayer
from .rope import Rope, RopeRows
from .spec import DecoderSpec

StepBatch = TypeVar("StepBatch", contravariant=True)


class StepAttention(Protocol):
    """Attention of one step; made for its batch, called by every layer in turn."""

    def __call__(self, index: int, layer: DecoderLayer, qkv: Tensor) -> Tensor:
        """Norm (where the layer has one) and rotate queries and keys, store the KV, and attend.

        ``qkv [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]``, as projected, and not to be used afterwards
        -> ``[num_tokens, num_heads * head_dim]``.
        """


class AttentionBackend(Protocol[StepBatch]):
    """One a kind of device; ``StepBatch`` is what it wants to know of a step."""

    def plan(self, batch: StepBatch, kv: KvTensors) -> StepAttention:
        """Everything that all layers share: rotations, index tensors, masks, work lists."""


@dataclass(frozen=True, slots=True)
class PagedAttention:
    """`AttentionBackend` over the kernels in plain torch."""

    spec: DecoderSpec
    rope: Rope

    def plan(self, batch: Batch, kv: KvTensors) -> StepAttention:
        rows = reference.store_rows(batch.slots, kv.layers[0])
        plans = {window: _plan(batch, kv.layers[0], window) for window in set(self.spec.windows)}
        return _PagedStep(self.spec, kv, rows, self.rope.rows(batch.positions), plans)


@dataclass(frozen=True, slots=True)
class _PromptRows:
    first: int
    end: int
    plan: reference.PromptPlan


@dataclass(frozen=True, slots=True)
class _WindowPlan:
    """The work of a layer with one kind of window."""

    decodes: tuple[reference.DecodePlan, ...]
    prompts: tuple[_PromptRows, ...]


def _plan(batch: Batch, kv: Tensor, window: int | None) -> _WindowPlan:
    def prompt(span: PromptSpan) -> _PromptRows:
        plan = reference.plan_prompt(span.start, span.num_tokens, span.blocks, kv, window)
        return _PromptRows(span.first_row, span.first_row + span.num_tokens, plan)

    decodes = reference.plan_decodes(batch.decodes.lengths, batch.decodes.block_table, kv, window)
    return _WindowPlan(tuple(decodes), tuple(prompt(span) for span in batch.prompts))


@dataclass(frozen=True, slots=True)
class _PagedStep:
    spec: DecoderSpec
    kv: KvTensors
    rows: Tensor
    rotations: RopeRows
    plans: Mapping[int | None, _WindowPlan]

    def __call__(self, index: int, layer: DecoderLayer, qkv: Tensor) -> Tensor:
        kv, plan, num_heads = self.kv.layers[index], self.plans[self.spec.windows[index]], self.spec.num_heads
        qkv = qkv.view(len(qkv), -1, self.spec.head_dim)
        self._norm_and_rotate(layer, qkv)
        reference.kv_store(kv, self.rows, qkv[:, num_heads:])
        outputs = [self._decode(qkv, kv, decode) for decode in plan.decodes]
        outputs += [self._prompt(qkv, kv, prompt) for prompt in plan.prompts]
        out = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return out.reshape(len(qkv), -1)

    def _norm_and_rotate(self, layer: DecoderLayer, qkv: Tensor) -> None:
        num_heads, num_rotated = self.spec.num_heads, self.spec.num_heads + self.spec.num_kv_heads
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv[:, :num_heads] = layer.q_norm(qkv[:, :num_heads])
            qkv[:, num_heads:num_rotated] = layer.k_norm(qkv[:, num_heads:num_rotated])
        reference.rope_(qkv[:, :num_rotated], self.rotations.cos, self.rotations.sin)

    def _decode(self, qkv: Tensor, kv: Tensor, plan: reference.DecodePlan) -> Tensor:
        q = qkv[plan.first : plan.end, : self.spec.num_heads]
        return reference.paged_decode_attention(q, kv, plan, self.spec.attention_scale)

    def _prompt(self, qkv: Tensor, kv: Tensor, rows: _PromptRows) -> Tensor:
        q = qkv[rows.first : rows.end, : self.spec.num_heads]
        return reference.paged_prompt_attention(q, kv, rows.plan, self.spec.attention_scale)
