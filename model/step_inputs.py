"""A packed step on its way to the device, and the memory there that lasts from step to step."""

from itertools import accumulate

import torch
from torch import Tensor

from ..kernels.step_inputs import begin_step, seat_blocks
from .cuda_attention import DeviceBatch, DeviceDecodes, DevicePrompts
from .device_stream import DeviceStream
from .step_packing import Ints, PackedStep, StepArrays
from .step_shapes import StepShape, StepShapes

ALIGNMENT = 4
"""In elements: kernels are compiled for addresses that are multiples of 16 bytes."""
COLUMNS = 16
"""Tables are a multiple of so many blocks wide, for the same reason."""
ROW_FIELDS = 8


class StepInputs:
    """``sampled int64 [max_sequences]`` holds the ids that the last step drew.

    ``seats`` and ``tables`` are those of `kernels/step_inputs`. A step whose shape has a graph lies at the same address
    each time, where the graph finds it.
    """

    def __init__(self, stream: DeviceStream, shapes: StepShapes, num_seats: int, max_blocks: int) -> None:
        self._stream = stream
        max_blocks = -(-max_blocks // COLUMNS) * COLUMNS
        self._seats = torch.zeros(num_seats, max_blocks, dtype=torch.int32, device=stream.device)
        self._tables = torch.zeros(shapes.max_sequences, max_blocks, dtype=torch.int32, device=stream.device)
        num_fixed = max(_offsets(_sizes(shape))[-1] for shape in shapes.graphed())
        self._fixed = torch.zeros(num_fixed, dtype=torch.int32, device=stream.device)
        self.sampled = torch.zeros(shapes.max_sequences, dtype=torch.int64, device=stream.device)

    def upload(self, packed: PackedStep) -> DeviceBatch:
        """Copy a step to memory of its own and begin it."""
        self._seat(packed.arrays)
        fields = self.to_device(_fields(packed.arrays))
        return self._begun(packed.shape, fields)

    def refill(self, packed: PackedStep) -> None:
        """Copy a step to where the graph of its shape reads it."""
        self._seat(packed.arrays)
        host = self._on_host(_fields(packed.arrays))
        self._fixed[: len(host)].copy_(host, non_blocking=True)

    def begin(self, shape: StepShape) -> DeviceBatch:
        """Launch the beginning of a step of this shape, whichever one `refill` has put in its place."""
        return self._begun(shape, _cut(self._fixed, _sizes(shape)))

    def _begun(self, shape: StepShape, fields: list[Tensor]) -> DeviceBatch:
        token_ids, positions, slots, lengths, rows, query_starts, starts, outputs = fields
        tables, first = self._tables[: shape.num_sequences], shape.num_decodes
        begin_step(token_ids, rows.view(-1, ROW_FIELDS), self.sampled, self._seats, tables)
        decodes = DeviceDecodes(lengths[:first], tables[:first]) if first else None
        prompts = None
        if shape.num_prompts:
            prompts = DevicePrompts(query_starts, starts, lengths[first:], tables[first:], shape.is_short)
        return DeviceBatch(token_ids, positions, slots, decodes, prompts, outputs if shape.num_prompts else None)

    def _seat(self, arrays: StepArrays) -> None:
        if len(arrays.segments):
            segments, blocks = self.to_device([arrays.segments, arrays.blocks])
            seat_blocks(self._seats, segments.view(arrays.segments.shape), blocks)

    def to_device(self, arrays: list[Ints]) -> list[Tensor]:
        """In one copy, behind what is launched."""
        on_device = self._on_host(arrays).to(self._stream.device, non_blocking=True)
        return _cut(on_device, [array.size for array in arrays])

    def _on_host(self, arrays: list[Ints]) -> Tensor:
        """The arrays one after the other, ready to be copied."""
        offsets = _offsets([array.size for array in arrays])
        host = self._stream.host_memory(offsets[-1], torch.int32)
        flat = host.numpy()
        for start, array in zip(offsets, arrays, strict=False):
            flat[start : start + array.size] = array.reshape(-1)
        return host


def _fields(arrays: StepArrays) -> list[Ints]:
    """What a launch reads, in the order of `_sizes`."""
    per_token = [arrays.token_ids, arrays.positions, arrays.slots]
    return [*per_token, arrays.lengths, arrays.rows, arrays.query_starts, arrays.starts, arrays.outputs]


def _sizes(shape: StepShape) -> list[int]:
    """Of the fields of a step that has a graph."""
    n, num_prompts = shape.num_sequences, shape.num_prompts
    return [*[shape.num_tokens] * 3, n, ROW_FIELDS * n, num_prompts + 1, num_prompts, n]


def _cut(whole: Tensor, sizes: list[int]) -> list[Tensor]:
    return [whole[start : start + size] for start, size in zip(_offsets(sizes), sizes, strict=False)]


def _offsets(sizes: list[int]) -> list[int]:
    """Where arrays of these sizes begin, and where the last one ends."""
    return list(accumulate((-(-size // ALIGNMENT) * ALIGNMENT for size in sizes), initial=0))
