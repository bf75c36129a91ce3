"""Attention kernels against the float64 twin, over pools that hold NaN wherever nothing visible was stored.

On a machine without a GPU the kernels run in Triton's interpreter.
"""

import os
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from crossdock.kernels import reference

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from crossdock.kernels.paged_attention import decode_attention, prefill_attention  # noqa: E402
from crossdock.kernels.split_context import DecodeWorkspace, decode_workspace, plan_decode  # noqa: E402

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
NUM_LAYERS, LAYER = 3, 1


@dataclass(frozen=True)
class Shape:
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    dtype: torch.dtype = torch.float32
    window: int = 0
    softcap: float = 0.0


@dataclass(frozen=True)
class Cache:
    """A layer's view of a pool, and the blocks of each sequence in it."""

    kv: Tensor
    block_tables: Tensor


def stored(shape: Shape, lengths: list[int], num_queries: list[int], seed: int = 0) -> Cache:
    """``lengths`` tokens of each sequence at random places; what no query can see holds NaN, and so does the rest."""
    generator = torch.Generator().manual_seed(seed)
    num_blocks = [-(-length // shape.block_size) for length in lengths]
    order = torch.randperm(sum(num_blocks) + 3, generator=generator).tolist()
    pool = torch.full((len(order), NUM_LAYERS, 2, shape.num_kv_heads, shape.block_size, shape.head_dim), torch.nan)
    tables = torch.full((len(lengths), max(num_blocks) + 2), 1 << 30, dtype=torch.int32)
    for table, count, length, queries in zip(tables, num_blocks, lengths, num_queries, strict=True):
        blocks = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64)
        table[:count] = blocks
        first = max(0, length - queries + 1 - shape.window) if shape.window else 0
        tokens = torch.arange(first, length)
        new = torch.randn(length - first, 2, shape.num_kv_heads, shape.head_dim, generator=generator)
        pool[blocks[tokens // shape.block_size], LAYER, :, :, tokens % shape.block_size] = new
    return Cache(pool.to(shape.dtype).to(DEVICE)[:, LAYER], tables.to(DEVICE))


def random_queries(shape: Shape, num_tokens: int) -> Tensor:
    """The first heads of wider rows, as in the matrix that the QKV product gives."""
    rows = torch.randn(num_tokens, shape.num_heads + 3, shape.head_dim, generator=torch.Generator().manual_seed(1))
    return rows.to(shape.dtype).to(DEVICE)[:, : shape.num_heads]


def integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def starts_of(counts: list[int]) -> list[int]:
    return [sum(counts[:i]) for i in range(len(counts) + 1)]


def assert_close(out: Tensor, expected: Tensor) -> None:
    error = (out.double() - expected).norm() / expected.norm()
    assert error < TOLERANCE[out.dtype]


def check_decode(
    shape: Shape,
    lengths: list[int],
    num_queries: list[int] | None = None,
    num_programs: int = 16,
    workspace: DecodeWorkspace | None = None,
) -> None:
    """``num_queries`` of each sequence, one without it."""
    counts = num_queries or [1] * len(lengths)
    cache, q, ends = stored(shape, lengths, counts), random_queries(shape, sum(counts)), integers(lengths)
    starts = integers(starts_of(counts)) if num_queries else None
    sizes = (shape.num_heads, shape.num_kv_heads, shape.head_dim)
    if workspace is None:
        workspace = decode_workspace(len(lengths), *sizes, DEVICE, max(counts), num_programs)
    out, expected = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan, dtype=torch.float64)
    rules = (0.1, shape.window, shape.softcap, starts)
    reference.decode_attention(q.double(), cache.kv.double(), cache.block_tables, ends, expected, None, *rules)
    plan_decode(ends, workspace, shape.window)
    decode_attention(q, cache.kv, cache.block_tables, ends, out, workspace, *rules)
    assert_close(out, expected)
    assert not workspace.arrived.any()


def check_prefill(shape: Shape, starts: list[int], num_queries: list[int]) -> None:
    lengths = [start + count for start, count in zip(starts, num_queries, strict=True)]
    cache, q = stored(shape, lengths, num_queries), random_queries(shape, sum(num_queries))
    out, expected = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan, dtype=torch.float64)
    where = (integers(starts_of(num_queries)), integers(starts), cache.block_tables)
    rules = (0.1, shape.window, shape.softcap)
    reference.prefill_attention(q.double(), cache.kv.double(), *where, expected, *rules)
    prefill_attention(q, cache.kv, *where, out, *rules)
    assert_close(out, expected)


SHAPES = [
    Shape(),
    Shape(dtype=torch.float16, block_size=32),
    Shape(num_heads=6, num_kv_heads=2, head_dim=80),
    Shape(num_heads=3, num_kv_heads=3, head_dim=96, block_size=64),
    Shape(num_heads=7, num_kv_heads=1, head_dim=128, dtype=torch.float16),
    Shape(num_heads=4, num_kv_heads=2, head_dim=256, block_size=128),
    Shape(window=40),
    Shape(window=100, softcap=5.0, dtype=torch.float16),
]
each_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


@each_shape
def test_decode_attends_to_all_that_is_stored_and_to_nothing_else(shape: Shape) -> None:
    check_decode(shape, [1, 16, 17, 150])


@each_shape
def test_prefill_attends_causally_over_chunks_of_any_length_and_start(shape: Shape) -> None:
    check_prefill(shape, [0, 37, 96, 5], [70, 33, 1, 130])


@pytest.mark.parametrize("num_programs", [2, 6, 64])
def test_a_long_context_is_split_and_added_up(num_programs: int) -> None:
    check_decode(Shape(), [900, 3, 400], num_programs=num_programs)


def test_more_parts_than_are_added_up_at_once() -> None:
    check_decode(Shape(num_heads=2), [64 * 21], num_programs=80)


def test_padded_rows_get_zeros() -> None:
    shape, ends = Shape(), integers([20, 0])
    cache, q = stored(shape, [20, 0], [1, 1]), random_queries(shape, 2)
    workspace, out = decode_workspace(2, 4, 2, 64, DEVICE, num_programs=4), torch.full_like(q, torch.nan)
    plan_decode(ends, workspace)
    decode_attention(q, cache.kv, cache.block_tables, ends, out, workspace, 0.1)
    assert not out[1].any()
    assert out[0].isfinite().all()


@pytest.mark.parametrize("shape", [Shape(), Shape(window=50), Shape(num_heads=6, head_dim=80, dtype=torch.float16)])
def test_several_queries_a_sequence_see_one_token_more_each(shape: Shape) -> None:
    check_decode(shape, [300, 4, 65, 130], [4, 4, 1, 3])


def test_the_same_number_of_queries_for_each_sequence_needs_no_list() -> None:
    shape, ends = Shape(), integers([70, 9])
    cache, q = stored(shape, [70, 9], [3, 3]), random_queries(shape, 6)
    workspace = decode_workspace(2, 4, 2, 64, DEVICE, max_query_len=3, num_programs=4)
    listed, unlisted = torch.full_like(q, torch.nan), torch.full_like(q, torch.nan)
    plan_decode(ends, workspace)
    decode_attention(q, cache.kv, cache.block_tables, ends, unlisted, workspace, 0.1)
    rows = integers([0, 3, 6])
    decode_attention(q, cache.kv, cache.block_tables, ends, listed, workspace, 0.1, query_starts=rows)
    assert torch.equal(listed, unlisted)


def test_a_short_chunk_behind_a_long_prefix_is_split_like_decode() -> None:
    check_decode(Shape(), [500], [40], num_programs=8)


def test_a_workspace_serves_smaller_batches_one_after_the_other() -> None:
    workspace = decode_workspace(6, 4, 2, 64, DEVICE, num_programs=12)
    for lengths in ([200, 100, 5, 5, 0, 300], [1000], [20, 700]):
        check_decode(Shape(), lengths, workspace=workspace)


def test_rows_of_no_sequence_are_left_alone() -> None:
    shape = Shape()
    cache, q = stored(shape, [30, 20], [30, 20]), random_queries(shape, 60)
    out = torch.full_like(q, 7.0)
    bounds, starts = integers([5, 35, 55]), integers([0, 0])
    prefill_attention(q, cache.kv, bounds, starts, cache.block_tables, out, 0.1)
    assert (out[:5] == 7).all()
    assert (out[55:] == 7).all()
    assert (out[5:55] != 7).all()


def test_an_empty_sequence_among_others_changes_nothing() -> None:
    check_prefill(Shape(), [0, 0, 10], [20, 0, 40])


def test_items_cover_each_context_once_in_parts_of_equal_size() -> None:
    workspace = decode_workspace(4, 2, 2, 64, DEVICE, num_programs=10)
    plan_decode(integers([640, 0, 100]), workspace)
    assert workspace.items[:8, :5].tolist() == [
        [0, 0, 256, 0, 3],
        [0, 256, 512, 0, 3],
        [0, 512, 640, 0, 3],
        [1, 0, 0, 3, 1],
        [2, 0, 100, 4, 1],
        *[[-1, -1, -1, -1, -1]] * 3,
    ]


def test_items_leave_out_what_lies_before_the_window() -> None:
    workspace = decode_workspace(1, 2, 2, 64, DEVICE, num_programs=4)
    plan_decode(integers([1000]), workspace, window=100)
    assert workspace.items[:2, :5].tolist() == [[0, 896, 960, 0, 2], [0, 960, 1000, 0, 2]]


def test_random_batches() -> None:
    generator = torch.Generator().manual_seed(2)
    for seed in range(6):
        lengths = torch.randint(0, 260, (5,), generator=generator).tolist()
        counts = torch.randint(1, 60, (3,), generator=generator).tolist()
        shape = replace(SHAPES[seed % len(SHAPES)], window=int(torch.randint(0, 2, (), generator=generator)) * 77)
        check_decode(shape, lengths, num_programs=seed + 1)
        check_prefill(shape, lengths[:3], counts)
