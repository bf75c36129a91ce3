"""How a sequence advances: chunk by chunk through its prompt, then token by token, one step ahead of the device."""

import pytest

from crossdock.core.request import Request, RequestId, SamplingParams, pack_ids
from crossdock.core.sequence import Chunk, ChunkResult, FinishReason, Sequence, settle, take_chunk, take_next

STOP_ID = 99


def sequence_of(num_prompt: int, max_tokens: int = 3) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens, stop_token_ids=(STOP_ID,))
    sequence = Sequence.of(Request(request_id=RequestId("r"), prompt=pack_ids([7] * num_prompt), params=params))
    sequence.blocks = [4, 2]
    return sequence


def sampled(chunk: Chunk, token_id: int) -> FinishReason | None:
    return settle(chunk, ChunkResult(token_id))


def test_a_new_sequence_has_computed_nothing() -> None:
    sequence = sequence_of(5)
    assert sequence.token_ids.tolist() == [7] * 5
    assert (sequence.num_prompt, sequence.num_tokens, sequence.num_output) == (5, 5, 0)
    assert (sequence.num_unscheduled, sequence.num_computed) == (5, 0)


def test_a_prompt_in_two_chunks_samples_with_the_second() -> None:
    sequence = sequence_of(5)
    first, second = take_chunk(sequence, 3), take_chunk(sequence, 2)
    assert (first.start, first.end, first.samples, first.takes_pending) == (0, 3, False, False)
    assert (second.start, second.end, second.samples, second.takes_pending) == (3, 5, True, False)
    assert (second.output_index, second.blocks) == (0, [4, 2])
    assert (sequence.num_in_flight, sequence.num_pending, sequence.num_tokens) == (2, 1, 6)
    assert settle(first, ChunkResult(None)) is None
    assert (sequence.num_computed, sequence.output_ids) == (3, [])
    assert sampled(second, 50) is None
    assert (sequence.num_computed, sequence.output_ids, sequence.num_pending) == (5, [50], 0)


def test_the_next_step_starts_before_the_token_is_known() -> None:
    sequence = sequence_of(5)
    prompt = take_chunk(sequence, 5)
    ahead = take_chunk(sequence, 1)
    assert (ahead.start, ahead.takes_pending, ahead.samples, ahead.output_index) == (5, True, True, 1)
    assert (sequence.num_pending, sequence.num_tokens, len(sequence.token_ids)) == (2, 7, 5)
    sampled(prompt, 50)
    after = take_chunk(sequence, 1)
    assert (after.takes_pending, after.output_index) == (True, 2)
    sampled(ahead, 51)
    sampled(after, 52)
    assert (sequence.output_ids, sequence.num_computed) == ([50, 51, 52], 7)


def test_a_step_after_its_token_is_known_takes_it_from_the_host() -> None:
    sequence = sequence_of(5)
    sampled(take_chunk(sequence, 5), 50)
    assert take_chunk(sequence, 1).takes_pending is False


def test_nothing_is_sampled_beyond_max_tokens() -> None:
    sequence = sequence_of(5, max_tokens=2)
    chunks = [take_chunk(sequence, 5), take_chunk(sequence, 1)]
    assert sequence.is_at_limit
    assert take_chunk(sequence, 1).samples is False
    assert [sampled(chunk, 50) for chunk in chunks] == [None, FinishReason.LENGTH]


def test_a_stop_token_ends_the_sequence_and_wins_over_the_length() -> None:
    first, last = sequence_of(5), sequence_of(5, max_tokens=1)
    assert sampled(take_chunk(first, 5), STOP_ID) is FinishReason.STOP
    assert sampled(take_chunk(last, 5), STOP_ID) is FinishReason.STOP
    assert last.output_ids == [STOP_ID]


@pytest.mark.parametrize("num_tokens", [0, -1, 6])
def test_a_chunk_covers_only_tokens_that_exist(num_tokens: int) -> None:
    with pytest.raises(AssertionError, match="a chunk covers tokens that exist"):
        take_chunk(sequence_of(5), num_tokens)


def test_a_chunk_keeps_the_blocks_it_was_planned_with() -> None:
    sequence = sequence_of(5)
    chunk = take_chunk(sequence, 5)
    sequence.blocks += [9]
    sequence.blocks = []
    assert chunk.blocks[:2] == [4, 2]


def fields(chunk: Chunk) -> list[object]:
    return [getattr(chunk, name) for name in Chunk.__struct_fields__ if name != "sequence"]


def decoding(max_tokens: int = 9) -> Sequence:
    """Its first token is known; it has two blocks."""
    sequence = sequence_of(5, max_tokens)
    sampled(take_chunk(sequence, 5), 50)
    return sequence


@pytest.mark.parametrize("is_ahead", [False, True])
def test_the_next_token_of_one_that_decodes_is_taken_as_any_chunk(is_ahead: bool) -> None:
    one, other = decoding(), decoding()
    if is_ahead:
        take_chunk(one, 1)
        take_chunk(other, 1)
    taken = take_next(one, block_size=4)
    assert taken is not None
    assert taken.sequence is one
    assert fields(taken) == fields(take_chunk(other, 1))
    counts = [(s.num_scheduled, s.num_in_flight, s.num_pending, s.num_computed) for s in (one, other)]
    assert counts[0] == counts[1]


def test_nothing_is_taken_where_something_else_must_be_done_first() -> None:
    prompt, at_limit, forked, full = sequence_of(5), decoding(max_tokens=1), decoding(), decoding()
    forked.may_share_tail = True
    preempted = decoding()
    preempted.blocks, preempted.num_scheduled, preempted.num_computed = [], 0, 0
    copying = decoding()
    copying.copy_from = 3
    for sequence, block_size in ((prompt, 4), (at_limit, 4), (forked, 4), (full, 2), (preempted, 4), (copying, 4)):
        before = (sequence.num_scheduled, sequence.num_in_flight, sequence.num_pending)
        assert take_next(sequence, block_size) is None
        assert (sequence.num_scheduled, sequence.num_in_flight, sequence.num_pending) == before
