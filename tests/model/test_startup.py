"""What an engine is built for: device, dtype, weights, and pools that can't work."""

import json
from pathlib import Path

import pytest
import torch

from crossdock.core.block_hash import ModelFingerprint
from crossdock.core.config import EngineConfig
from crossdock.model.startup import LoadedModel, choose_device, choose_dtype, load_model

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "dtype": "bfloat16",
}


def loaded(folder: Path, config: EngineConfig) -> LoadedModel:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    model = load_model(folder, ModelFingerprint("model", "weights"), b"key", config)
    model.executor.close()
    return model


def test_dummy_weights_need_nothing_but_a_config(tmp_path: Path) -> None:
    model = loaded(tmp_path, EngineConfig(device="cpu", load_format="dummy", kv_bytes=1 << 20))
    block_bytes = 2 * 2 * 4 * 16 * 8 * 4
    assert (model.tables.pool.num_blocks, model.layout.dtype) == ((1 << 20) // block_bytes, "float32")
    assert model.max_model_len == 128


def test_the_pool_caps_the_longest_request(tmp_path: Path) -> None:
    assert loaded(tmp_path, EngineConfig(device="cpu", load_format="dummy", num_blocks=3)).max_model_len == 48


def test_a_pool_of_one_block_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the pool would have 1 blocks of 16 tokens"):
        loaded(tmp_path, EngineConfig(device="cpu", load_format="dummy", num_blocks=1))


def test_an_unknown_load_format_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="load_format 'random' is not one of auto, dummy"):
        loaded(tmp_path, EngineConfig(load_format="random"))


def test_auto_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == CPU
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert choose_device("auto") == GPU
    assert choose_device("cuda:1") == torch.device("cuda", 1)


@pytest.mark.parametrize("name", ["gpu", "cuda:x", "cpu:1", ""])
def test_a_device_that_is_none_is_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"device '{name}' is not one of auto, cpu, cuda, cuda:N"):
        choose_device(name)


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match="device 'cuda:1' is not there: torch sees 1 CUDA devices"):
        choose_device("cuda:1")


def test_auto_dtype_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu() -> None:
    assert choose_dtype("auto", "bfloat16", GPU) == torch.bfloat16
    assert choose_dtype("auto", "bfloat16", CPU) == torch.float32
    assert choose_dtype("float16", "bfloat16", GPU) == torch.float16
    with pytest.raises(ValueError, match="dtype 'int8' is not one of auto, float32, bfloat16, float16"):
        choose_dtype("int8", "bfloat16", CPU)
