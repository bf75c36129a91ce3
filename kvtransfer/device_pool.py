"""A pool in a GPU's memory, as transfers see it: listed blocks, copied by kernels on a stream of its own."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.kv_layout import KvLayout, LayerGroup
from ..core.messages import Push
from ..core.part import Payload
from ..kernels import kv_copy
from ..kernels.kv_copy import CopyShape, gather_blocks, scatter_blocks
from .pool_bytes import NUM_STAGING, Mark, PoolMemory

LIST_ALIGNMENT = 4
"""Entries: kernels are compiled for addresses that are multiples of 16 bytes."""
MAX_LISTS = 256
"""Uploads that are kept, so that the layer groups of a transfer share theirs: more than transfers go side by side."""
STAGING_BYTES = 256 << 20
"""Of a piece that is staged in a GPU's memory: starting to send one costs little beside its time on the link."""
STAGING_SHARE = 512
"""Of smaller GPUs a buffer takes one part of so many."""

MIN_PUSH_BYTES = 16 << 20
"""To another GPU they take 0.06 ms, less than the host needs to launch the copy and to tell of it."""


class CopyStream(Protocol):
    """The stream on which this worker's transfers run, beside that of its steps."""

    @property
    def device(self) -> torch.device: ...

    @property
    def handle(self) -> int:
        """What CUDA's driver knows it by."""

    def launching(self) -> AbstractContextManager[object]:
        """What is launched inside goes to this stream."""

    def host_memory(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """Memory of the host from and to which the device copies on its own; reused when the copy is done."""

    def mark(self) -> Mark: ...


class DevicePool(PoolMemory):
    """``tensor [num_blocks, ...]`` is the whole pool, contiguous; the owner keeps it alive.

    `pack`, `land`, `block_list` and `block_lists` only launch; all else waits for the device, for as long as its own
    copy takes.
    """

    min_push_bytes = MIN_PUSH_BYTES

    def __init__(
        self,
        tensor: Tensor,
        layout: KvLayout,
        num_groups: int,
        stream: CopyStream,
        staging_bytes: int | None = None,
        num_staging: int = NUM_STAGING,
    ) -> None:
        staging_bytes = staging_bytes or _default_staging_bytes(stream.device)
        super().__init__(len(tensor), layout, num_groups, staging_bytes, num_staging)
        shape = (self.num_blocks, layout.num_layers, layout.layer_bytes)
        self.tensor = tensor.view(-1).view(torch.uint8).view(shape)
        self.stream = stream
        self._uploads: dict[tuple[bytes, ...], list[Tensor]] = {}

    def read(self, blocks: Sequence[int], layers: LayerGroup) -> bytes:
        with self.stream.launching():
            staging = gather_blocks(self.tensor, self.block_list(blocks), range(layers.first, layers.end))
            return staging.cpu().numpy().tobytes()

    def staging(self) -> Tensor:
        with self.stream.launching():
            buffer = torch.zeros(self.staging_bytes, dtype=torch.uint8, device=self.stream.device)
            self.stream.mark().synchronize()  # what is packed or received there comes from other streams, too
        return buffer

    def pack(self, blocks: Sequence[int], layers: LayerGroup, staging: Payload) -> None:
        assert isinstance(staging, Tensor), "staged where the pool lies"
        shape = (len(blocks), layers.end - layers.first, self.layout.layer_bytes)
        with self.stream.launching():
            spans = staging[: math.prod(shape)].view(shape)
            gather_blocks(self.tensor, self.block_list(blocks), range(layers.first, layers.end), spans, self._shape)

    def mark(self) -> Mark:
        return self.stream.mark()

    def land(self, header: Push, payload: Payload) -> Mark:
        self._scatter(header.blocks, self.layers_of(header), payload)
        return self.mark()

    def checksums(self, blocks: Sequence[int]) -> list[int]:
        with self.stream.launching():
            listed = self.block_list(blocks)
            sums = [self._checksum(listed, range(group.first, group.end)) for group in self.groups]
            return [int(total) % (1 << 64) for total in torch.stack(sums).tolist()]

    def _checksum(self, blocks: Tensor, layers: range) -> Tensor:
        """As `pool_bytes.checksum`; products and sums of 64 bits wrap around, signed or not."""
        words = gather_blocks(self.tensor, blocks, layers).view(-1).view(torch.int32).long() & 0xFFFFFFFF
        factors = torch.arange(1, 2 * len(words), 2, device=words.device)
        return (words * factors).sum()

    def write(self, blocks: Sequence[int], layers: LayerGroup, payload: Payload) -> None:
        self._scatter(blocks, layers, payload)
        self.mark().synchronize()

    def _scatter(self, blocks: Sequence[int], layers: LayerGroup, payload: Payload) -> None:
        shape = (len(blocks), layers.end - layers.first, self.layout.layer_bytes)
        with self.stream.launching():
            staged = payload if isinstance(payload, Tensor) else self._uploaded(payload)
            scatter_blocks(
                staged.view(shape), self.block_list(blocks), range(layers.first, layers.end), self.tensor, self._shape
            )

    @property
    def _shape(self) -> CopyShape:
        return kv_copy.BESIDE_LINK if self.is_beside_link else kv_copy.STAGING

    def _uploaded(self, payload: Payload) -> Tensor:
        assert isinstance(payload, bytes | memoryview), "what is not on the device came through the host"
        staging = self.stream.host_memory(len(payload), torch.uint8)
        staging.numpy()[:] = np.frombuffer(payload, np.uint8)
        return staging.to(self.stream.device, non_blocking=True)

    def block_list(self, blocks: Sequence[int]) -> Tensor:
        """``[len(blocks)]`` int32 on the device, for kernels launched on the stream; nothing waits."""
        return self.block_lists(blocks)[0]

    def block_lists(self, *lists: Sequence[int]) -> list[Tensor]:
        """`block_list` of several in one upload, each at an address that suits every kernel that was compiled.

        Lists that were asked for lately are on the device still.
        """
        arrays = [np.array(blocks, np.int32) for blocks in lists]
        key = tuple(array.tobytes() for array in arrays)
        if key not in self._uploads:
            if len(self._uploads) == MAX_LISTS:
                del self._uploads[next(iter(self._uploads))]  # its memory goes on to what this stream runs later
            self._uploads[key] = self._upload(arrays)
        return self._uploads[key]

    def _upload(self, arrays: Sequence[NDArray[np.int32]]) -> list[Tensor]:
        ends = list(accumulate(-(-len(array) // LIST_ALIGNMENT) * LIST_ALIGNMENT for array in arrays))
        staging = self.stream.host_memory(ends[-1], torch.int32)
        starts = [0, *ends[:-1]]
        for start, array in zip(starts, arrays, strict=True):
            staging.numpy()[start : start + len(array)] = array
        uploaded = staging.to(self.stream.device, non_blocking=True)
        return [uploaded[start : start + len(array)] for start, array in zip(starts, arrays, strict=True)]


def _default_staging_bytes(device: torch.device) -> int:
    if device.type != "cuda":
        return STAGING_BYTES
    return min(STAGING_BYTES, torch.cuda.get_device_properties(device).total_memory // STAGING_SHARE)
