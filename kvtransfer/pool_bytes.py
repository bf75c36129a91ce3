"""The memory of a pool as bytes: ``[num_blocks, num_layers, layer_bytes]``, a view; the owner keeps it alive.

A span is the bytes of the layers of one group in one block; it is contiguous (core/kv_layout.py).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from ..core.kv_layout import KvLayout, LayerGroup
from ..core.messages import Push
from .plan import merge_runs

Bytes = NDArray[np.uint8]


def view_pool(memory: memoryview, num_blocks: int, layout: KvLayout) -> Bytes:
    """``memory`` as ``[num_blocks, num_layers, layer_bytes]``; it may be longer than that."""
    num_bytes = num_blocks * layout.block_bytes
    flat: Bytes = np.frombuffer(memory, np.uint8, num_bytes)
    return flat.reshape(num_blocks, layout.num_layers, layout.layer_bytes)


class PoolBytes:
    """``groups`` are the layer groups in which transfers travel; a span of group g has ``group_bytes[g]`` bytes."""

    def __init__(self, memory: memoryview, num_blocks: int, layout: KvLayout, num_groups: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.array = view_pool(memory, num_blocks, layout)
        self.groups = layout.layer_groups(num_groups)
        self.group_bytes = tuple((group.end - group.first) * layout.layer_bytes for group in self.groups)
        self.all_layers = LayerGroup(0, layout.num_layers)

    def read(self, blocks: Sequence[int], layers: LayerGroup) -> bytes:
        """A copy of the spans, one after the other."""
        return b"".join(self.array[block, layers.first : layers.end].data for block in blocks)

    def write(self, blocks: Sequence[int], layers: LayerGroup, payload: bytes | memoryview) -> None:
        """The inverse of `read`; the payload must have the exact length."""
        shape = (len(blocks), layers.end - layers.first, self.layout.layer_bytes)
        spans: Bytes = np.frombuffer(payload, np.uint8).reshape(shape)
        for run in merge_runs(range(len(blocks)), blocks):
            target = self.array[run.destination : run.destination + run.num_blocks, layers.first : layers.end]
            target[...] = spans[run.source : run.source + run.num_blocks]

    def land(self, header: Push, payload: bytes | memoryview) -> None:
        """Bring the payload of a push that the receiver has accepted to its place."""
        self.write(header.blocks, self.groups[header.group], payload)
