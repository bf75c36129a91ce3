"""Checkpoints: a model's configuration and its tensors by Hugging Face name, from safetensors or GGUF.

A tensor is read when it is asked for and not kept, so that loading takes the model's own size and one tensor more.
"""

import json
from collections.abc import Collection
from pathlib import Path
from typing import Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

CPU = torch.device("cpu")
INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
EMBEDDING_NAME, HEAD_NAME = "model.embed_tokens.weight", "lm_head.weight"
PREFIX = "model."
"""Of all names but the head's; files of sentence-transformers hold the network alone and leave it out."""


class CheckpointError(ValueError):
    """A model's files are missing, damaged or of a kind that is not read; the message names the file."""


class Checkpoint(Protocol):
    """An open model on disk."""

    @property
    def config(self) -> dict[str, object]:
        """As Hugging Face's ``config.json`` has it."""

    def names(self) -> Collection[str]:
        """The tensors there are, by their Hugging Face names."""

    def get(self, name: str) -> Tensor:
        """Read one tensor, in the file's dtype (float32 where it is quantised); raises `CheckpointError`."""

    def close(self) -> None:
        """No tensor can be read afterwards; those already read stay valid."""


class _Shard(Protocol):
    """What is used of a safetensors file."""

    def keys(self) -> list[str]: ...

    def get_tensor(self, name: str) -> Tensor: ...


def open_checkpoint(path: Path, device: torch.device = CPU) -> Checkpoint:
    """Open a folder with ``config.json`` and safetensors, or a ``.gguf`` file; raises `CheckpointError`.

    Tensors of a folder are read to ``device``, those of a GGUF file to the CPU.
    """
    if path.is_dir():
        return SafetensorsCheckpoint(path, device)
    if path.suffix != ".gguf" or not path.is_file():
        raise CheckpointError(f"{path} is neither a folder nor a GGUF file")
    from .gguf import GgufCheckpoint  # needs the package gguf, which the readers of safetensors do without

    return GgufCheckpoint(path)


def read_config(folder: Path) -> dict[str, object]:
    """``config.json`` alone; raises `CheckpointError`."""
    return _read_json(folder / "config.json")


class SafetensorsCheckpoint:
    """A folder as Hugging Face lays it out: one ``model.safetensors``, or shards and their index.

    Where the config ties the output head to the embeddings but the file has another head, ``config`` says that they
    are not tied: the weights decide, as in Transformers 5.
    """

    def __init__(self, folder: Path, device: torch.device = CPU) -> None:
        self.config = read_config(folder)
        self._folder = folder
        self._shards = {name: _open_shard(folder / name, device) for name in _shard_names(folder)}
        self._shard_of = {name: shard for shard, file in self._shards.items() for name in file.keys()}  # noqa: SIM118
        for name, shard in _weight_map(folder).items():
            if self._shard_of.get(name) != shard:
                raise CheckpointError(f"{folder / shard} has no tensor {name}, though {INDEX_NAME} lists it there")
        self._is_bare = EMBEDDING_NAME not in self._shard_of and EMBEDDING_NAME.removeprefix(PREFIX) in self._shard_of
        if self._is_bare:
            self._shard_of = {PREFIX + name: shard for name, shard in self._shard_of.items()}
        if self.config.get("tie_word_embeddings") and self._has_head_of_its_own():
            self.config["tie_word_embeddings"] = False

    def names(self) -> Collection[str]:
        return self._shard_of.keys()

    def get(self, name: str) -> Tensor:
        if name not in self._shard_of:
            raise CheckpointError(f"{self._folder} has no tensor {name}")
        return self._shards[self._shard_of[name]].get_tensor(name.removeprefix(PREFIX) if self._is_bare else name)

    def close(self) -> None:
        self._shards.clear()
        self._shard_of.clear()

    def _has_head_of_its_own(self) -> bool:
        if not {EMBEDDING_NAME, HEAD_NAME} <= self._shard_of.keys():
            return False
        embedding, head = self.get(EMBEDDING_NAME), self.get(HEAD_NAME)
        return head.dtype != embedding.dtype or not torch.equal(head, embedding)


def _shard_names(folder: Path) -> list[str]:
    """The folder's weight files, those that the index lists if there is one, sorted."""
    if (folder / INDEX_NAME).exists():
        return sorted(set(_weight_map(folder).values()))
    return [SINGLE_NAME]


def _read_json(path: Path) -> dict[str, object]:
    """A JSON object from a file; raises `CheckpointError`."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return content


def _weight_map(folder: Path) -> dict[str, str]:
    """Which shard holds which tensor, as the index says; empty without an index."""
    path = folder / INDEX_NAME
    if not path.exists():
        return {}
    shards = _read_json(path).get("weight_map")
    if not isinstance(shards, dict):
        raise CheckpointError(f"{path} has no weight_map")
    return {str(name): str(shard) for name, shard in shards.items()}


def _open_shard(path: Path, device: torch.device) -> _Shard:
    try:
        shard: _Shard = safe_open(path, framework="pt", device=str(device))
        return shard
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except SafetensorError as error:
        raise CheckpointError(f"{path} is damaged: {error}") from None
