"""The hash of a full block and everything before it: the name under which its KV may be reused.

``h(i) = BLAKE2b-128(key = cluster key, h(i-1) + token ids as little-endian u32)``. What stands before the
first block is ``BLAKE2b-128(key, root + extra)``: the root (`model_root`) holds the model and the layout of
its KV, ``extra`` whatever else changes the KV of the whole sequence or must separate it from others, today
the tenant's salt. Each later hash inherits both through its parent, so that a block costs one hash of 80
bytes (block size 16). The router and all workers use this file, and nothing of it depends on the process.

Nothing can be confused: the three uses of the function carry different BLAKE2 personalisations, a block's
input has a fixed length, and everything else is encoded with types and lengths (`encode_fields`). Without
the cluster key a collision can't even be searched for.
"""

import struct
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

from .kv_layout import KvLayout

HASH_BYTES = 16
RUN_BLOCKS = 16
MAX_RUNS = 4096
"""So many runs of so many blocks are remembered: those of 65,536 blocks, in some 10 MB where a block has 16 tokens."""


@dataclass(frozen=True, slots=True)
class ModelFingerprint:
    """What a model computes, equal wherever it lies: ``model`` is its configuration, ``weights`` their revision."""

    model: str
    weights: str


def encode_fields(*fields: float | str | bytes) -> bytes:
    """An injective encoding: for each field its type, its length (u32 LE) and its bytes.

    ``1``, ``True``, ``1.0``, ``"1"`` and ``b"1"`` differ, and so do ``("ab",)`` and ``("a", "b")``.
    """
    return b"".join(_encode_field(field) for field in fields)


def _encode_field(field: float | str | bytes) -> bytes:
    match field:
        case bool():
            kind, value = b"?", b"\1" if field else b"\0"
        case int():
            kind, value = b"i", str(field).encode()
        case float():
            kind, value = b"d", struct.pack("<d", field)
        case str():
            kind, value = b"s", field.encode()
        case _:
            kind, value = b"b", bytes(field)
    return kind + struct.pack("<I", len(value)) + value


def _keyed(cluster_key: bytes, use: bytes) -> blake2b:
    """A fresh hash for one ``use``; keys beyond BLAKE2's 64 bytes are hashed down first."""
    key = cluster_key if len(cluster_key) <= blake2b.MAX_KEY_SIZE else blake2b(cluster_key).digest()
    return blake2b(key=key, digest_size=HASH_BYTES, person=use)


def model_root(cluster_key: bytes, model: str, layout: KvLayout, weights: str = "") -> bytes:
    """16 bytes that differ whenever KV of the same tokens must not be exchanged.

    ``model`` and ``weights`` are those of a `ModelFingerprint`.
    """
    hasher = _keyed(cluster_key, b"crossdock root")
    hasher.update(encode_fields(model, weights, *layout.block_shape, layout.dtype))
    return hasher.digest()


class BlockHasher:
    """Hashes of the blocks of sequences; ``block_size`` is that of the layout the root was made with.

    Prompts begin as earlier ones did, and what the prefix cache holds of them was hashed here before. So the hashes of
    full runs of blocks are remembered: to find them again takes a twentieth of the time.
    """

    def __init__(self, cluster_key: bytes, root: bytes, block_size: int) -> None:
        assert len(root) == HASH_BYTES, "a root comes from model_root"
        self._root = root
        self._block_bytes = 4 * block_size
        self._start = _keyed(cluster_key, b"crossdock start")
        self._block = _keyed(cluster_key, b"crossdock block")
        self._hashes_of_run = lru_cache(MAX_RUNS)(self._hash)

    def hashes(self, tokens: bytes | memoryview, salt: bytes = b"", parent: bytes | None = None) -> list[bytes]:
        """One hash for each full block of ``tokens`` (u32 LE); a partial last block has none.

        ``parent`` is the hash of the block before ``tokens``; ``None`` at the start of a sequence, the only
        place where ``salt`` is used.
        """
        hashed = self._before_first(salt) if parent is None else parent
        size = RUN_BLOCKS * self._block_bytes
        runs_end = len(tokens) - len(tokens) % size
        result: list[bytes] = []
        for start in range(0, runs_end, size):
            run = self._hashes_of_run(hashed, bytes(tokens[start : start + size]))
            result += run
            hashed = run[-1]
        return [*result, *self._hash(hashed, bytes(tokens[runs_end:]))]

    def _hash(self, parent: bytes, tokens: bytes) -> tuple[bytes, ...]:
        hashed, size = parent, self._block_bytes
        result: list[bytes] = []
        for start in range(0, len(tokens) - size + 1, size):
            hasher = self._block.copy()
            hasher.update(hashed)
            hasher.update(tokens[start : start + size])
            hashed = hasher.digest()
            result.append(hashed)
        return tuple(result)

    def _before_first(self, salt: bytes) -> bytes:
        hasher = self._start.copy()
        hasher.update(self._root + encode_fields("salt", salt))
        return hasher.digest()
