"""Every kernel in plain torch: the truth that device kernels are tested against, and the CPU path.

The KV of one layer is a view ``kv [num_blocks, K or V, kv head, block_size, head_dim]`` of the pool, not
contiguous between blocks. A *page* is one head's K or V of one block, contiguous: the unit in which attention
gathers. Attention is planned once a step and run once a layer. Key ``j`` is visible to query ``i`` iff
``0 <= i - j`` and, with a window, ``i - j < window``.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

MASKED = float("-inf")


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x))`` over the last dimension, the quotient computed in float32 and rounded once."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, weight.shape, weight, eps)
    return weight * F.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)


def rope_(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate ``x [num_tokens, num_heads, head_dim]`` in place by ``cos, sin [num_tokens, 1, head_dim]``.

    ``cos`` and ``sin`` are float32; the first half of ``sin`` carries the minus sign of the rotation.
    """
    swapped = x.roll(x.shape[-1] // 2, -1)
    if x.dtype == torch.float32:
        x.mul_(cos).addcmul_(swapped, sin)
    else:
        x.copy_((x * cos).addcmul_(swapped.float(), sin))


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` of ``[num_tokens, 2 * size]``; overwrites its argument, the result is a view of it."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate, inplace=True).mul_(up)


def store_rows(slots: Tensor, kv: Tensor) -> Tensor:
    """Where `kv_store` puts each row, ``[num_tokens, 2 * num_kv_heads]``; the same for all layers.

    ``slots [num_tokens]`` are ``block * block_size + offset``; ``kv`` is any layer's view.
    """
    _, _, num_kv_heads, block_size, head_dim = kv.shape
    blocks, offsets = slots // block_size, slots % block_size
    heads = torch.arange(2 * num_kv_heads, device=slots.device) * block_size
    return (blocks * (kv.stride(0) // head_dim) + offsets)[:, None] + heads


def kv_store(kv: Tensor, rows: Tensor, new: Tensor) -> None:
    """Write ``new [num_tokens, 2 * num_kv_heads, head_dim]``, keys then values, to ``rows`` of `store_rows`."""
    _contiguous_runs(kv, kv.shape[-1])[rows] = new


@dataclass(frozen=True, slots=True)
class DecodePlan:
    """Decode rows ``first .. end`` and the pages they read: at most ``num_pages`` for each K or V head.

    ``pages [num_rows * 2 * num_kv_heads * num_pages]``; ``mask [num_rows, 1, 1, num_pages * block_size]`` is
    added to the scores.
    """

    first: int
    end: int
    num_pages: int
    pages: Tensor
    mask: Tensor
    workspace: Tensor


def plan_decodes(
    lengths: Sequence[int], block_table: Tensor, kv: Tensor, window: int | None, max_padding: int = 16
) -> list[DecodePlan]:
    """Rows of similar length together, at most ``max_padding`` blocks of padding in a group.

    ``lengths [num_rows]`` count the visible tokens before the window, ``block_table [num_rows, max_blocks]``.
    """
    block_size = kv.shape[3]
    first_blocks = [max(0, length - window) // block_size if window else 0 for length in lengths]
    num_blocks = [-(-length // block_size) - first for length, first in zip(lengths, first_blocks, strict=True)]
    plans = []
    for rows in group_by_length(num_blocks, max_padding):
        span = slice(rows.start, rows.stop)
        plans.append(
            _plan_group(rows, max(num_blocks[span]), first_blocks[span], lengths[span], block_table[span], kv, window)
        )
    return plans


def group_by_length(lengths: Sequence[int], max_padding: int) -> list[range]:
    """Cut the rows into runs that, padded to their longest, hold at most ``max_padding`` of padding."""
    groups: list[range] = []
    first, longest, total = 0, 0, 0
    for row, length in enumerate(lengths):
        longest, total = max(longest, length), total + length
        if longest * (row + 1 - first) - total > max_padding:
            groups.append(range(first, row))
            first, longest, total = row, length, length
    return [*groups, range(first, len(lengths))] if lengths else []


def _plan_group(
    rows: range,
    num_pages: int,
    first_blocks: Sequence[int],
    lengths: Sequence[int],
    block_table: Tensor,
    kv: Tensor,
    window: int | None,
) -> DecodePlan:
    block_size, device = kv.shape[3], kv.device
    columns = torch.tensor(first_blocks, device=device)[:, None] + torch.arange(num_pages, device=device)
    blocks = block_table.gather(1, columns.clamp(max=block_table.shape[1] - 1))
    positions = (columns[:, :, None] * block_size + torch.arange(block_size, device=device)).flatten(1)
    ends = torch.tensor(lengths, device=device)[:, None]
    mask = _mask(positions, ends - 1, window, kv.dtype)[:, None, None]
    pages = _page_rows(blocks, kv)
    workspace = torch.empty(len(pages), block_size * kv.shape[4], dtype=kv.dtype, device=device)
    return DecodePlan(rows.start, rows.stop, num_pages, pages, mask, workspace)


def paged_decode_attention(q: Tensor, kv: Tensor, plan: DecodePlan, scale: float) -> Tensor:
    """``q [num_rows, num_heads, head_dim]``, the rows of the plan -> the same shape.

    The query heads that share a KV head are the rows of one small attention.
    """
    _, _, num_kv_heads, block_size, head_dim = kv.shape
    torch.index_select(_contiguous_runs(kv, block_size * head_dim), 0, plan.pages, out=plan.workspace)
    gathered = plan.workspace.view(len(q), 2, num_kv_heads, -1, head_dim)
    grouped = q.view(len(q), num_kv_heads, -1, head_dim)
    out = F.scaled_dot_product_attention(grouped, gathered[:, 0], gathered[:, 1], attn_mask=plan.mask, scale=scale)
    return out.reshape(q.shape)


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """Pages and mask of a prompt span whose keys lie in blocks: ``mask [num_tokens, num_pages * block_size]``."""

    pages: Tensor
    mask: Tensor


def plan_prompt(start: int, num_tokens: int, blocks: Tensor, kv: Tensor, window: int | None) -> PromptPlan | None:
    """``None`` when the span's own rows are all it attends to, each to all before it.

    ``blocks [num_blocks]`` hold positions ``0 .. start + num_tokens``.
    """
    if start == 0 and (window is None or num_tokens <= window):
        return None
    block_size, device = kv.shape[3], kv.device
    first_block = max(0, start + 1 - window) // block_size if window else 0
    keys = torch.arange(first_block * block_size, len(blocks) * block_size, device=device)
    queries = torch.arange(start, start + num_tokens, device=device)[:, None]
    return PromptPlan(_page_rows(blocks[None, first_block:], kv), _mask(keys, queries, window, kv.dtype))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """A whole prompt at once: ``q [num_tokens, num_heads, head_dim]``, ``k, v [num_tokens, num_kv_heads, head_dim]``."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def paged_prompt_attention(q: Tensor, kv: Tensor, plan: PromptPlan, scale: float) -> Tensor:
    """``q [num_tokens, num_heads, head_dim]`` against pages, which hold the span's own KV too -> the same shape."""
    _, _, num_kv_heads, block_size, head_dim = kv.shape
    gathered = _contiguous_runs(kv, block_size * head_dim).index_select(0, plan.pages)
    k, v = gathered.view(2, 1, num_kv_heads, -1, head_dim)
    q = q.transpose(0, 1)[None]
    return F.scaled_dot_product_attention(q, k, v, plan.mask, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def _mask(keys: Tensor, queries: Tensor, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where a key position is visible to a query position, else minus infinity; the two broadcast."""
    visible = keys <= queries
    if window is not None:
        visible &= keys > queries - window
    return torch.zeros(visible.shape, dtype=dtype, device=keys.device).masked_fill_(~visible, MASKED)


def _page_rows(blocks: Tensor, kv: Tensor) -> Tensor:
    """``blocks [num_rows, num_pages]`` -> pages in the order ``[row, K or V, kv head, page]``, flat."""
    pages_a_block = kv.stride(0) // (kv.shape[3] * kv.shape[4])
    heads = torch.arange(2 * kv.shape[2], device=kv.device)
    return (blocks[:, None] * pages_a_block + heads[:, None]).flatten()


def _contiguous_runs(kv: Tensor, length: int) -> Tensor:
    """The memory from this layer's first element on to its last as rows of ``length``, other layers between."""
    end = (len(kv) - 1) * kv.stride(0) + kv[0].numel()
    return kv.as_strided((end // length, length), (length, 1))
