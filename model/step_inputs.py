"""A packed step on its way to the device, and the memory there that lasts from step to step."""

import numpy as np
import torch
from torch import Tensor

from ..kernels.step_inputs import begin_step, seat_blocks
from .cuda_attention import DeviceBatch, DeviceDecodes, DevicePrompts
from .device_stream import DeviceStream
from .step_packing import Ints, PackedStep

ALIGNMENT = 4
"""In elements: kernels are compiled for addresses that are multiples of 16 bytes."""
DECODE_FIELDS = (1, 1, 1, 1, 8)
"""Elements that each row of a decode step has in token_ids, positions, slots, lengths and rows."""


class StepInputs:
    """``sampled int64 [max_rows]`` holds the ids that the last step drew.

    ``seats`` and ``tables`` are those of `kernels/step_inputs`. A step of one-token chunks alone, in one of the padded
    sizes, lies at the same address each time, so that a graph finds it.
    """

    def __init__(self, stream: DeviceStream, num_seats: int, max_blocks: int, max_rows: int) -> None:
        """``max_rows`` is the most sequences that a step has when padded."""
        self._stream = stream
        max_blocks = -(-max_blocks // ALIGNMENT) * ALIGNMENT
        ints = {"dtype": torch.int32, "device": stream.device}
        self._seats = torch.zeros(num_seats, max_blocks, **ints)
        self._tables = torch.zeros(max_rows, max_blocks, **ints)
        self._decodes = torch.zeros(sum(DECODE_FIELDS) * (max_rows + ALIGNMENT), **ints)
        self.sampled = torch.zeros(max_rows, dtype=torch.int64, device=stream.device)

    def upload(self, packed: PackedStep) -> DeviceBatch:
        """Copy a step to memory of its own and begin it."""
        arrays, num_decodes = packed.arrays, packed.num_decodes
        token_ids, positions, slots, lengths, rows, query_starts, starts, outputs = self._copy(
            arrays.token_ids, arrays.positions, arrays.slots, arrays.lengths, arrays.rows,
            arrays.query_starts, arrays.starts, arrays.outputs,
        )  # fmt: skip
        self._seat(packed)
        rows, tables = rows.view(arrays.rows.shape), self._tables[: len(arrays.rows)]
        begin_step(token_ids, rows, self.sampled, self._seats, tables)
        decodes = DeviceDecodes(lengths, tables[:num_decodes]) if num_decodes else None
        prompts = DevicePrompts(query_starts, starts, tables[num_decodes:]) if packed.prompts else None
        return DeviceBatch(token_ids, positions, slots, decodes, prompts, outputs)

    def refill(self, packed: PackedStep) -> None:
        """Copy a decode step to where the graph of its size reads it."""
        arrays = packed.arrays
        fields = (arrays.token_ids, arrays.positions, arrays.slots, arrays.lengths, arrays.rows)
        host = self._packed(fields)
        self._decodes[: len(host)].copy_(host, non_blocking=True)
        self._seat(packed)

    def begin_decodes(self, num_rows: int) -> DeviceBatch:
        """Launch the beginning of a decode step of this size, wherever `refill` has put one."""
        offsets = _offsets([size * num_rows for size in DECODE_FIELDS])
        token_ids, positions, slots, lengths, rows = (
            self._decodes[start : start + size * num_rows]
            for start, size in zip(offsets, DECODE_FIELDS, strict=False)
        )
        tables = self._tables[:num_rows]
        begin_step(token_ids, rows.view(num_rows, -1), self.sampled, self._seats, tables)
        return DeviceBatch(token_ids, positions, slots, DeviceDecodes(lengths, tables), None, None)

    def _seat(self, packed: PackedStep) -> None:
        if len(packed.arrays.segments):
            segments, blocks = self._copy(packed.arrays.segments, packed.arrays.blocks)
            seat_blocks(self._seats, segments.view(-1, packed.arrays.segments.shape[1]), blocks)

    def _copy(self, *arrays: Ints) -> list[Tensor]:
        host = self._packed(arrays)
        on_device = host.to(self._stream.device, non_blocking=True)
        starts = _offsets([array.size for array in arrays])
        return [on_device[start : start + array.size] for start, array in zip(starts, arrays, strict=False)]

    def _packed(self, arrays: tuple[Ints, ...]) -> Tensor:
        offsets = _offsets([array.size for array in arrays])
        host = self._stream.host_memory(offsets[-1], torch.int32)
        flat = host.numpy()
        for start, array in zip(offsets, arrays, strict=False):
            flat[start : start + array.size] = array.reshape(-1)
        return host


def _offsets(sizes: list[int]) -> list[int]:
    """Where arrays of these sizes begin, and where the last one ends."""
    padded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
    ends: list[int] = np.cumsum([0, *padded]).tolist()
    return ends
