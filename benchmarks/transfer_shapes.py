"""Models whose KV is moved, and how much of it: what the parts of the transfer benchmark have in common."""

import json
from dataclasses import dataclass
from pathlib import Path

from crossdock.benchmarks.gpu_shapes import CONFIGS
from crossdock.core.kv_layout import KvLayout
from crossdock.model.families import decoder_spec

BLOCK_SIZE = 16


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, inner: int, vocab: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "intermediate_size": inner,
        "vocab_size": vocab,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 32768,
        "dtype": "float32",
    }


SHAPES: dict[str, dict[str, object]] = {
    "small": _llama(64, 4, 4, 2, 128, 320),
    "demo": _llama(576, 30, 9, 3, 1536, 49152),
    "llama-8b": CONFIGS["llama-8b"],
}


def layout_of(shape: str) -> KvLayout:
    spec = decoder_spec(SHAPES[shape])
    return KvLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, BLOCK_SIZE, spec.dtype)


def write_model(shape: str, folder: Path) -> Path:
    """A folder that is enough for workers that draw their weights."""
    (folder / "config.json").write_text(json.dumps(SHAPES[shape]))
    return folder


@dataclass(frozen=True, slots=True)
class Work:
    """``num_at_once`` prompts of ``num_tokens``."""

    num_tokens: int
    num_at_once: int

    @property
    def total_tokens(self) -> int:
        return self.num_tokens * self.num_at_once

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // BLOCK_SIZE) * self.num_at_once
