"""Checkpoints in safetensors folders: one file or shards, tied embeddings, and what is said of damaged ones."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from crossdock.model.batch import Batch
from crossdock.model.families import decoder_spec
from crossdock.model.loading import build_transformer
from crossdock.model.transformer import Transformer
from crossdock.model.weights import CheckpointError, SafetensorsCheckpoint, open_checkpoint

TENSORS = {
    "model.embed_tokens.weight": torch.arange(12.0).reshape(4, 3),
    "model.norm.weight": torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16),
    "lm_head.weight": torch.ones(4, 3, dtype=torch.float16),
}
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def write_folder(folder: Path, tensors: dict[str, Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "vocab_size": 4}))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_shards(folder: Path) -> Path:
    names = list(TENSORS)
    write_folder(folder, TENSORS)
    (folder / "model.safetensors").unlink()
    save_file({names[0]: TENSORS[names[0]], names[1]: TENSORS[names[1]]}, folder / SHARDS[0])
    save_file({names[2]: TENSORS[names[2]]}, folder / SHARDS[1])
    weight_map = {names[0]: SHARDS[0], names[1]: SHARDS[0], names[2]: SHARDS[1]}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def assert_holds_all(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.config == {"architectures": ["LlamaForCausalLM"], "vocab_size": 4}
    assert set(checkpoint.names()) == set(TENSORS)
    found = {name: checkpoint.get(name) for name in checkpoint.names()}
    checkpoint.close()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_one_file_gives_all_tensors_in_their_own_dtype(tmp_path: Path) -> None:
    assert_holds_all(write_folder(tmp_path, TENSORS))


def test_shards_are_one_checkpoint(tmp_path: Path) -> None:
    assert_holds_all(write_shards(tmp_path))


def test_with_an_index_other_safetensors_files_are_not_looked_at(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"stray": torch.zeros(1)}, tmp_path / "model.safetensors")
    assert_holds_all(tmp_path)


def test_reading_again_and_again_keeps_no_copies(tmp_path: Path) -> None:
    """64 MiB read twenty times leave this process at most one copy larger."""
    write_folder(tmp_path, {"big": torch.zeros(16 << 20)})
    checkpoint = open_checkpoint(tmp_path)
    before = private_bytes()
    for _ in range(20):
        assert checkpoint.get("big").add(1).sum() == 16 << 20
    assert private_bytes() - before < 96 << 20


def private_bytes() -> int:
    """Memory of this process that is no page of a file."""
    fields = Path("/proc/self/status").read_text().split("\n")
    return next(int(field.split()[1]) << 10 for field in fields if field.startswith("RssAnon"))


# --- tied embeddings -------------------------------------------------------------------------


def write_toy(folder: Path, is_tied: bool, head: Tensor | None) -> None:
    """A one-layer Llama whose file has this output head, or none."""
    config = LlamaConfig(vocab_size=12, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    config.tie_word_embeddings = is_tied
    LlamaForCausalLM(config).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    if head is not None:
        tensors["lm_head.weight"] = head
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def built(folder: Path) -> Transformer[Batch]:
    checkpoint = open_checkpoint(folder)
    return build_transformer(decoder_spec(checkpoint.config), checkpoint, torch.float32)


@pytest.mark.parametrize(("is_tied", "has_head"), [(True, False), (True, True), (False, True)])
def test_output_head_is_that_of_transformers(tmp_path: Path, is_tied: bool, has_head: bool) -> None:
    """Case X14: tied or not, with a head in the file or not."""
    write_toy(tmp_path, is_tied, torch.randn(12, 8) if has_head else None)
    oracle = LlamaForCausalLM.from_pretrained(tmp_path)
    hidden = torch.randn(5, 8)
    with torch.inference_mode():
        expected = oracle.lm_head(oracle.model.norm(hidden))
    assert torch.allclose(built(tmp_path).logits(hidden), expected, atol=1e-6)


def test_head_that_only_repeats_the_embeddings_is_not_one_of_its_own(tmp_path: Path) -> None:
    write_toy(tmp_path, True, None)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(
        tensors | {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, tmp_path / "model.safetensors"
    )
    assert open_checkpoint(tmp_path).config["tie_word_embeddings"] is True


def test_untied_model_without_a_head_is_refused(tmp_path: Path) -> None:
    """Case X14."""
    write_toy(tmp_path, False, None)
    with pytest.raises(ValueError, match=r"lm_head\.weight"):
        built(tmp_path)


# --- errors ----------------------------------------------------------------------------------


def test_missing_shard_is_named(tmp_path: Path) -> None:
    (write_shards(tmp_path) / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=rf"{SHARDS[1]} is missing"):
        open_checkpoint(tmp_path)


def test_tensor_that_the_index_promises_in_vain_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path)
    save_file({"other": torch.zeros(1)}, tmp_path / SHARDS[1])
    with pytest.raises(CheckpointError, match=rf"{SHARDS[1]} has no tensor lm_head\.weight, though .*index.json lists"):
        open_checkpoint(tmp_path)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_folder(tmp_path, TENSORS))
    with pytest.raises(CheckpointError, match=rf"{tmp_path} has no tensor model\.layers\.0"):
        checkpoint.get("model.layers.0.mlp.up_proj.weight")


@pytest.mark.parametrize("num_bytes", [0, 4, 60, 200])
def test_damaged_file_is_named(tmp_path: Path, num_bytes: int) -> None:
    path = write_folder(tmp_path, TENSORS) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match=r"model\.safetensors is damaged"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", "[]", "config.json holds no JSON object"),
        ("model.safetensors.index.json", "{}", "index.json has no weight_map"),
        ("model.safetensors", None, "model.safetensors is missing"),
    ],
)
def test_folder_that_is_no_checkpoint_says_why(tmp_path: Path, name: str, content: str | None, message: str) -> None:
    write_folder(tmp_path, TENSORS)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsCheckpoint(tmp_path)


def test_path_that_is_nothing_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="nowhere is neither a folder nor a GGUF file"):
        open_checkpoint(tmp_path / "nowhere")
