"""The decoder's forward pass, the same on every device: its layers bring the kernels."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.nn import functional

from .attention import AttentionBackend
from .kv_tensors import KvTensors
from .layers import DecoderLayer, Linear, RmsNorm
from .spec import DecoderSpec


class TokenRows(Protocol):
    """What the network itself must know of a step's batch; its attention knows more."""

    @property
    def token_ids(self) -> Tensor:
        """``[num_tokens]``."""

    @property
    def outputs(self) -> Tensor | None:
        """The rows whose output is wanted, in the order wanted; ``None`` for all as they are."""


B = TypeVar("B", bound=TokenRows)


@dataclass(frozen=True, slots=True)
class Transformer(Generic[B]):
    """``embedding [vocab_size, hidden_size]``; ``head`` norms what it reads, and holds the same numbers if tied.

    ``final_norm`` is the one within the head, for those who want hidden states and no logits.
    """

    spec: DecoderSpec
    embedding: Tensor
    layers: tuple[DecoderLayer, ...]
    head: Linear
    final_norm: RmsNorm
    attention: AttentionBackend[B]

    @torch.inference_mode()
    def forward(self, batch: B, kv: KvTensors, on_layers: Callable[[int], None] | None = None) -> Tensor:
        """Write the KV of the batch's tokens -> hidden states of the wanted rows, ``[num_outputs, hidden_size]``.

        ``on_layers(i)`` is called once layer ``i`` has written its KV. Behind the last layer's attention only what is
        wanted is computed. Rows that are to be sampled go through `logits`; the others need no more.
        """
        attend = self.attention.plan(batch, kv)
        hidden = functional.embedding(batch.token_ids, self.embedding)
        last = len(self.layers) - 1
        for index, layer in enumerate(self.layers):
            attended = attend(index, layer, layer.qkv(hidden))
            if on_layers is not None:
                on_layers(index)
            if index == last and batch.outputs is not None:
                attended, hidden = attended[batch.outputs], hidden[batch.outputs]
                if not len(hidden):
                    return hidden
            layer.o(attended, hidden)
            layer.mlp(hidden)
        return hidden

    @torch.inference_mode()
    def logits(self, hidden: Tensor) -> Tensor:
        """``hidden [n, hidden_size]``, rows of `forward` -> float32 ``[n, vocab_size]``."""
        return self.head(hidden).float()

    @torch.inference_mode()
    def normed(self, hidden: Tensor) -> Tensor:
        """``hidden [n, hidden_size]``, rows of `forward` -> behind the final norm, Transformers' last hidden state."""
        return self.final_norm(hidden)
