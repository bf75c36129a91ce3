"""The reference kernels against definitions written out in float64, one token and one head at a time."""

import pytest
import torch
from torch import Tensor

from crossdock.kernels import reference

NUM_BLOCKS, NUM_LAYERS, NUM_KV_HEADS, HEAD_DIM = 24, 3, 2, 8


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pool(block_size: int) -> Tensor:
    """The middle layer of a pool that is full of numbers, so that reading a wrong slot shows."""
    return random(NUM_BLOCKS, NUM_LAYERS, 2, NUM_KV_HEADS, block_size, HEAD_DIM)[:, 1]


def attention(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """One query ``[num_heads, head_dim]``, ``keys, values [num_keys, num_kv_heads, head_dim]``."""
    group = len(q) // keys.shape[1]
    out = []
    for head, query in enumerate(q.double()):
        weights = (keys[:, head // group].double() @ query * scale).softmax(0)
        out.append(weights @ values[:, head // group].double())
    return torch.stack(out).float()


def keys_and_values(kv: Tensor, blocks: list[int]) -> tuple[Tensor, Tensor]:
    """What lies in the blocks, in the order of the tokens: two of ``[num_tokens, num_kv_heads, head_dim]``."""
    k, v = kv[blocks].transpose(0, 1)
    return k.transpose(1, 2).flatten(0, 1), v.transpose(1, 2).flatten(0, 1)


def visible(kv: Tensor, blocks: list[int], position: int, window: int | None) -> tuple[Tensor, Tensor]:
    keys, values = keys_and_values(kv, blocks)
    first = max(0, position + 1 - window) if window else 0
    return keys[first : position + 1], values[first : position + 1]


def test_rms_norm_is_the_weighted_quotient_by_the_root_mean_square() -> None:
    x, weight = random(5, 16), random(16, seed=1)
    expected = weight * x / (x.pow(2).mean(-1, keepdim=True) + 1e-3).sqrt()
    torch.testing.assert_close(reference.rms_norm(x, weight, 1e-3), expected)


def test_rms_norm_in_bfloat16_rounds_the_quotient_before_the_weight() -> None:
    x, weight = random(5, 16).bfloat16(), random(16, seed=1).bfloat16()
    quotient = x.float() * (x.float().pow(2).mean(-1, keepdim=True) + 1e-3).rsqrt()
    assert torch.equal(reference.rms_norm(x, weight, 1e-3), weight * quotient.bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rope_turns_each_pair_of_half_apart_dimensions_by_its_angle(dtype: torch.dtype) -> None:
    angles = random(5, 1, HEAD_DIM // 2, seed=1)
    x = random(5, 3, HEAD_DIM).to(dtype)
    turned = torch.complex(*x.float().chunk(2, -1)) * torch.polar(torch.ones_like(angles), angles)
    cos, sin = angles.cos(), angles.sin()
    reference.rope_(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    torch.testing.assert_close(x, torch.cat((turned.real, turned.imag), -1).to(dtype))


def test_silu_and_mul_gates_the_second_half_by_the_first() -> None:
    x = random(5, 12)
    expected = x[:, :6] * x[:, :6].sigmoid() * x[:, 6:]
    torch.testing.assert_close(reference.silu_and_mul(x), expected)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 5, 40])
def test_a_packed_weight_gives_the_plain_product(num_rows: int, has_bias: bool) -> None:
    x, weight, bias = random(num_rows, 24), random(36, 24, seed=1), random(36, seed=2) if has_bias else None
    out = reference.packed_linear(x, reference.pack_weight(weight), bias)
    torch.testing.assert_close(out, reference.linear(x, weight, bias))


def test_a_row_of_a_packed_product_is_the_same_to_the_bit_in_any_company() -> None:
    x, packed = random(150, 576), reference.pack_weight(random(960, 576, seed=1))
    together = reference.packed_linear(x, packed, None)
    for rows in (range(1), range(1, 3), range(3, 6), range(6, 13), range(13, 29), range(29, 79), range(79, 150)):
        assert torch.equal(reference.packed_linear(x[rows.start : rows.stop], packed, None), together[rows])


def test_packed_products_come_in_few_sizes_so_that_few_kernels_are_compiled_and_kept() -> None:
    sizes = [reference.padded_rows(num_rows) for num_rows in range(1, 2049)]
    assert all(0 <= size - n <= max(3, n / 8) for n, size in enumerate(sizes, start=1))
    assert (len(set(sizes[:512])), len(set(sizes))) == (40, 56)


@pytest.mark.parametrize("block_size", [4, 16])
def test_kv_store_writes_each_token_to_its_slot_and_nothing_else(block_size: int) -> None:
    kv, slots = pool(block_size), torch.tensor([3 * block_size + 2, 0, 23 * block_size + 3])
    new = random(3, 2 * NUM_KV_HEADS, HEAD_DIM, seed=1)
    whole = kv._base
    assert whole is not None
    before = whole.clone()
    reference.kv_store(kv, reference.store_rows(slots, kv), new)
    for token, slot in enumerate(slots.tolist()):
        expected = new[token].view(2, NUM_KV_HEADS, HEAD_DIM)
        assert torch.equal(kv[slot // block_size, :, :, slot % block_size], expected)
        before[slot // block_size, 1, :, :, slot % block_size] = expected
    assert torch.equal(whole, before)


@pytest.mark.parametrize("num_heads", [2, 4, 6, 14])
@pytest.mark.parametrize("window", [None, 1, 6, 1000])
@pytest.mark.parametrize("block_size", [4, 16, 24])
def test_decode_attention_reads_the_visible_tokens_of_each_sequence(
    block_size: int, window: int | None, num_heads: int
) -> None:
    kv, lengths = pool(block_size), [72, 65, 64, 33, 17, 9, 1]
    tables = [[(i + 3 * j) % NUM_BLOCKS for j in range(72 // block_size + 1)] for i in range(len(lengths))]
    q = random(len(lengths), num_heads, HEAD_DIM, seed=1)
    plans = reference.plan_decodes(lengths, torch.tensor(tables), kv, window)
    out = torch.cat([reference.paged_decode_attention(q[p.first : p.end], kv, p, 0.3) for p in plans])
    for row, length in enumerate(lengths):
        keys, values = visible(kv, tables[row], length - 1, window)
        torch.testing.assert_close(out[row], attention(q[row], keys, values, 0.3))


def pages_of(plans: list[reference.DecodePlan]) -> list[tuple[int, int]]:
    """Rows and blocks a row of each plan."""
    return [(p.end - p.first, len(p.pages) // (p.end - p.first) // (2 * NUM_KV_HEADS)) for p in plans]


def test_rows_that_end_in_the_same_tile_are_read_together_and_a_long_one_alone() -> None:
    table = torch.zeros(7, 50, dtype=torch.int64)
    plans = reference.plan_decodes([200, 130, 129, 64, 20, 2, 1], table, pool(4), None)
    assert pages_of(plans) == [(1, 64), (2, 48), (4, 16)]
    assert reference.plan_decodes([], table[:0], pool(4), None) == []


def test_a_window_limits_what_is_read() -> None:
    table = torch.zeros(2, 800, dtype=torch.int64)
    plans = reference.plan_decodes([3000, 1030], table, pool(4), window=5)
    assert pages_of(plans) == [(1, (3008 - 2560) // 4), (1, (1088 - 1024) // 4)]
    prompt = reference.plan_prompt(3000, 10, torch.zeros(753, dtype=torch.int64), pool(4), window=5)
    assert len(prompt.pages) == 2 * NUM_KV_HEADS * (3072 - 2560) // 4


@pytest.mark.parametrize("window", [None, 1, 6, 1000])
@pytest.mark.parametrize(("start", "num_tokens"), [(0, 13), (3, 2), (16, 13), (60, 36), (0, 64), (1, 95)])
def test_prompt_attention_reads_pages_up_to_each_token(start: int, num_tokens: int, window: int | None) -> None:
    kv, blocks = pool(4), torch.randperm(NUM_BLOCKS, generator=torch.Generator().manual_seed(3)).tolist()
    blocks = blocks[: -(-(start + num_tokens) // 4)]
    q = random(num_tokens, 6, HEAD_DIM, seed=1)
    out = reference.paged_prompt_attention(
        q, kv, reference.plan_prompt(start, num_tokens, torch.tensor(blocks), kv, window), 0.3
    )
    for row in range(num_tokens):
        keys, values = visible(kv, blocks, start + row, window)
        torch.testing.assert_close(out[row], attention(q[row], keys, values, 0.3))


@pytest.mark.parametrize("num_heads", [2, 6, 14])
@pytest.mark.parametrize("window", [None, 40, 700])
def test_attention_is_the_same_to_the_bit_however_the_tokens_are_cut_into_steps(
    window: int | None, num_heads: int
) -> None:
    kv, num_tokens = random(50, 1, 2, NUM_KV_HEADS, 16, 64)[:, 0], 797
    blocks, q = torch.arange(50), random(num_tokens, num_heads, 64, seed=1)
    whole = reference.paged_prompt_attention(q, kv, reference.plan_prompt(0, num_tokens, blocks, kv, window), 0.1)
    for start, end in ((0, 5), (5, 7), (7, 64), (64, 190), (190, 300), (511, 514), (514, 797), (796, 797)):
        plan = reference.plan_prompt(start, end - start, blocks, kv, window)
        assert torch.equal(reference.paged_prompt_attention(q[start:end], kv, plan, 0.1), whole[start:end])
    rows = [796, 795, 640, 639, 300, 299, 250, 200, 150, 63, 1, 0]
    for batch in (rows, *([row] for row in rows)):
        plans = reference.plan_decodes([row + 1 for row in batch], blocks.expand(len(batch), -1), kv, window)
        for p in plans:
            decoded = batch[p.first : p.end]
            assert torch.equal(reference.paged_decode_attention(q[decoded], kv, p, 0.1), whole[decoded])
