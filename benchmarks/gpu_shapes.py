"""Models to measure by their shape alone, and the least time that a chip needs for their work.

Ceilings were measured on an H200: bytes read and written by a device copy, a large bf16 product of random matrices.
"""

from dataclasses import dataclass

from crossdock.model.families import decoder_spec
from crossdock.model.spec import DecoderSpec

COPY_BYTES_PER_SECOND = 4.25e12
FLOPS_PER_SECOND = 793e12
BYTES = 2
"""Of a weight or a KV element in bfloat16."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(
    hidden: int, layers: int, heads: int, inner: int, is_tied: bool = False, head_dim: int = 128
) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": head_dim,
        "intermediate_size": inner,
        "vocab_size": 128256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3_ROPE,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": is_tied,
        "dtype": "bfloat16",
    }


QWEN3_8B: dict[str, object] = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "max_position_embeddings": 40960,
    "dtype": "bfloat16",
}

CONFIGS: dict[str, dict[str, object]] = {
    "llama-8b": _llama(4096, 32, 32, 14336),
    "qwen3-8b": QWEN3_8B,
    "llama-1b": _llama(2048, 16, 32, 8192, is_tied=True, head_dim=64),
    "llama-70b-slice": _llama(8192, 8, 64, 28672),
}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What follows from a spec."""

    spec: DecoderSpec

    @classmethod
    def named(cls, name: str) -> "ModelShape":
        return cls(decoder_spec(CONFIGS[name]))

    @property
    def layer_weights(self) -> int:
        """Elements of all matrices of all layers."""
        s = self.spec
        attention = s.hidden_size * (2 * s.q_size + 2 * s.kv_size)
        return s.num_layers * (attention + 3 * s.hidden_size * s.intermediate_size)

    @property
    def head_weights(self) -> int:
        return self.spec.vocab_size * self.spec.hidden_size

    @property
    def kv_bytes(self) -> int:
        """Of a token."""
        return 2 * self.spec.num_layers * self.spec.kv_size * BYTES

    def decode_floor(self, batch: int, context: int) -> float:
        """Seconds of a step: weights read once or multiplied, KV read once."""
        weights = self.layer_weights + self.head_weights
        products = max(weights * BYTES / COPY_BYTES_PER_SECOND, batch * 2 * weights / FLOPS_PER_SECOND)
        return products + batch * context * self.kv_bytes / COPY_BYTES_PER_SECOND

    def prefill_floor(self, num_tokens: int, num_cached: int = 0) -> float:
        """Seconds of one prompt of ``num_tokens``, the first ``num_cached`` of them known, and of its first token."""
        new = num_tokens - num_cached
        mean_context = (num_cached + num_tokens) / 2
        attention = 4 * self.spec.num_layers * self.spec.q_size * mean_context
        arithmetic = (new * (2 * self.layer_weights + attention) + 2 * self.head_weights) / FLOPS_PER_SECOND
        traffic = (self.layer_weights + self.head_weights) * BYTES + num_tokens * self.kv_bytes
        return max(arithmetic, traffic / COPY_BYTES_PER_SECOND)
