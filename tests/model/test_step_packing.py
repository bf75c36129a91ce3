"""What a step uploads: rows, slots and blocks of any mixture of chunks, and only what the device does not know yet."""

import numpy as np
import pytest

from crossdock.core.sequence import Chunk, ChunkResult, Sequence, settle, take_chunk
from crossdock.model.step_packing import Ints, PackedStep, StepArrays, StepPacker
from crossdock.model.step_shapes import StepShape, StepShapes

from ..parts import request

BLOCK_SIZE = 4


def packer(max_num_seqs: int = 8) -> StepPacker:
    return StepPacker(StepShapes(max_num_seqs), 2 * max_num_seqs, BLOCK_SIZE)


def sequence(num_prompt: int, *blocks: int, first_id: int = 100, scored: bool = False) -> Sequence:
    found = Sequence.of(request("r", num_prompt, first_id=first_id, prompt_logprobs=0 if scored else None))
    found.blocks = list(blocks)
    return found


def chunk(of: Sequence, num_tokens: int) -> Chunk:
    return take_chunk(of, num_tokens)


def finish(packed: PackedStep, token_id: int = 7) -> None:
    for done in packed.sampled:
        if done is not None:
            settle(done, ChunkResult(token_id))


def segments(packed: PackedStep) -> list[tuple[int, list[int]]]:
    """First column and blocks of each run that is uploaded."""
    arrays = packed.arrays
    return [(int(first), arrays.blocks[at : at + n].tolist()) for _, first, n, at in arrays.segments]


def row(packed: PackedStep, number: int) -> tuple[int, ...]:
    """Place of the token, pending, last column, last block."""
    return tuple(packed.arrays.rows[number, [0, 1, 3, 4]].tolist())


def test_a_prompt_brings_its_ids_positions_slots_and_all_blocks() -> None:
    packed = packer().pack([chunk(sequence(6, 9, 5), 6)], None)
    arrays = packed.arrays
    assert packed.shape == StepShape(0, 4, 16, is_short=True)
    assert arrays.token_ids[:6].tolist() == [100, 101, 102, 103, 104, 105]
    assert arrays.positions[:6].tolist() == [0, 1, 2, 3, 4, 5]
    assert arrays.slots.tolist() == [36, 37, 38, 39, 20, 21, *[-1] * 10]
    assert (segments(packed), row(packed, 0)) == ([(0, [9])], (5, -1, 1, 5))
    assert (arrays.query_starts.tolist(), arrays.starts.tolist()) == ([0, 6, 6, 6, 6], [0, 0, 0, 0])
    assert (arrays.lengths.tolist(), arrays.outputs.tolist()) == ([6, 0, 0, 0], [5, 0, 0, 0])


def test_decoding_goes_on_without_any_block_but_the_last() -> None:
    pack, one = packer(), sequence(3, 9)
    first = pack.pack([chunk(one, 3)], None)
    one.blocks.append(5)
    second = pack.pack([chunk(one, 1)], first)
    assert (segments(second), row(second, 0)) == ([], (0, 0, 0, 9))
    finish(first)
    third = pack.pack([chunk(one, 1)], second)
    assert (segments(third), row(third, 0)) == ([], (0, 0, 1, 5))
    assert third.arrays.slots.tolist() == [5 * BLOCK_SIZE]
    assert third.newcomers == ()


def test_a_known_token_is_uploaded_and_a_pending_one_is_taken_from_where_it_was_drawn() -> None:
    pack, one, two = packer(), sequence(3, 1, 8), sequence(2, 2)
    first = pack.pack([chunk(one, 3), chunk(two, 2)], None)
    second = pack.pack([chunk(two, 1), chunk(one, 1)], first)
    assert (row(second, 0)[:2], row(second, 1)[:2]) == ((0, 1), (1, 0))
    finish(first, 50)
    finish(second, 51)
    third = pack.pack([chunk(one, 1)], None)
    assert (third.arrays.token_ids.tolist(), row(third, 0)[1]) == ([51], -1)


def test_a_sequence_that_missed_a_step_is_seated_anew() -> None:
    pack, one, two = packer(), sequence(9, 1, 2, 3), sequence(3, 4)
    first = pack.pack([chunk(one, 8)], None)
    second = pack.pack([chunk(two, 3)], first)
    one.blocks = [6, 7, 8]
    third = pack.pack([chunk(one, 1)], second)
    assert (segments(third), [seat.sequence for seat in third.newcomers]) == ([(0, [6, 7])], [one])


def test_without_a_step_before_nothing_is_trusted() -> None:
    pack, one = packer(), sequence(9, 1, 2, 3)
    pack.pack([chunk(one, 8)], None)
    assert segments(pack.pack([chunk(one, 1)], None)) == [(0, [1, 2])]


def test_a_prompt_in_chunks_uploads_each_block_once() -> None:
    pack, one = packer(), sequence(60, *range(20, 35))
    first = pack.pack([chunk(one, 40)], None)
    second = pack.pack([chunk(one, 20)], first)
    assert first.shape == StepShape(0, 4, 64, is_short=False)
    assert (first.arrays.slots[40:].tolist(), first.arrays.query_starts.tolist()) == ([-1] * 24, [0, 40, 40, 40, 40])
    assert (segments(first), segments(second)) == ([(0, list(range(20, 29)))], [(10, [30, 31, 32, 33])])
    assert (second.arrays.starts.tolist(), second.arrays.lengths.tolist()) == ([40, 0, 0, 0], [60, 0, 0, 0])
    assert (first.sampled[0], second.sampled[0] is not None) == (None, True)


def test_decode_rows_come_first_and_are_padded_with_rows_that_store_nothing() -> None:
    pack = packer()
    decodes = [sequence(1, block) for block in (1, 2, 3)]
    prompt = sequence(1040, *range(10, 270))
    packed = pack.pack([chunk(prompt, 1040), *(chunk(one, 1) for one in decodes)], None)
    arrays = packed.arrays
    assert packed.shape == StepShape(4, 4, 1044, is_short=False)
    assert arrays.slots.tolist()[:5] == [4, 8, 12, -1, 40]
    assert arrays.lengths.tolist() == [1, 1, 1, 0, 1040, 0, 0, 0]
    assert row(packed, 3) == (0, -1, -1, 0)
    assert arrays.outputs.tolist() == [0, 1, 2, 3, 1043, 0, 0, 0]
    assert arrays.query_starts.tolist() == [0, 1040, 1040, 1040, 1040]
    assert [place for place, one in enumerate(packed.sampled) if one is not None] == [0, 1, 2, 4]


def test_decodes_beside_a_prompt_count_as_prompts_where_the_step_then_has_a_graph() -> None:
    pack, one, two = packer(), sequence(3, 9), sequence(50, *range(20, 33))
    first = pack.pack([chunk(one, 3)], None)
    second = pack.pack([chunk(one, 1), chunk(two, 50)], first)
    arrays = second.arrays
    assert second.shape == StepShape(0, 4, 64, is_short=False)
    assert (row(second, 0), row(second, 1)) == ((0, 0, 0, 9), (50, -1, 12, 32))
    assert (arrays.positions[:2].tolist(), arrays.slots[:2].tolist()) == ([3, 0], [39, 80])
    assert (arrays.query_starts.tolist(), arrays.starts.tolist()) == ([0, 1, 51, 51, 51], [3, 0, 0, 0])
    assert (arrays.lengths.tolist(), arrays.outputs.tolist()) == ([4, 50, 0, 0], [0, 50, 0, 0])


def test_decodes_with_long_contexts_keep_their_own_attention_beside_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("crossdock.model.step_packing.MAX_CONTEXT_AS_PROMPTS", 5)
    decodes = [sequence(3, 9), sequence(3, 8)]
    for one in decodes:
        chunk(one, 2)
    packed = packer().pack([*(chunk(one, 1) for one in decodes), chunk(sequence(50, *range(20, 33)), 50)], None)
    assert packed.shape == StepShape(2, 4, 52, is_short=False)


def test_all_rows_of_a_scored_prompt_are_put_out_behind_the_last_ones() -> None:
    packed = packer().pack([chunk(sequence(1, 1, scored=True), 1), chunk(sequence(3, 2, scored=True), 3)], None)
    assert packed.arrays.outputs.tolist() == [0, 3, 0, 0, 0, 1, 2, 3]
    assert [one.num_tokens for one in packed.scored] == [1, 3]


def steps_of_five(pack: StepPacker, num_steps: int) -> list[PackedStep]:
    """Prompts of different lengths, then decodes a step ahead of their tokens; blocks are 10, 11, .. for the first.

    The prompts come in the opposite order, so that each token is drawn elsewhere once.
    """
    sequences = [sequence(2 + n, *range(10 * n + 10, 10 * n + 20)) for n in range(5)]
    packed = [pack.pack([chunk(one, one.num_prompt) for one in reversed(sequences)], None)]
    for _ in range(num_steps):
        packed.append(pack.pack([chunk(one, 1) for one in sequences], packed[-1]))
        finish(packed[-2])
    return packed


def test_a_step_of_the_same_sequences_is_packed_as_if_they_were_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seats too: what comes later, here a step without the second sequence, finds them as it should."""

    def later(pack: StepPacker, before: PackedStep) -> PackedStep:
        return pack.pack([chunk(one, 1) for one in (before.decodes[0], *before.decodes[2:])], before)

    repeating, others = packer(), packer()
    quick = steps_of_five(repeating, 9)
    quick.append(later(repeating, quick[-1]))
    monkeypatch.setattr("crossdock.model.step_packing._is_repeated", lambda previous, chunks: False)
    plain = steps_of_five(others, 9)
    plain.append(later(others, plain[-1]))
    assert [step.seats is quick[1].seats for step in quick] == [False, *[True] * 9, False]
    for one, other in zip(quick, plain, strict=True):
        assert (one.number, one.shape, one.newcomers == ()) == (other.number, other.shape, other.newcomers == ())
        for name in StepArrays.__dataclass_fields__:
            ours, theirs = getattr(one.arrays, name), getattr(other.arrays, name)
            assert (name, ours.dtype, ours.tolist()) == (name, theirs.dtype, theirs.tolist())
        assert one.sampled_seats.tolist() == other.sampled_seats.tolist()
        spans = [
            [c and (c.start, c.takes_pending, c.sequence.num_prompt) for c in step.sampled] for step in (one, other)
        ]
        assert spans[0] == spans[1]


def test_who_repeats_takes_the_pending_token_and_the_next_block() -> None:
    packed = steps_of_five(packer(), 3)[-1]
    assert packed.arrays.positions.tolist() == [4, 5, 6, 7, 8, 0, 0, 0]
    assert row(packed, 0) == (0, 0, 1, 11)
    assert packed.arrays.slots.tolist() == [44, 85, 126, 167, 208, -1, -1, -1]
    assert (packed.newcomers, packed.copies, segments(packed)) == ((), None, [])


def test_a_step_in_which_one_computes_its_prompt_or_draws_nothing_is_not_one_of_decodes() -> None:
    pack, again = packer(), sequence(2, 1, 3)
    for token_id in (7, 8):
        again.append(token_id)
    pack.pack([chunk(again, 2)], None)
    packed = pack.pack([chunk(again, 1)], None)
    assert (packed.sampled, packed.decodes, packed.seats) == ((None,), [], [])
    packed = pack.pack([chunk(again, 1)], packed)
    assert (packed.decodes, len(packed.seats)) == ([again], 1)
    packed = pack.pack([chunk(again, 1), chunk(sequence(1, 2), 1)], packed)
    assert (packed.decodes, packed.seats) == ([], [])


def test_seats_go_to_others_only_when_none_is_free() -> None:
    pack = packer(max_num_seqs=2)
    sequences = [sequence(1, block) for block in range(6)]
    seats: list[Ints] = []
    previous = None
    for first, second in ((0, 1), (2, 3), (4, 5)):
        previous = pack.pack([chunk(sequences[first], 1), chunk(sequences[second], 1)], previous)
        seats.append(previous.arrays.rows[:2, 2])
    assert sorted(np.concatenate(seats[:2]).tolist()) == [0, 1, 2, 3]
    assert sorted(seats[2].tolist()) == sorted(seats[0].tolist())
