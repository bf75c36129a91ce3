"""Whether a model embeds, and how: read from the files that sentence-transformers keep beside a model.

``modules.json`` lists what a text goes through: the network, ``1_Pooling`` with a ``config.json`` of its own, maybe
``Normalize``. Which lengths a vector may be cut to stands in the model's ``config.json``, in the words of vLLM:
``is_matryoshka``, ``matryoshka_dimensions``. https://sbert.net/docs/sentence_transformer/usage/custom_models.html
"""

import json
import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..core.request import Pooling

AUTO = "auto"
_POOLING_OF_MODE = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN}
_POOLING_OF_FLAG = {"pooling_mode_lasttoken": Pooling.LAST, "pooling_mode_mean_tokens": Pooling.MEAN}
_KNOWN_MODULES = {"Transformer", "Pooling", "Normalize"}


@dataclass(frozen=True, slots=True)
class NoEmbedding:
    """``reason`` is for the client."""

    reason: str


@dataclass(frozen=True, slots=True)
class EmbeddingModel:
    """``dimensions`` are those that a vector may be cut to."""

    pooling: Pooling
    normalizes: bool = True
    dimensions: Sequence[int] = ()

    def finished(self, pooled: bytes, num_dimensions: int | None) -> "array[float]":
        """The vector that a client gets, from float32 as workers send it."""
        vector = array("f", pooled)[:num_dimensions]
        length = math.hypot(*vector) if self.normalizes else 1.0
        return array("f", [value / length for value in vector]) if length not in (0.0, 1.0) else vector


class _Unfit(Exception):
    """These files describe no embedding that can be had here."""


def read_embedding(source: Path, pooling: str = AUTO) -> EmbeddingModel | NoEmbedding:
    """``pooling`` says it for a model whose files do not; its vectors have length 1."""
    config = _object(source / "config.json")
    if pooling != AUTO:
        return EmbeddingModel(Pooling(pooling), True, _dimensions(config))
    if not (source / "modules.json").is_file():
        return NoEmbedding("no modules.json says how it pools; start the server with --pooling last or mean")
    if config.get("is_causal") is False:
        return NoEmbedding("its attention is not causal")
    try:
        return _from_modules(source, _dimensions(config))
    except _Unfit as unfit:
        return NoEmbedding(str(unfit))


def _from_modules(source: Path, dimensions: Sequence[int]) -> EmbeddingModel:
    modules = _json(source / "modules.json")
    if not isinstance(modules, list) or not all(isinstance(module, dict) for module in modules):
        raise _Unfit("its modules.json is no list of modules")
    kinds = [str(module.get("type", "")).rpartition(".")[2] for module in modules]
    if unknown := sorted(set(kinds) - _KNOWN_MODULES):
        raise _Unfit(f"its modules.json wants {', '.join(unknown)}")
    folders = [str(module.get("path", "")) for module, kind in zip(modules, kinds, strict=True) if kind == "Pooling"]
    if len(folders) != 1:
        raise _Unfit(f"its modules.json has {len(folders)} poolings")
    pooling = _pooling(_object(source / folders[0] / "config.json"))
    return EmbeddingModel(pooling, "Normalize" in kinds, dimensions)


def _pooling(config: dict[str, object]) -> Pooling:
    """Newer files name one ``pooling_mode``, older ones have a flag for each; several would be put side by side."""
    wanted = [name for name, value in config.items() if name.startswith("pooling_mode_") and value is True]
    if isinstance(mode := config.get("pooling_mode"), str):
        wanted = [mode]
    known = {**_POOLING_OF_MODE, **_POOLING_OF_FLAG}
    if len(wanted) != 1 or wanted[0] not in known:
        modes = " and ".join(wanted) or "nothing known"
        raise _Unfit(f"it pools by {modes}, not by the last token or the mean")
    return known[wanted[0]]


def _dimensions(config: dict[str, object]) -> Sequence[int]:
    listed, size = config.get("matryoshka_dimensions"), config.get("hidden_size")
    if isinstance(listed, list):
        return sorted(length for length in listed if isinstance(length, int))
    return range(1, size + 1) if config.get("is_matryoshka") is True and isinstance(size, int) else ()


def _object(path: Path) -> dict[str, object]:
    """Empty where there is none."""
    content = _json(path)
    return content if isinstance(content, dict) else {}


def _json(path: Path) -> object:
    """``None`` where there is none."""
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
