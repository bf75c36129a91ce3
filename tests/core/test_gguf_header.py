"""The header of GGUF files, and the config made of it."""

import struct
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.core.gguf_config import hf_config
from crossdock.core.gguf_header import GgufTensor, MalformedGguf, read_header


def gguf_bytes(
    folder: Path,
    architecture: str = "llama",
    tensors: dict[str, tuple[int, ...]] | None = None,
    changed: dict[str, object] | None = None,
) -> bytes:
    """A file with the keys of a tiny model and tensors of counted-up values; a key changed to ``None`` is left out."""
    writer = GGUFWriter(folder / "tiny.gguf", architecture)
    keys: dict[str, object] = {
        "context_length": 512,
        "block_count": 2,
        "embedding_length": 64,
        "feed_forward_length": 96,
        "attention.head_count": 4,
        "attention.head_count_kv": 2,
        "attention.layer_norm_rms_epsilon": 0.5,
    } | (changed or {})
    for key, value in keys.items():
        if isinstance(value, str):
            writer.add_string(f"{architecture}.{key}", value)
        elif isinstance(value, float):
            writer.add_float32(f"{architecture}.{key}", value)
        elif isinstance(value, int):
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_eos_token_id(7)
    writer.add_token_list(["a", "é", "<|end|>"])
    writer.add_bool("tokenizer.ggml.add_bos_token", False)
    for name, shape in ({"token_embd.weight": (320, 64)} | (tensors or {})).items():
        writer.add_tensor(name, np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return (folder / "tiny.gguf").read_bytes()


def config_of(data: bytes) -> dict[str, object]:
    return hf_config(read_header(data), data)


def test_metadata_become_plain_values(tmp_path: Path) -> None:
    metadata = read_header(gguf_bytes(tmp_path)).metadata
    assert metadata == {
        "general.architecture": "llama",
        "llama.context_length": 512,
        "llama.block_count": 2,
        "llama.embedding_length": 64,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 0.5,
        "tokenizer.ggml.eos_token_id": 7,
        "tokenizer.ggml.tokens": ["a", "é", "<|end|>"],
        "tokenizer.ggml.add_bos_token": False,
    }


def test_tensors_lie_where_the_header_says(tmp_path: Path) -> None:
    data = gguf_bytes(tmp_path, tensors={"output.weight": (3, 5)})
    tensors = read_header(data).tensors
    start = tensors["token_embd.weight"].start
    assert tensors == {
        "token_embd.weight": GgufTensor((320, 64), 0, start),
        "output.weight": GgufTensor((3, 5), 0, start + 4 * 320 * 64),
    }
    assert start % 32 == 0
    assert struct.unpack_from("<15f", data, tensors["output.weight"].start) == tuple(range(1, 16))


def test_config_has_hugging_faces_keys(tmp_path: Path) -> None:
    assert config_of(gguf_bytes(tmp_path)) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 512,
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 320,
        "rms_norm_eps": 0.5,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "eos_token_id": 7,
    }


def test_embeddings_are_tied_only_without_an_output_tensor(tmp_path: Path) -> None:
    assert config_of(gguf_bytes(tmp_path, tensors={"output.weight": (320, 64)}))["tie_word_embeddings"] is False


@pytest.mark.parametrize(
    ("architecture", "changed", "head_dim"),
    [
        ("llama", {"rope.dimension_count": 32}, 32),
        ("llama", {"rope.dimension_count": 32, "attention.key_length": 8}, 8),
        ("qwen2", {"rope.dimension_count": 32}, 16),
        ("qwen3", {"attention.key_length": 128}, 128),
    ],
)
def test_head_dim_is_found_where_the_architecture_keeps_it(
    tmp_path: Path, architecture: str, changed: dict[str, object], head_dim: int
) -> None:
    assert config_of(gguf_bytes(tmp_path, architecture, changed=changed))["head_dim"] == head_dim


def test_llama3_rope_factors_are_explicit(tmp_path: Path) -> None:
    config = config_of(gguf_bytes(tmp_path, tensors={"rope_freqs.weight": (8,)}))
    assert config["rope_scaling"] == {
        "rope_type": "frequency_factors",
        "frequency_factors": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0],
    }


@pytest.mark.parametrize(
    ("changed", "scaling"),
    [
        ({"rope.scaling.type": "none"}, None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rope_scaling_is_translated(tmp_path: Path, changed: dict[str, object], scaling: object) -> None:
    assert config_of(gguf_bytes(tmp_path, changed=changed))["rope_scaling"] == scaling


@pytest.mark.parametrize(
    ("architecture", "changed", "message"),
    [
        ("gemma3", {}, "architecture 'gemma3' is not one of"),
        ("llama", {"expert_count": 8}, "experts"),
        ("llama", {"block_count": None}, r"llama\.block_count is None"),
        ("llama", {"rope.scaling.type": "longrope"}, "rope scaling 'longrope'"),
    ],
)
def test_what_is_not_understood_is_refused(
    tmp_path: Path, architecture: str, changed: dict[str, object], message: str
) -> None:
    data = gguf_bytes(tmp_path, architecture, changed=changed)
    with pytest.raises(MalformedGguf, match=message):
        config_of(data)


@settings(max_examples=200, deadline=None)
@given(keep=st.floats(0, 1), flipped=st.integers(4, 500), bits=st.integers(1, 255))
def test_a_damaged_header_is_an_error_or_a_header_but_never_a_crash(
    tmp_path_factory: pytest.TempPathFactory, keep: float, flipped: int, bits: int
) -> None:
    data = bytearray(gguf_bytes(tmp_path_factory.mktemp("gguf"), tensors={"output.weight": (3, 5)})[:800])
    data[flipped] ^= bits
    for damaged in (bytes(data), bytes(data[: int(keep * len(data))])):
        with suppress(MalformedGguf):
            read_header(damaged)
