"""The decoder: its parameters, how they are built from a checkpoint, and the forward pass."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ..kernels import reference
from .attention import AttentionBackend, StepAttention
from .batch import Batch
from .kv_tensors import KvTensors
from .layers import GatedMlp, Linear, RmsNorm
from .rope import Rope, RopeRows
from .spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    input_norm: RmsNorm
    qkv: Linear
    q_norm: RmsNorm | None
    k_norm: RmsNorm | None
    o: Linear
    mlp_norm: RmsNorm
    mlp: GatedMlp


@dataclass(frozen=True, slots=True)
class Transformer:
    """``embedding [vocab_size, hidden_size]``; with tied embeddings ``lm_head`` is the same memory."""

    spec: DecoderSpec
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    final_norm: RmsNorm
    lm_head: Linear
    rope: Rope
    attention: AttentionBackend

    @torch.inference_mode()
    def forward(self, batch: Batch, kv: KvTensors, on_layers: Callable[[int], None] | None = None) -> Tensor:
        """Write the KV of the batch's tokens -> hidden states ``[num_tokens, hidden_size]`` in chunk order.

        ``on_layers(i)`` is called once layer ``i`` has written its KV. Rows that are to be sampled go through
        `logits`; the others need no more.
        """
        attend, rotations = self.attention.plan(batch, kv), self.rope.rows(batch.positions)
        hidden = F.embedding(batch.token_ids, self.embedding)
        for index, layer in enumerate(self.layers):
            hidden += self._attention(index, layer, hidden, rotations, attend)
            hidden += layer.mlp(layer.mlp_norm(hidden))
            if on_layers is not None:
                on_layers(index)
        return hidden if batch.chunk_order is None else hidden[batch.chunk_order]

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [n, hidden_size]``, rows of `forward` -> float32 ``[n, vocab_size]``."""
        return self.lm_head(self.final_norm(hidden)).float()

    def _attention(
        self, index: int, layer: DecoderLayer, hidden: Tensor, rotations: RopeRows, attend: StepAttention
    ) -> Tensor:
        num_heads, num_rotated = self.spec.num_heads, self.spec.num_heads + self.spec.num_kv_heads
        qkv = layer.qkv(layer.input_norm(hidden)).view(len(hidden), -1, self.spec.head_dim)
        if layer.q_norm is not None and layer.k_norm is not None:
            qkv[:, :num_heads] = layer.q_norm(qkv[:, :num_heads])
            qkv[:, num_heads:num_rotated] = layer.k_norm(qkv[:, num_heads:num_rotated])
        reference.rope_(qkv[:, :num_rotated], rotations.cos, rotations.sin)
        return layer.o(attend(index, qkv))
