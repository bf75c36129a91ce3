"""What a step uploads: everything the device must learn, as arrays of int32, packed by the host without the device."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.sequence import Chunk
from .executor import known_ids, scores_prompt
from .seats import Seat, Seats
from .step_shapes import StepShape, StepShapes

PADDED_ROW = (0, -1, 0, -1, 0, 0, 0, 0)
NO_SLOT = -1

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What the device reads. Token rows are those of one-token chunks, then those of prompts.

    ``token_ids, positions, slots [num_tokens]``, a negative slot keeps no KV; ``rows [num_sequences, 8]``, ``segments
    [num_segments, 4]`` and their ``blocks`` as in `kernels/step_inputs`; ``lengths [num_sequences]`` are tokens at the
    end of the step; of the prompts ``starts [num_prompts]`` are those before it, and ``query_starts [num_prompts + 1]``
    count from the first prompt's row. ``outputs`` are the rows whose output is wanted: one for each sequence, its last,
    then all rows of chunks whose prompts are scored.
    """

    token_ids: Ints
    positions: Ints
    slots: Ints
    lengths: Ints
    rows: Ints
    query_starts: Ints
    starts: Ints
    outputs: Ints
    segments: Ints
    blocks: Ints


@dataclass(frozen=True, slots=True)
class PackedStep:
    """A step as its executor launches it.

    ``sampled [num_sequences]`` are the chunks whose tokens are drawn, ``None`` where none is wanted; ``sampled_seats``
    their seats, or -1. ``scored`` are the chunks whose prompts' log-probabilities are wanted. ``prompt_spans`` are the
    prompts' positions. ``newcomers`` were seated by this step.
    """

    number: int
    shape: StepShape
    arrays: StepArrays
    prompt_spans: tuple[range, ...]
    sampled: tuple[Chunk | None, ...]
    sampled_seats: Ints
    scored: tuple[Chunk, ...]
    newcomers: tuple[Seat, ...]

    def places(self) -> dict[int, int]:
        """Where the token of each sequence is among those drawn, by the sequence's ``id``."""
        return {id(chunk.sequence): place for place, chunk in enumerate(self.sampled) if chunk is not None}


class StepPacker:
    """Packs one step after the other."""

    def __init__(self, shapes: StepShapes, num_seats: int, block_size: int) -> None:
        self._shapes = shapes
        self._seats = Seats(num_seats)
        self._block_size = block_size
        self._number = 0

    def pack(self, chunks: Seq[Chunk], previous: PackedStep | None) -> PackedStep:
        """``previous`` is the step launched before, if its results were not taken before this one was planned.

        Only then is it certain that its sequences kept their blocks.
        """
        self._number += 1 if previous is not None else 2
        decodes = [chunk for chunk in chunks if chunk.num_tokens == 1]
        prompts = [chunk for chunk in chunks if chunk.num_tokens > 1]
        shape = self._shapes.padded(len(decodes), [chunk.num_tokens for chunk in prompts])
        step = _StepInMaking(shape, self._number, self._block_size, self._seats, previous.places() if previous else {})
        for chunk in decodes:
            step.add_decode(chunk)
        step.pad(shape.num_decodes)
        for chunk in prompts:
            step.add_prompt(chunk)
        step.pad(shape.num_sequences)
        return step.packed()


class _StepInMaking:
    """Collects a step chunk by chunk; ``place_of`` says where the step before drew a sequence's pending token."""

    def __init__(
        self, shape: StepShape, number: int, block_size: int, seats: Seats, place_of: Mapping[int, int]
    ) -> None:
        self._shape = shape
        self._number = number
        self._block_size = block_size
        self._seats = seats
        self._place_of = place_of
        self._chunks: list[Chunk | None] = []
        self._rows: list[tuple[int, ...]] = []
        self._last_rows: list[int] = []
        self._token_ids: list[int] = []
        self._segments: list[tuple[int, int, int, int]] = []
        self._blocks: list[int] = []

    def add_decode(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        if chunk.takes_pending:
            pending, token_id = self._place_of[id(sequence)], 0
        else:
            pending, token_id = -1, sequence.token_ids[chunk.start]
        self._token_ids.append(token_id)
        self._add_row(chunk, pending)

    def add_prompt(self, chunk: Chunk) -> None:
        self._token_ids += known_ids(chunk)
        self._add_row(chunk, self._place_of[id(chunk.sequence)] if chunk.takes_pending else -1)

    def pad(self, num_sequences: int) -> None:
        """With sequences that have nothing: a token each among the decode rows, none among the prompts."""
        num_missing = num_sequences - len(self._rows)
        self._rows += [PADDED_ROW] * num_missing
        self._chunks += [None] * num_missing
        if num_sequences == self._shape.num_decodes:
            self._last_rows += range(len(self._token_ids), num_sequences)
            self._token_ids += [0] * num_missing
        else:
            self._last_rows += [0] * num_missing

    def _add_row(self, chunk: Chunk, pending: int) -> None:
        """The sequence whose tokens came last, and all of its blocks but the last one that its seat does not know."""
        seat = self._seats.take(chunk.sequence, self._number)
        last = (chunk.start + chunk.num_tokens - 1) // self._block_size
        if (known := seat.num_blocks) < last:
            self._segments.append((seat.number, known, last - known, len(self._blocks)))
            self._blocks += chunk.blocks[known:last]
        seat.num_blocks = last + 1
        last_row = len(self._token_ids) - 1
        self._rows.append((last_row, pending, seat.number, last, chunk.blocks[last], 0, 0, 0))
        self._last_rows.append(last_row)
        self._chunks.append(chunk)

    def packed(self) -> PackedStep:
        rows = _ints(self._rows)
        sampled = tuple(chunk if chunk is not None and chunk.samples else None for chunk in self._chunks)
        scored = [(chunk, row) for chunk, row in zip(self._chunks, self._last_rows, strict=True) if _is_scored(chunk)]
        prompts = [chunk for chunk in self._chunks[self._shape.num_decodes :] if chunk is not None]
        return PackedStep(
            number=self._number,
            shape=self._shape,
            arrays=self._arrays(rows, prompts, scored),
            prompt_spans=tuple(range(chunk.start, chunk.end) for chunk in prompts),
            sampled=sampled,
            sampled_seats=np.where([chunk is not None for chunk in sampled], rows[:, 2], -1),
            scored=tuple(chunk for chunk, _ in scored if chunk is not None),
            newcomers=self._seats.end_step(),
        )

    def _arrays(
        self, rows: Ints, prompts: Seq[Chunk], scored: Seq[tuple[Chunk | None, int]]
    ) -> StepArrays:
        shape, num_prompts = self._shape, len(prompts)
        lengths = _ints(0 if chunk is None else chunk.start + chunk.num_tokens for chunk in self._chunks)
        positions = np.maximum(lengths[: shape.num_decodes] - 1, 0)
        slots = rows[: shape.num_decodes, 4] * self._block_size + positions % self._block_size
        slots[lengths[: shape.num_decodes] == 0] = NO_SLOT
        ends = np.cumsum([0, *(chunk.num_tokens for chunk in prompts)], dtype=np.int32)
        padding = (0, shape.num_prompts - num_prompts)
        every = (range(row + 1 - chunk.num_tokens, row + 1) for chunk, row in scored if chunk is not None)
        return StepArrays(
            token_ids=_filled(shape.num_tokens, 0, [_ints(self._token_ids)]),
            positions=_filled(shape.num_tokens, 0, [positions, *(_positions(chunk) for chunk in prompts)]),
            slots=_filled(shape.num_tokens, NO_SLOT, [slots, *(self._slots(chunk) for chunk in prompts)]),
            lengths=lengths,
            rows=rows,
            query_starts=np.pad(ends, padding, mode="edge"),
            starts=np.pad(_ints(chunk.start for chunk in prompts), padding),
            outputs=_ints([*self._last_rows, *(row for rows_of_chunk in every for row in rows_of_chunk)]),
            segments=_ints(self._segments).reshape(-1, 4),
            blocks=_ints(self._blocks),
        )

    def _slots(self, chunk: Chunk) -> Ints:
        first = chunk.start // self._block_size
        blocks = _ints(chunk.blocks[first : (chunk.end - 1) // self._block_size + 1])
        slots = (blocks[:, None] * self._block_size + np.arange(self._block_size, dtype=np.int32)).reshape(-1)
        return slots[chunk.start - first * self._block_size :][: chunk.num_tokens]


def _is_scored(chunk: Chunk | None) -> bool:
    return chunk is not None and scores_prompt(chunk)


def _positions(chunk: Chunk) -> Ints:
    return np.arange(chunk.start, chunk.end, dtype=np.int32)


def _filled(size: int, fill: int, parts: Seq[Ints]) -> Ints:
    """The parts one after the other, filled up to ``size``."""
    whole = np.full(size, fill, dtype=np.int32)
    known = np.concatenate(parts)
    whole[: len(known)] = known
    return whole


def _ints(values: Iterable[object]) -> Ints:
    return np.array(list(values), dtype=np.int32)
