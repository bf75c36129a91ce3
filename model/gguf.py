"""Checkpoints in GGUF files of Llama's kin: tensors under Hugging Face's names, in its layout, as float32.

Two things differ from Hugging Face: names, by the table of llama.cpp's gguf-py/gguf/tensor_mapping.py, and, in files of
the architecture ``llama`` only, the order of the rows of q and k (``permute`` in llama.cpp's convert_hf_to_gguf.py):
there the two halves of a head that rotate together lie interleaved.
"""

from collections.abc import Collection
from mmap import ACCESS_READ, mmap
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from torch import Tensor

from ..core.gguf_config import hf_config
from ..core.gguf_header import GgufTensor, MalformedGguf, read_header
from .weights import CheckpointError

READ_TYPES = (
    GGMLQuantizationType.F32,
    GGMLQuantizationType.F16,
    GGMLQuantizationType.BF16,
    GGMLQuantizationType.Q4_0,
    GGMLQuantizationType.Q4_1,
    GGMLQuantizationType.Q5_0,
    GGMLQuantizationType.Q5_1,
    GGMLQuantizationType.Q8_0,
    GGMLQuantizationType.Q2_K,
    GGMLQuantizationType.Q3_K,
    GGMLQuantizationType.Q4_K,
    GGMLQuantizationType.Q5_K,
    GGMLQuantizationType.Q6_K,
)

_MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_NOT_WEIGHTS = ("rope_freqs.weight",)


class GgufCheckpoint:
    """An open GGUF file. Raises `CheckpointError` for a file that is cut short or that it can't read wholly."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data = _map_file(path)
        try:
            header = read_header(self._data)
            self.config = hf_config(header, self._data)
            weights = {name: tensor for name, tensor in header.tensors.items() if name not in _NOT_WEIGHTS}
            self._tensors = {_hf_name(name): tensor for name, tensor in weights.items()}
            for name, tensor in weights.items():
                _check(name, tensor, len(self._data))
        except MalformedGguf as error:
            raise CheckpointError(f"{path}: {error}") from None
        self._num_interleaved_heads = _interleaved_heads(self.config)

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def get(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"{self._path} has no tensor {name}")
        tensor = self._tensors[name]
        stored = np.frombuffer(self._data, np.uint8, _num_bytes(tensor), tensor.start)
        values = dequantize(stored.reshape(*tensor.shape[:-1], -1), GGMLQuantizationType(tensor.ggml_type))
        projection = name.rsplit(".", 2)[-2]
        if projection in self._num_interleaved_heads:
            values = _halves_apart(values, self._num_interleaved_heads[projection])
        return torch.from_numpy(np.require(values, np.float32, ("C", "W")))

    def close(self) -> None:
        self._tensors.clear()
        self._data.close()


def _map_file(path: Path) -> mmap:
    try:
        with path.open("rb") as file:
            return mmap(file.fileno(), 0, access=ACCESS_READ)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} can't be read: {error}") from None


def _hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    match name.split("."):
        case ["blk", layer, part, kind] if part in _LAYER_NAMES:
            return f"model.layers.{layer}.{_LAYER_NAMES[part]}.{kind}"
        case [part, kind] if part in _MODEL_NAMES:
            return f"{_MODEL_NAMES[part]}.{kind}"
        case _:
            raise MalformedGguf(f"tensor {name!r} has no place in this kind of model")


def _check(name: str, tensor: GgufTensor, num_bytes: int) -> None:
    """The tensor is of a type that is read, and lies whole in the file."""
    if tensor.ggml_type not in READ_TYPES:
        raise MalformedGguf(f"tensor {name} has ggml type {_type_name(tensor.ggml_type)}, which is not read")
    block_size, _ = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.ggml_type)]
    if tensor.shape[-1] % block_size:
        raise MalformedGguf(f"tensor {name} has rows of {tensor.shape[-1]} values, no multiple of {block_size}")
    if tensor.start + _num_bytes(tensor) > num_bytes:
        raise MalformedGguf(f"tensor {name} is cut off: the file ends after {num_bytes} bytes")


def _type_name(ggml_type: int) -> str:
    known = {member.value: member.name for member in GGMLQuantizationType}
    return known.get(ggml_type, str(ggml_type))


def _num_bytes(tensor: GgufTensor) -> int:
    block_size, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.ggml_type)]
    num_values = 1
    for size in tensor.shape:
        num_values *= size
    return num_values // block_size * block_bytes


def _interleaved_heads(config: dict[str, object]) -> dict[str, int]:
    """The projections whose rows have to be put in order, and their number of heads."""
    if config["model_type"] != "llama":
        return {}
    num_heads, num_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    assert isinstance(num_heads, int) and isinstance(num_kv_heads, int), "the config was read from numbers"
    return {"q_proj": num_heads, "k_proj": num_kv_heads}


def _halves_apart(values: npt.NDArray[np.float32], num_heads: int) -> npt.NDArray[np.float32]:
    """``[heads * head_dim, ...]`` with rows a0 b0 a1 b1 … of each head -> a0 a1 … b0 b1 …, Hugging Face's order."""
    pairs = values.reshape(num_heads, -1, 2, *values.shape[1:])
    return pairs.swapaxes(1, 2).reshape(values.shape)
