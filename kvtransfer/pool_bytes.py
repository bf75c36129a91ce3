"""The memory of a pool as bytes: ``[num_blocks, num_layers, layer_bytes]``, a view; the owner keeps it alive.

A span is the bytes of the layers of one group in one block; it is contiguous (core/kv_layout.py). `PoolBytes` lies in
the host's memory, `DevicePool` (device_pool.py) in a GPU's.
"""

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from ..core.kv_layout import KvLayout, LayerGroup
from ..core.messages import Push
from ..core.part import Payload
from .plan import merge_runs

Bytes = NDArray[np.uint8]

STAGING_BYTES = 4 << 20
"""Of a piece that is staged in the host's memory, where larger ones are no faster and fall out of the caches."""
NUM_STAGING = 4
"""Buffers a side: with so many one is packed or landed while others are on their way and none waits for the loop."""


class Mark(Protocol):
    """A point in the order in which the copies of one pool run."""

    @property
    def is_passed(self) -> bool:
        """All that was launched before has run."""

    def synchronize(self) -> None:
        """Wait for that."""

    def delay(self, stream: object) -> None:
        """Without waiting, have what is launched from now on in another stream of the same device run behind it."""


@dataclass(frozen=True, slots=True)
class Passed:
    """`Mark` where a copy has run when it returns."""

    is_passed = True

    def synchronize(self) -> None: ...

    def delay(self, stream: object) -> None: ...


PASSED = Passed()


def view_pool(memory: memoryview, num_blocks: int, layout: KvLayout) -> Bytes:
    """``memory`` as ``[num_blocks, num_layers, layer_bytes]``; it may be longer than that."""
    num_bytes = num_blocks * layout.block_bytes
    flat: Bytes = np.frombuffer(memory, np.uint8, num_bytes)
    return flat.reshape(num_blocks, layout.num_layers, layout.layer_bytes)


def checksum(spans: Bytes) -> int:
    """The sum over all little-endian 32-bit words w of ``w[i] * (2 * i + 1)``, modulo 2^64.

    A changed word always changes it, since odd factors have inverses.
    """
    words = np.ascontiguousarray(spans).reshape(-1).view("<u4").astype(np.uint64)
    factors = np.arange(1, 2 * len(words), 2, dtype=np.uint64)
    return int((words * factors).sum(dtype=np.uint64))


class PoolMemory(ABC):
    """``groups`` are the layer groups in which transfers travel; a span of group g has ``group_bytes[g]`` bytes.

    A staging buffer has ``staging_bytes``, and always room for a block at least; a ring has ``num_staging`` of them.
    All copies run in the order in which they were launched. Fewer than ``min_push_bytes`` are not worth a push.
    """

    min_push_bytes = 0

    def __init__(
        self, num_blocks: int, layout: KvLayout, num_groups: int, staging_bytes: int, num_staging: int
    ) -> None:
        self.is_beside_link = False
        """A transport says before a `pack` or `land` whether other pieces travel meanwhile, which it must not slow."""
        self.layout = layout
        self.staging_bytes = max(staging_bytes, layout.block_bytes)
        self.num_staging = num_staging
        self.num_blocks = num_blocks
        self.groups = layout.layer_groups(num_groups)
        self.group_bytes = tuple(map(self.span_bytes, self.groups))
        self.all_layers = LayerGroup(0, layout.num_layers)

    def layers_of(self, header: Push) -> LayerGroup:
        """All layers of its groups."""
        groups = self.groups[header.group : header.group + header.num_groups]
        return LayerGroup(groups[0].first, groups[-1].end)

    def span_bytes(self, layers: LayerGroup) -> int:
        return (layers.end - layers.first) * self.layout.layer_bytes

    def staging_blocks(self, layers: LayerGroup, peer_bytes: int = sys.maxsize) -> int:
        """Spans that fit one staging buffer here and, if it is of ``peer_bytes``, one of a peer."""
        return min(self.staging_bytes, peer_bytes) // self.span_bytes(layers)

    @abstractmethod
    def staging(self) -> Payload:
        """A buffer in the kind of memory in which the pool lies."""

    @abstractmethod
    def pack(self, blocks: Sequence[int], layers: LayerGroup, staging: Payload) -> None:
        """Launch a copy of the spans, one after the other, to the beginning of a staging buffer.

        All of them are there once a `mark` made after this is passed.
        """

    @abstractmethod
    def mark(self) -> Mark:
        """Behind all copies that have been launched."""

    @abstractmethod
    def read(self, blocks: Sequence[int], layers: LayerGroup) -> bytes:
        """A copy of the spans, one after the other."""

    @abstractmethod
    def write(self, blocks: Sequence[int], layers: LayerGroup, payload: Payload) -> None:
        """The inverse of `read` and `pack`; the payload must have the exact length."""

    @abstractmethod
    def checksums(self, blocks: Sequence[int]) -> list[int]:
        """One a layer group over its spans of these blocks, one after the other: `checksum` of their 32-bit words."""

    @abstractmethod
    def land(self, header: Push, payload: Payload) -> Mark:
        """Launch the copy of an accepted push's payload to its place; the mark is passed when it is there."""


class PoolBytes(PoolMemory):
    """In memory of the host."""

    def __init__(
        self,
        memory: memoryview,
        num_blocks: int,
        layout: KvLayout,
        num_groups: int,
        staging_bytes: int = STAGING_BYTES,
        num_staging: int = NUM_STAGING,
    ) -> None:
        super().__init__(num_blocks, layout, num_groups, staging_bytes, num_staging)
        self.array = view_pool(memory, num_blocks, layout)

    def read(self, blocks: Sequence[int], layers: LayerGroup) -> bytes:
        return b"".join(self.array[block, layers.first : layers.end].data for block in blocks)

    def staging(self) -> Bytes:
        return np.zeros(self.staging_bytes, np.uint8)

    def pack(self, blocks: Sequence[int], layers: LayerGroup, staging: Payload) -> None:
        assert isinstance(staging, np.ndarray), "staged where the pool lies"
        shape = (len(blocks), layers.end - layers.first, self.layout.layer_bytes)
        spans = staging[: math.prod(shape)].reshape(shape)
        for run in merge_runs(blocks, range(len(blocks))):
            source = self.array[run.source : run.source + run.num_blocks, layers.first : layers.end]
            spans[run.destination : run.destination + run.num_blocks] = source

    def mark(self) -> Mark:
        return PASSED

    def land(self, header: Push, payload: Payload) -> Mark:
        self.write(header.blocks, self.layers_of(header), payload)
        return PASSED

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        return [checksum(self.array[list(blocks), group.first : group.end]) for group in self.groups]

    def write(self, blocks: Sequence[int], layers: LayerGroup, payload: Payload) -> None:
        assert isinstance(payload, bytes | memoryview | np.ndarray), "staged where the pool lies"
        shape = (len(blocks), layers.end - layers.first, self.layout.layer_bytes)
        spans: Bytes = np.frombuffer(payload, np.uint8).reshape(shape)
        for run in merge_runs(range(len(blocks)), blocks):
            target = self.array[run.destination : run.destination + run.num_blocks, layers.first : layers.end]
            target[...] = spans[run.source : run.source + run.num_blocks]
