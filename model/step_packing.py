"""What a step uploads: everything the device must learn, as arrays of int32, packed by the host without the device."""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ..core.sequence import Chunk, Sequence
from .executor import BlockCopies, block_copies, forks_of, known_ids, wants_all_rows
from .seats import Seat, Seats
from .step_shapes import StepShape, StepShapes

PADDED_ROW = (0, -1, 0, -1, 0, 0, 0, 0)
NO_SLOT = -1
MAX_CONTEXT_AS_PROMPTS = 1 << 16
"""Tokens that decodes attend to, all together, when they count as prompts: attention over them is up to twice as slow
then, 2 ms of an 8B model on an H200, while launching a step without a graph takes 20."""

Ints = NDArray[np.int32]

NO_SEGMENTS: Ints = np.zeros((0, 4), dtype=np.int32)
NO_BLOCKS: Ints = np.zeros(0, dtype=np.int32)


@dataclass(frozen=True, slots=True)
class StepArrays:
    """What the device reads. Token rows are those of decodes, then those of prompts.

    ``token_ids, positions, slots [num_tokens]``, a negative slot keeps no KV; ``rows [num_sequences, 8]``, ``segments
    [num_segments, 4]`` and their ``blocks`` as in `kernels/step_inputs`; ``lengths [num_sequences]`` are tokens at the
    end of the step; of the prompts ``starts [num_prompts]`` are those before it, and ``query_starts [num_prompts + 1]``
    count from the first prompt's row. ``outputs`` are the rows whose output is wanted: one for each sequence, its last,
    then all rows of chunks whose prompts are scored or pooled.
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
    their seats, or -1. ``scored`` are the chunks whose prompts' log-probabilities, or pooled hidden states, are wanted,
    ``forked`` the places among ``sampled`` of those whose forks draw too. ``newcomers`` were seated by this step.
    ``copies`` come before all else. ``decodes`` are the sequences of a step in which each computes a token of its
    output and draws the next, in the order of the chunks, with their ``seats``; of other steps there are none.
    """

    number: int
    shape: StepShape
    arrays: StepArrays
    sampled: tuple[Chunk | None, ...]
    sampled_seats: Ints
    scored: tuple[Chunk, ...]
    forked: tuple[int, ...]
    newcomers: tuple[Seat, ...]
    copies: BlockCopies | None
    decodes: list[Sequence]
    seats: list[Seat]


class StepPacker:
    """Packs one step after the other."""

    def __init__(self, shapes: StepShapes, num_seats: int, block_size: int) -> None:
        self._shapes = shapes
        self._graphed = frozenset(shapes.graphed())
        self._seats = Seats(num_seats)
        self._block_size = block_size
        self._number = 0

    def pack(self, chunks: Seq[Chunk], previous: PackedStep | None) -> PackedStep:
        """``previous`` is the step launched before, if its results were not taken before this one was planned.

        Only then is it certain that its sequences kept their blocks. One-token chunks beside longer ones count as
        prompts where the step then has a graph.
        """
        self._number += 1 if previous is not None else 2
        if previous is not None and _is_repeated(previous, chunks):
            return self._repeat(previous, chunks)
        decodes = [chunk for chunk in chunks if chunk.num_tokens == 1]
        prompts = [chunk for chunk in chunks if chunk.num_tokens > 1]
        if decodes and prompts and self._has_graph(decodes, prompts):
            decodes, prompts = [], list(chunks)
        shape = self._shapes.padded(len(decodes), _sizes(prompts))
        step = _StepInMaking(shape, self._number, self._block_size, self._seats)
        if decodes:
            step.add_decodes(decodes)
        if prompts:
            step.add_prompts(prompts)
        return step.packed(block_copies(chunks, self._block_size))

    def _repeat(self, previous: PackedStep, chunks: Seq[Chunk]) -> PackedStep:
        """``previous`` again, each sequence a token further, which is most steps: only new blocks are looked for."""
        before, num_rows = previous.arrays, len(chunks)
        rows, positions, slots = before.rows.copy(), before.positions + 1, before.slots + 1
        rows[:num_rows, 1] = np.arange(num_rows)
        for index in map(int, np.flatnonzero(positions[:num_rows] % self._block_size == 0)):
            column = int(positions[index]) // self._block_size
            block = chunks[index].blocks[column]
            rows[index, 3:5] = column, block
            slots[index] = block * self._block_size
            previous.seats[index].num_blocks = column + 1
        lengths = positions + 1
        for column_of_padding, fill in ((positions, 0), (slots, NO_SLOT), (lengths, 0)):
            column_of_padding[num_rows:] = fill
        self._seats.keep(previous.seats, self._number)
        return replace(
            previous,
            number=self._number,
            arrays=replace(
                before,
                token_ids=np.zeros_like(before.token_ids),
                positions=positions,
                slots=slots,
                lengths=lengths,
                rows=rows,
                segments=NO_SEGMENTS,
                blocks=NO_BLOCKS,
            ),
            sampled=(*chunks, *previous.sampled[num_rows:]),
            newcomers=(),
            copies=None,
        )

    def _has_graph(self, decodes: Seq[Chunk], prompts: Seq[Chunk]) -> bool:
        """Whether they have one when all of them count as prompts, and are worth it."""
        shape = self._shapes.padded(0, _sizes([*decodes, *prompts]))
        return shape in self._graphed and sum(chunk.end for chunk in decodes) <= MAX_CONTEXT_AS_PROMPTS


def _is_repeated(previous: PackedStep, chunks: Seq[Chunk]) -> bool:
    """Whether those of the step before, and no others, compute the token that it draws, and draw the next."""
    if len(chunks) != len(previous.decodes):
        return False
    return previous.decodes == [chunk.sequence for chunk in chunks if chunk.samples and chunk.copy_from is None]


class _StepInMaking:
    """Collects a step, column by column: in Python a loop over 256 sequences costs as much as all of numpy here."""

    def __init__(self, shape: StepShape, number: int, block_size: int, seats: Seats) -> None:
        self._shape = shape
        self._number = number
        self._block_size = block_size
        self._seats = seats
        self._taken: list[Seat] = []
        self._chunks: list[Chunk | None] = []
        self._prompts: Seq[Chunk] = ()
        self._token_ids: list[Ints] = []
        self._rows = np.tile(_ints(PADDED_ROW), (shape.num_sequences, 1))
        self._lengths: Ints = np.zeros(shape.num_sequences, dtype=np.int32)
        self._last_rows: Ints = np.zeros(shape.num_sequences, dtype=np.int32)
        self._last_rows[: shape.num_decodes] = np.arange(shape.num_decodes)
        self._segments: list[tuple[int, int, int, int]] = []
        self._blocks: list[int] = []

    def add_decodes(self, chunks: Seq[Chunk]) -> None:
        """Padded with sequences that have a token each."""
        known = _ints(0 if c.takes_pending else c.sequence.token_ids[c.start] for c in chunks)
        self._token_ids.append(_filled(self._shape.num_decodes, 0, [known]))
        self._add(chunks, 0, self._shape.num_decodes)

    def add_prompts(self, chunks: Seq[Chunk]) -> None:
        """Behind the decodes, padded with sequences that have no token."""
        first, self._prompts = self._shape.num_decodes, chunks
        ends = first + np.cumsum(_sizes(chunks), dtype=np.int32)
        self._last_rows[first : first + len(chunks)] = ends - 1
        self._token_ids += [np.array(known_ids(chunk), dtype=np.int32) for chunk in chunks]
        self._add(chunks, first, self._shape.num_prompts)

    def _add(self, chunks: Seq[Chunk], first: int, num_padded: int) -> None:
        """Sequences ``first`` on, and those of their blocks that their seats do not know."""
        self._chunks += [*chunks, *[None] * (num_padded - len(chunks))]
        seats = [self._seats.take(chunk.sequence, self._number) for chunk in chunks]
        self._taken += seats
        here = slice(first, first + len(chunks))
        self._lengths[here] = [chunk.start + chunk.num_tokens for chunk in chunks]
        last_columns = (self._lengths[here] - 1) // self._block_size
        known = _ints(seat.num_blocks for seat in seats)
        for index in map(int, np.flatnonzero(known <= last_columns)):
            self._grow(seats[index], chunks[index], int(last_columns[index]))
        rows = self._rows[here]
        rows[:, 0] = self._last_rows[here]
        rows[:, 1] = [seat.place if chunk.takes_pending else -1 for seat, chunk in zip(seats, chunks, strict=True)]
        for place, seat in enumerate(seats, first):
            seat.place = place
        rows[:, 2] = [seat.number for seat in seats]
        rows[:, 3] = last_columns
        rows[:, 4] = [chunk.blocks[last] for chunk, last in zip(chunks, last_columns.tolist(), strict=True)]

    def _grow(self, seat: Seat, chunk: Chunk, last: int) -> None:
        """The last block travels with the sequence's row."""
        if (known := seat.num_blocks) < last:
            self._segments.append((seat.number, known, last - known, len(self._blocks)))
            self._blocks += chunk.blocks[known:last]
        seat.num_blocks = last + 1

    def packed(self, copies: BlockCopies | None) -> PackedStep:
        chunks = self._chunks
        in_prompt = [(p, c) for p, c in enumerate(chunks) if c is not None and c.start < c.sequence.num_prompt]
        scored = [place for place, chunk in in_prompt if wants_all_rows(chunk)]
        sampled = tuple([chunk if chunk is not None and chunk.samples else None for chunk in chunks])
        decodes = [chunk.sequence for chunk in sampled if chunk is not None]
        is_simple = not (self._shape.num_prompts or in_prompt) and len(decodes) == len(self._taken)
        return PackedStep(
            number=self._number,
            shape=self._shape,
            arrays=self._arrays(scored),
            sampled=sampled,
            sampled_seats=np.where([chunk is not None for chunk in sampled], self._rows[:, 2], -1),
            scored=tuple(chunk for _, chunk in in_prompt if wants_all_rows(chunk)),
            forked=tuple([place for place, chunk in in_prompt if forks_of(chunk)]),
            newcomers=self._seats.end_step(),
            copies=copies,
            decodes=decodes if is_simple else [],
            seats=self._taken if is_simple else [],
        )

    def _arrays(self, scored: Seq[int]) -> StepArrays:
        shape, prompts = self._shape, self._prompts
        positions = np.maximum(self._lengths[: shape.num_decodes] - 1, 0)
        slots = self._rows[: shape.num_decodes, 4] * self._block_size + positions % self._block_size
        slots[self._lengths[: shape.num_decodes] == 0] = NO_SLOT
        sizes = _filled(shape.num_prompts + 1, 0, [_ints([0, *_sizes(prompts)])])
        return StepArrays(
            token_ids=_filled(shape.num_tokens, 0, self._token_ids),
            positions=_filled(shape.num_tokens, 0, [positions, *(_positions(chunk) for chunk in prompts)]),
            slots=_filled(shape.num_tokens, NO_SLOT, [slots, *(self._slots(chunk) for chunk in prompts)]),
            lengths=self._lengths,
            rows=self._rows,
            query_starts=np.cumsum(sizes, dtype=np.int32),
            starts=_filled(shape.num_prompts, 0, [_ints(chunk.start for chunk in prompts)]),
            outputs=np.concatenate([self._last_rows, *(self._all_rows(number) for number in scored)]),
            segments=_ints(self._segments).reshape(-1, 4),
            blocks=_ints(self._blocks),
        )

    def _all_rows(self, number: int) -> Ints:
        chunk, end = self._chunks[number], int(self._last_rows[number]) + 1
        return np.arange(end - (chunk.num_tokens if chunk else 0), end, dtype=np.int32)

    def _slots(self, chunk: Chunk) -> Ints:
        first = chunk.start // self._block_size
        blocks = _ints(chunk.blocks[first : (chunk.end - 1) // self._block_size + 1])
        offsets = np.arange(self._block_size, dtype=np.int32)
        slots: Ints = np.add.outer(blocks * self._block_size, offsets).reshape(-1)
        return slots[chunk.start - first * self._block_size :][: chunk.num_tokens]


def _sizes(chunks: Seq[Chunk]) -> list[int]:
    return [chunk.num_tokens for chunk in chunks]


def _positions(chunk: Chunk) -> Ints:
    return np.arange(chunk.start, chunk.end, dtype=np.int32)


def _filled(size: int, fill: int, parts: Seq[Ints]) -> Ints:
    """The parts one after the other, filled up to ``size``."""
    whole: Ints = np.full(size, fill, dtype=np.int32)
    known = np.concatenate(parts)
    whole[: len(known)] = known
    return whole


def _ints(values: Iterable[object]) -> Ints:
    return np.array(list(values), dtype=np.int32)
