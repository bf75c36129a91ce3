"""A GGUF file's metadata as the Hugging Face ``config.json`` of the same model.

Sources: llama.cpp's gguf-py/gguf/constants.py for the keys of GGUF, the configuration classes of Transformers for
those of Hugging Face. Covered are the dense architectures ``llama`` (Mistral's models are stored as such),
``qwen2`` and ``qwen3``.
"""

import struct

from .gguf_header import Buffer, GgufHeader, MalformedGguf

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}

_GGML_F32 = 0
_COPIED = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
_SPECIAL_IDS = {
    "tokenizer.ggml.bos_token_id": "bos_token_id",
    "tokenizer.ggml.eos_token_id": "eos_token_id",
    "tokenizer.ggml.padding_token_id": "pad_token_id",
}
_YARN = {
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
    "rope.scaling.yarn_beta_fast": "beta_fast",
    "rope.scaling.yarn_beta_slow": "beta_slow",
}


def hf_config(header: GgufHeader, data: Buffer) -> dict[str, object]:
    """The model's config; ``data`` is the whole file, of which only the rope factors are read.

    Raises `MalformedGguf` for another architecture, for experts, and where a key is missing.
    """
    model = _Model(header)
    config: dict[str, object] = {"architectures": [ARCHITECTURES[model.architecture]], "model_type": model.architecture}
    config |= {to: model.require(key) for key, to in _COPIED.items()}
    config |= {to: header.metadata[key] for key, to in _SPECIAL_IDS.items() if key in header.metadata}
    config |= {
        "num_key_value_heads": model.get("attention.head_count_kv", config["num_attention_heads"]),
        "head_dim": model.head_dim(),
        "vocab_size": model.vocab_size(),
        "hidden_act": "silu",
        "rope_theta": model.get("rope.freq_base", 10000.0),
        "rope_scaling": model.rope_scaling(data),
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
    }
    return config


class _Model:
    """The metadata of the file's architecture, whose keys begin with its name."""

    def __init__(self, header: GgufHeader) -> None:
        self._header = header
        self.architecture = str(header.metadata.get("general.architecture"))
        if self.architecture not in ARCHITECTURES:
            raise MalformedGguf(f"architecture {self.architecture!r} is not one of {sorted(ARCHITECTURES)}")
        if self.get("expert_count", 0):
            raise MalformedGguf("models with experts are not read from GGUF")

    def get(self, key: str, default: object) -> object:
        return self._header.metadata.get(f"{self.architecture}.{key}", default)

    def require(self, key: str) -> int | float:
        value = self.get(key, None)
        if not isinstance(value, int | float):
            raise MalformedGguf(f"metadata key {self.architecture}.{key} is {value!r}, a number is needed")
        return value

    def vocab_size(self) -> int:
        if "token_embd.weight" not in self._header.tensors:
            raise MalformedGguf("there is no tensor token_embd.weight (a later part of a split file?)")
        return self._header.tensors["token_embd.weight"].shape[0]

    def head_dim(self) -> object:
        """Older files of Llama say it only as the number of rotated dimensions, which is all of them."""
        default = int(self.require("embedding_length")) // int(self.require("attention.head_count"))
        rotated = self.get("rope.dimension_count", default) if self.architecture == "llama" else default
        return self.get("attention.key_length", rotated)

    def rope_scaling(self, data: Buffer) -> dict[str, object] | None:
        """``frequency_factors`` are what converters make of Llama 3's scaling: each frequency's divisor."""
        if "rope_freqs.weight" in self._header.tensors:
            return {"rope_type": "frequency_factors", "frequency_factors": self._rope_factors(data)}
        match self.get("rope.scaling.type", "none"):
            case "none":
                return None
            case "linear":
                return {"rope_type": "linear", "factor": self.require("rope.scaling.factor")}
            case "yarn":
                known = {to: self.get(key, None) for key, to in _YARN.items()}
                return {"rope_type": "yarn"} | {key: value for key, value in known.items() if value is not None}
            case other:
                raise MalformedGguf(f"rope scaling {other!r} is not one of none, linear, yarn")

    def _rope_factors(self, data: Buffer) -> list[float]:
        tensor = self._header.tensors["rope_freqs.weight"]
        count = tensor.shape[0]
        if tensor.ggml_type != _GGML_F32 or tensor.start + 4 * count > len(data):
            raise MalformedGguf("rope_freqs.weight is not float32, or cut off")
        return list(struct.unpack_from(f"<{count}f", data, tensor.start))
