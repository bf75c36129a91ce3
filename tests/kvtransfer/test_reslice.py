"""Every element arrives at its place, once, however the two sides cut the model."""

from collections import Counter
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.kvtransfer.reslice import ByteRun, Cut, Share, TokenRun, byte_runs, shares, token_runs

NUM_LAYERS, HEAD_DIM = 4, 2
TOKEN_BYTES = HEAD_DIM * 4


def element(layer: np.ndarray, half: np.ndarray, head: np.ndarray, token: np.ndarray, dim: np.ndarray) -> np.ndarray:
    """A number that no other element has."""
    number: np.ndarray = (((layer * 2 + half) * 16 + head) * 512 + token) * HEAD_DIM + dim + 1
    return number.astype(np.float32)


def pool_of(cut: Cut, rank: int, num_tokens: int) -> np.ndarray:
    """A sequence's blocks as ``rank`` holds them, ``[block, layer, K or V, kv head, token, dim]``; 0 behind its end."""
    layers, heads = cut.layers(rank), cut.heads(rank)
    num_blocks = -(-num_tokens // cut.block_size)
    shape = (num_blocks, len(layers), 2, len(heads), cut.block_size, HEAD_DIM)
    block, layer, half, head, slot, dim = np.indices(shape)
    token = block * cut.block_size + slot
    return np.where(token < num_tokens, element(layer + layers.start, half, head + heads.start, token, dim), 0)


def shipped(sender: Cut, receiver: Cut, first: int, num_tokens: int) -> list[np.ndarray]:
    """What all receiving ranks hold after all runs of all shares were copied, byte by byte."""
    sources = [pool_of(sender, rank, num_tokens).astype(np.float32) for rank in range(sender.num_ranks)]
    arrived = [np.zeros_like(pool_of(receiver, rank, num_tokens), np.float32) for rank in range(receiver.num_ranks)]
    written: Counter[tuple[int, int, int]] = Counter()
    for share in shares(sender, receiver):
        source, target = sources[share.source], arrived[share.destination]
        for run in token_runs(first, num_tokens, sender.block_size, receiver.block_size):
            here = source[run.source].reshape(-1).view(np.uint8)
            there = target[run.destination].reshape(-1).view(np.uint8)
            for part in byte_runs(sender, receiver, share, run, TOKEN_BYTES):
                there[part.destination : part.destination + part.num_bytes] = here[
                    part.source : part.source + part.num_bytes
                ]
                written.update(
                    (share.destination, run.destination, byte)
                    for byte in range(part.destination, part.destination + part.num_bytes, TOKEN_BYTES)
                )
    assert set(written.values()) <= {1}, "nothing is written twice"
    return arrived


def sizes(num_kv_heads: int) -> list[int]:
    """Numbers of ranks that can share so many heads equally."""
    return [size for size in range(1, 9) if max(size, num_kv_heads) % min(size, num_kv_heads) == 0]


@pytest.mark.parametrize("num_kv_heads", [1, 2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize(("sender_block", "receiver_block"), [(16, 16), (16, 8), (16, 24)])
def test_every_element_arrives_at_every_pair_of_sizes(
    num_kv_heads: int, sender_block: int, receiver_block: int
) -> None:
    for sending, receiving in product(sizes(num_kv_heads), sizes(num_kv_heads)):
        sender = Cut(2, num_kv_heads, sender_block, tensor=sending)
        receiver = Cut(2, num_kv_heads, receiver_block, tensor=receiving)
        for rank, pool in enumerate(shipped(sender, receiver, 0, 41)):
            assert np.array_equal(pool, pool_of(receiver, rank, 41))


@settings(deadline=None)
@given(data=st.data())
def test_every_element_behind_the_reused_prefix_arrives_with_pipelines_too(data: st.DataObject) -> None:
    num_kv_heads = data.draw(st.sampled_from([1, 2, 3, 4, 6]))
    blocks, stages = st.integers(1, 20), st.integers(1, NUM_LAYERS)
    cuts = st.builds(
        Cut, st.just(NUM_LAYERS), st.just(num_kv_heads), blocks, st.sampled_from(sizes(num_kv_heads)), stages
    )
    sender, receiver = data.draw(cuts), data.draw(cuts)
    num_tokens = data.draw(st.integers(1, 60))
    first = data.draw(st.integers(0, num_tokens))
    block_size = receiver.block_size
    for rank, pool in enumerate(shipped(sender, receiver, first, num_tokens)):
        expected = pool_of(receiver, rank, num_tokens)
        token = np.arange(pool.shape[0])[:, None] * block_size + np.arange(block_size)
        expected[np.broadcast_to((token < first)[:, None, None, None, :, None], expected.shape)] = 0
        assert np.array_equal(pool, expected)


def test_equal_cuts_send_each_rank_its_own_and_a_block_in_one_run() -> None:
    cut = Cut(NUM_LAYERS, 8, 16, tensor=4)
    assert [(share.source, share.destination) for share in shares(cut, cut)] == [(rank, rank) for rank in range(4)]
    whole = NUM_LAYERS * 2 * 2 * 16 * TOKEN_BYTES
    assert byte_runs(cut, cut, shares(cut, cut)[1], TokenRun(5, 0, 5, 0, 16), TOKEN_BYTES) == [ByteRun(0, 0, whole)]


def test_one_rank_sends_its_heads_to_two_in_one_run_a_layer_half() -> None:
    sender, receiver = Cut(2, 4, 16), Cut(2, 4, 16, tensor=2)
    assert shares(sender, receiver) == [Share(0, 0, range(2), range(2)), Share(0, 1, range(2), range(2, 4))]
    head = 16 * TOKEN_BYTES
    runs = byte_runs(sender, receiver, shares(sender, receiver)[1], TokenRun(0, 0, 0, 0, 16), TOKEN_BYTES)
    assert runs == [ByteRun((4 * line + 2) * head, 2 * line * head, 2 * head) for line in range(4)]


def test_ranks_that_hold_the_same_head_share_the_work() -> None:
    sender, receiver = Cut(1, 2, 16, tensor=8), Cut(1, 2, 16, tensor=8)
    assert Counter(share.source for share in shares(sender, receiver)) == dict.fromkeys(range(8), 1)
    few = Cut(1, 2, 16, tensor=2)
    assert Counter(share.source for share in shares(few, receiver)) == {0: 4, 1: 4}


@pytest.mark.parametrize(("num_kv_heads", "tensor"), [(8, 3), (3, 8), (6, 4)])
def test_heads_that_ranks_cannot_share_equally_are_refused(num_kv_heads: int, tensor: int) -> None:
    with pytest.raises(ValueError, match=f"{num_kv_heads} KV heads can't be shared equally by {tensor} ranks"):
        Cut(NUM_LAYERS, num_kv_heads, 16, tensor=tensor)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="4 layers are too few for 5 ranks"):
        Cut(4, 1, 16, pipeline=5)
