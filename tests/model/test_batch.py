"""Rows, positions and slots of a step, in every order of chunks."""

import torch

from crossdock.core.kv_layout import KvLayout
from crossdock.core.request import Request, RequestId, SamplingParams, pack_ids
from crossdock.core.sequence import Chunk, Sequence
from crossdock.model.batch import Batch, build_batch

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=4, dtype="float32")


def chunk(start: int, num_tokens: int, *blocks: int) -> Chunk:
    params = SamplingParams(max_tokens=1, seed=0)
    sequence = Sequence.of(Request(request_id=RequestId("r"), prompt=pack_ids([1]), params=params))
    return Chunk(sequence, start, num_tokens, False, False, blocks)


def batch_of(*chunks: Chunk) -> Batch:
    """Token ids count up from 100, so that an id tells its row in chunk order."""
    num_tokens = sum(chunk.num_tokens for chunk in chunks)
    return build_batch(chunks, torch.arange(100, 100 + num_tokens), LAYOUT)


def test_a_prompt_span_fills_the_slots_of_its_blocks_from_its_start_on() -> None:
    batch = batch_of(chunk(3, 6, 7, 2, 9))
    assert batch.positions.tolist() == [3, 4, 5, 6, 7, 8]
    assert batch.slots.tolist() == [7 * 4 + 3, 2 * 4, 2 * 4 + 1, 2 * 4 + 2, 2 * 4 + 3, 9 * 4]
    (span,) = batch.prompts
    assert (span.first_row, span.start, span.num_tokens, span.blocks.tolist()) == (0, 3, 6, [7, 2, 9])
    assert batch.decodes.lengths == ()


def test_blocks_grown_beyond_the_chunk_are_left_out() -> None:
    batch = batch_of(chunk(0, 1, 5, 6, 7), chunk(0, 4, 8, 9))
    assert batch.decodes.block_table.tolist() == [[5]]
    assert batch.prompts[0].blocks.tolist() == [8]


def test_decode_rows_come_longest_first_with_tables_padded_by_their_own_block() -> None:
    batch = batch_of(chunk(2, 1, 1), chunk(9, 1, 4, 5, 6), chunk(4, 1, 2, 3))
    assert batch.decodes.lengths == (10, 5, 3)
    assert batch.decodes.block_table.tolist() == [[4, 5, 6], [2, 3, 2], [1, 1, 1]]
    assert batch.positions.tolist() == [9, 4, 2]
    assert batch.slots.tolist() == [6 * 4 + 1, 3 * 4, 1 * 4 + 2]
    assert batch.token_ids.tolist() == [101, 102, 100]


def test_outputs_bring_mixed_rows_back() -> None:
    batch = batch_of(chunk(0, 3, 1), chunk(4, 1, 2, 3), chunk(0, 2, 4), chunk(8, 1, 5, 6, 7))
    assert batch.token_ids.tolist() == [106, 103, 100, 101, 102, 104, 105]
    assert batch.outputs is not None
    assert batch.token_ids[batch.outputs].tolist() == [100, 101, 102, 103, 104, 105, 106]
    assert batch.chunk_rows == (range(3), range(3, 4), range(4, 6), range(6, 7))
    assert [span.first_row for span in batch.prompts] == [2, 5]


def test_rows_already_in_order_are_not_moved() -> None:
    assert batch_of(chunk(8, 1, 5, 6, 7), chunk(4, 1, 2, 3), chunk(0, 2, 4)).outputs is None


def test_a_prompt_of_one_token_is_a_decode_row() -> None:
    batch = batch_of(chunk(0, 1, 3))
    assert (batch.decodes.lengths, batch.prompts) == ((1,), ())


def test_only_the_rows_that_are_wanted_are_put_out_in_the_order_of_the_chunks() -> None:
    chunks = (chunk(0, 3, 1), chunk(4, 1, 2, 3), chunk(0, 2, 4))
    batch = build_batch(chunks, torch.arange(100, 106), LAYOUT, wanted=[2, 3])
    assert batch.outputs is not None
    assert batch.token_ids[batch.outputs].tolist() == [102, 103]
    assert build_batch(chunks[1:2], torch.arange(1), LAYOUT, wanted=[0]).outputs is None
    none = build_batch(chunks[:1], torch.arange(3), LAYOUT, wanted=[])
    assert none.outputs is not None and none.outputs.tolist() == []
