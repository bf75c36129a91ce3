"""What a step uploads: everything the device must learn, as one array of int32, packed by the host without the device.

The host keeps *seats*: rows of a table on the device that list the blocks of a sequence from step to step (see
`kernels/step_inputs`). A sequence that took part in the step before has gained at most its next block since, which
travels with its row; any other is seated anew, all its blocks with it. Seats outlive their sequences until others need
them: steps in flight that still read a seat run before the one that writes it anew.
"""

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ..core.sequence import Chunk, Sequence
from .executor import known_ids, scores_prompt

PADDED_ROW = (0, -1, 0, -1, 0, 0, 0, 0)
NO_SLOT = -1

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """A chunk of several tokens: rows ``first_row`` on, positions ``start`` on."""

    first_row: int
    start: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What the device reads; rows are those of one-token chunks, then those of prompts.

    ``token_ids, positions, slots [num_tokens]``, a negative slot keeps no KV; ``lengths [num_decodes]``; ``rows
    [num_decodes + num_prompts, 8]``, ``segments [num_segments, 4]`` and their ``blocks`` as in `kernels/step_inputs`;
    ``query_starts [num_prompts + 1]``, counted from the first prompt's row, and ``starts [num_prompts]``; ``outputs``
    are the rows whose output is wanted, those to be sampled first.
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

    ``sampled[i]`` is the chunk whose token is the ``i``-th that the step draws, ``None`` if that token is not wanted;
    ``sampled_seats`` are the seats of these chunks, or -1.
    ``scored`` are the chunks whose prompts' log-probabilities are wanted: all rows of each are outputs, in this order,
    behind those that are sampled. ``newcomers`` were seated by this step.
    """

    number: int
    arrays: StepArrays
    prompts: tuple[PromptSpan, ...]
    sampled: tuple[Chunk | None, ...]
    sampled_seats: Ints
    scored: tuple[Chunk, ...]
    newcomers: tuple["Seat", ...]

    @property
    def num_decodes(self) -> int:
        """Padded rows included."""
        return len(self.arrays.lengths)

    def places(self) -> dict[int, int]:
        """Where the token of each sequence is among those drawn, by the sequence's ``id``."""
        return {id(chunk.sequence): place for place, chunk in enumerate(self.sampled) if chunk is not None}


@dataclass(slots=True, eq=False)
class Seat:
    """``num_blocks`` columns are on the device as of step ``step``."""

    number: int
    sequence: Sequence
    step: int
    num_blocks: int = 0


class Seats:
    """Which sequence sits where; at most ``num_seats / 2`` in one step, so that those of the step before stay."""

    def __init__(self, num_seats: int) -> None:
        self._free = list(range(num_seats))
        self._taken: dict[int, Seat] = {}
        self._newcomers: list[Seat] = []

    def take(self, sequence: Sequence, step: int) -> Seat:
        """The sequence's seat in this step; what it knows is void unless the sequence took part in the one before."""
        seat = self._taken.get(id(sequence))
        if seat is None:
            if not self._free:
                self._vacate(step)
            seat = self._taken[id(sequence)] = Seat(self._free.pop(), sequence, step)
            self._newcomers.append(seat)
        elif seat.step < step - 1:
            seat.num_blocks = 0
            self._newcomers.append(seat)
        seat.step = step
        return seat

    def end_step(self) -> tuple[Seat, ...]:
        """Those seated since the last call."""
        newcomers, self._newcomers = self._newcomers, []
        return tuple(newcomers)

    def _vacate(self, step: int) -> None:
        gone = [key for key, seat in self._taken.items() if seat.step < step - 1]
        self._free += [self._taken.pop(key).number for key in gone]


class StepPacker:
    """Packs one step after the other.

    ``pad_decodes(n)`` is the number of rows that ``n`` one-token chunks are padded to, ``pad_prompts(n)`` the number of
    sequences that ``n`` prompts are padded to: few sizes, for which kernels and graphs are made beforehand.
    """

    def __init__(
        self, num_seats: int, block_size: int, pad_decodes: Callable[[int], int], pad_prompts: Callable[[int], int]
    ) -> None:
        self._seats = Seats(num_seats)
        self._block_size = block_size
        self._pad_decodes = pad_decodes
        self._pad_prompts = pad_prompts
        self._number = 0

    def pack(self, chunks: Seq[Chunk], previous: PackedStep | None) -> PackedStep:
        """``previous`` is the step launched before, if its results were not taken before this one was planned.

        Only then is it certain that its sequences kept their blocks.
        """
        self._number += 1 if previous is not None else 2
        step = _StepInMaking(self._number, self._block_size, self._seats, previous.places() if previous else {})
        decodes = [chunk for chunk in chunks if chunk.num_tokens == 1]
        prompts = [chunk for chunk in chunks if chunk.num_tokens > 1]
        for chunk in decodes:
            step.add_decode(chunk)
        step.pad_decodes(self._pad_decodes(len(decodes)))
        for chunk in prompts:
            step.add_prompt(chunk)
        step.pad_prompts(self._pad_prompts(len(prompts)))
        return step.packed(self._seats.end_step())


class _StepInMaking:
    """Collects a step chunk by chunk; ``place_of`` says where the step before drew a sequence's pending token."""

    def __init__(self, number: int, block_size: int, seats: Seats, place_of: Mapping[int, int]) -> None:
        self._number = number
        self._block_size = block_size
        self._seats = seats
        self._place_of = place_of
        self._token_ids: list[int] = []
        self._rows: list[tuple[int, ...]] = []
        self._segments: list[tuple[int, int, int, int]] = []
        self._blocks: list[int] = []
        self._decodes: list[Chunk] = []
        self._num_padded = 0
        self._prompts: list[Chunk] = []
        self._spans: list[PromptSpan] = []

    def add_decode(self, chunk: Chunk) -> None:
        sequence = chunk.sequence
        if chunk.takes_pending:
            pending, token_id = self._place_of[id(sequence)], 0
        else:
            pending, token_id = -1, sequence.token_ids[chunk.start]
        self._add_row(chunk, len(self._token_ids), pending)
        self._token_ids.append(token_id)
        self._decodes.append(chunk)

    def add_prompt(self, chunk: Chunk) -> None:
        first = len(self._token_ids)
        pending = self._place_of[id(chunk.sequence)] if chunk.takes_pending else -1
        self._add_row(chunk, first + chunk.num_tokens - 1, pending)
        self._token_ids += known_ids(chunk)
        self._prompts.append(chunk)
        self._spans.append(PromptSpan(first, chunk.start, chunk.num_tokens))

    def pad_decodes(self, num_rows: int) -> None:
        self._num_padded = num_rows - len(self._decodes)
        self._token_ids += [0] * self._num_padded
        self._rows += [PADDED_ROW] * self._num_padded

    def pad_prompts(self, num_prompts: int) -> None:
        self._rows += [PADDED_ROW] * (num_prompts - len(self._prompts))

    def _add_row(self, chunk: Chunk, place: int, pending: int) -> None:
        """The chunk's sequence, and all of its blocks but the last that its seat does not know yet."""
        seat = self._seats.take(chunk.sequence, self._number)
        last = (chunk.start + chunk.num_tokens - 1) // self._block_size
        if (known := seat.num_blocks) < last:
            self._segments.append((seat.number, known, last - known, len(self._blocks)))
            self._blocks += chunk.blocks[known:last]
        seat.num_blocks = last + 1
        self._rows.append((place, pending, seat.number, last, chunk.blocks[last], 0, 0, 0))

    def packed(self, newcomers: tuple[Seat, ...]) -> PackedStep:
        prompt_rows = self._rows[len(self._decodes) + self._num_padded :]
        sampling = [(chunk, row[2]) for chunk, row in zip(self._prompts, prompt_rows, strict=False) if chunk.samples]
        decoding = zip(self._decodes, self._rows, strict=False)
        seats = [row[2] if chunk.samples else -1 for chunk, row in decoding]
        scored = tuple(chunk for chunk in (*self._decodes, *self._prompts) if scores_prompt(chunk))
        return PackedStep(
            number=self._number,
            arrays=self._arrays(scored),
            prompts=tuple(self._spans),
            sampled=(
                *(chunk if chunk.samples else None for chunk in self._decodes),
                *[None] * self._num_padded,
                *(chunk for chunk, _ in sampling),
            ),
            sampled_seats=_ints([*seats, *[-1] * self._num_padded, *(seat for _, seat in sampling)]),
            scored=scored,
            newcomers=newcomers,
        )

    def _arrays(self, scored: Seq[Chunk]) -> StepArrays:
        rows = np.array(self._rows, dtype=np.int32)
        num_decodes = len(self._decodes) + self._num_padded
        starts = np.zeros(num_decodes, dtype=np.int32)
        starts[: len(self._decodes)] = [chunk.start for chunk in self._decodes]
        is_real = rows[:num_decodes, 3] >= 0
        slots = np.where(is_real, rows[:num_decodes, 4] * self._block_size + starts % self._block_size, NO_SLOT)
        ends = np.cumsum([0, *(span.num_tokens for span in self._spans)], dtype=np.int32)
        num_prompts = len(rows) - num_decodes
        return StepArrays(
            token_ids=np.array(self._token_ids, dtype=np.int32),
            positions=np.concatenate([starts, *(_positions(span) for span in self._spans)]),
            slots=np.concatenate([slots, *(self._slots(chunk) for chunk in self._prompts)]),
            lengths=(starts + 1) * is_real,
            rows=rows,
            query_starts=np.pad(ends, (0, num_prompts - len(self._spans)), mode="edge"),
            starts=np.pad(_ints(span.start for span in self._spans), (0, num_prompts - len(self._spans))),
            outputs=self._outputs(num_decodes, scored),
            segments=_ints(self._segments).reshape(-1, 4),
            blocks=_ints(self._blocks),
        )

    def _slots(self, chunk: Chunk) -> Ints:
        first = chunk.start // self._block_size
        blocks = _ints(chunk.blocks[first : (chunk.end - 1) // self._block_size + 1])
        slots = (blocks[:, None] * self._block_size + np.arange(self._block_size, dtype=np.int32)).reshape(-1)
        return slots[chunk.start - first * self._block_size :][: chunk.num_tokens]

    def _outputs(self, num_decodes: int, scored: Seq[Chunk]) -> Ints:
        first_row = {id(chunk): row for row, chunk in enumerate(self._decodes)}
        first_row |= {id(chunk): span.first_row for span, chunk in zip(self._spans, self._prompts, strict=True)}
        last = [first_row[id(chunk)] + chunk.num_tokens - 1 for chunk in self._prompts if chunk.samples]
        each = [range(first_row[id(chunk)], first_row[id(chunk)] + chunk.num_tokens) for chunk in scored]
        return _ints([*range(num_decodes), *last, *(row for rows in each for row in rows)])


def _positions(span: PromptSpan) -> Ints:
    return np.arange(span.start, span.start + span.num_tokens, dtype=np.int32)


def _ints(values: Iterable[object]) -> Ints:
    return np.array(list(values), dtype=np.int32)
