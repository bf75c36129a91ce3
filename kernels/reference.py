"""Every kernel in plain torch: the truth that device kernels are tested against, and the CPU path.

The KV of one layer is a view ``kv [num_blocks, K or V, kv head, block_size, head_dim]`` of the pool, not
contiguous between blocks. A *page* is one head's K or V of one block, contiguous: the unit in which attention
gathers. Attention is planned once a step and run once a layer. Key ``j`` is visible to query ``i`` iff
``0 <= i - j`` and, with a window, ``i - j < window``.

In float32 on a CPU a token's result depends on the tokens before it alone, to the last bit: not on the rows beside
it, the chunk it came in or what was cached. Matrix products and attention are cut so that sums always have the
same order; what is masked adds exact zeros.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from math import lcm

import torch
from torch import Tensor
from torch.nn import functional

MASKED = float("-inf")
ROWS_A_STEP = 4
"""Products of fewer rows, or of up to three odd ones, take kernels that round differently and are slower."""
KEYS_A_TILE = 64
"""Attention reads up to a border of such tiles of positions, so that how it sums depends on the position alone."""
KEYS_A_SUMMAND = 512
"""Attention on CPUs sums over so many keys at a time, counted from the first one read."""


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """``weight * (x / rms(x))`` over the last dimension, the quotient computed in float32 and rounded once."""
    if x.dtype == torch.float32:
        return functional.rms_norm(x, weight.shape, weight, eps)
    return weight * functional.rms_norm(x.float(), weight.shape, None, eps).to(x.dtype)


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
    """``silu(gate) * up`` of ``[num_tokens, 2 * size]``."""
    gate, up = gate_up.chunk(2, -1)
    return functional.silu(gate).mul_(up)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x [num_tokens, in]``, ``weight [out, in]``."""
    return functional.linear(x, weight, bias)


def pack_weight(weight: Tensor) -> Tensor:
    """``weight [out, in]`` in the blocked order that oneDNN's matrix product on CPUs reads, for `packed_linear`."""
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight)
    return packed


def packed_linear(x: Tensor, packed: Tensor, bias: Tensor | None) -> Tensor:
    """`linear` with a packed weight.

    For every number of rows oneDNN compiles and keeps another kernel of about 0.7 MB, up to 1024 of them, so rows are
    padded to few numbers.
    """
    num_rows = len(x)
    if num_padding := padded_rows(num_rows) - num_rows:
        x = functional.pad(x, (0, 0, 0, num_padding))
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out[:num_rows]


def padded_rows(num_rows: int) -> int:
    """The next multiple of an eighth of the power of two below: eight numbers an octave, at most an eighth more."""
    step = max(ROWS_A_STEP, (1 << num_rows.bit_length()) // 16)
    return -(-num_rows // step) * step


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
    """Decode rows ``first .. end``, which read equally many pages.

    ``pages [num_rows * 2 * num_kv_heads * num_pages]``; ``mask [num_rows, 1, 1, num_pages * block_size]`` is
    added to the scores; the pages of a layer are gathered into ``workspace``.
    """

    first: int
    end: int
    pages: Tensor
    mask: Tensor
    workspace: Tensor


def plan_decodes(lengths: Sequence[int], block_table: Tensor, kv: Tensor, window: int | None) -> list[DecodePlan]:
    """``lengths [num_rows]`` count a row's tokens, its own included; ``block_table [num_rows, max_blocks]`` holds them.

    Rows of similar length stand together, so that few plans are needed.
    """
    spans = [_key_span(max(0, length - window) if window else 0, length, kv.shape[3]) for length in lengths]
    plans, first = [], 0
    for _, group in groupby(spans, len):
        end = first + len(list(group))
        plans.append(_plan_rows(range(first, end), spans[first:end], lengths[first:end], block_table, kv, window))
        first = end
    return plans


def _plan_rows(
    rows: range, spans: Sequence[range], lengths: Sequence[int], block_table: Tensor, kv: Tensor, window: int | None
) -> DecodePlan:
    block_size, device = kv.shape[3], kv.device
    keys = torch.tensor([span.start for span in spans], device=device)[:, None] + torch.arange(
        len(spans[0]), device=device
    )
    columns = keys[:, ::block_size] // block_size
    blocks = block_table[rows.start : rows.stop].gather(1, columns.clamp(max=block_table.shape[1] - 1))
    queries = torch.tensor(lengths, device=device)[:, None] - 1
    pages = _page_rows(blocks, kv)
    workspace = torch.empty(len(pages), block_size * kv.shape[4], dtype=kv.dtype, device=device)
    return DecodePlan(rows.start, rows.stop, pages, _mask(keys, queries, window, kv.dtype)[:, None, None], workspace)


def paged_decode_attention(q: Tensor, kv: Tensor, plan: DecodePlan, scale: float) -> Tensor:
    """``q [num_rows, num_heads, head_dim]``, the rows of the plan -> the same shape.

    The query heads that share a KV head are the rows of one small attention.
    """
    num_kv_heads, block_size, head_dim = kv.shape[2:]
    torch.index_select(_contiguous_runs(kv, block_size * head_dim), 0, plan.pages, out=plan.workspace)
    k, v = plan.workspace.view(len(q), 2, num_kv_heads, -1, head_dim).unbind(1)
    grouped = q.reshape(len(q), num_kv_heads, -1, head_dim)
    num_rows = grouped.shape[2]
    out = functional.scaled_dot_product_attention(_pad_queries(grouped), k, v, plan.mask, scale=scale)
    return out[:, :, :num_rows].reshape(q.shape)


@dataclass(frozen=True, slots=True)
class PromptTile:
    """Rows of a span whose positions lie in one tile, and where among the gathered keys their own begin and end."""

    rows: slice
    keys: slice


@dataclass(frozen=True, slots=True)
class PromptPlan:
    """``pages [2 * num_kv_heads * num_pages]`` and ``mask [num_tokens + 3, num_pages * block_size]`` of a span."""

    pages: Tensor
    mask: Tensor
    tiles: tuple[PromptTile, ...]


def plan_prompt(start: int, num_tokens: int, blocks: Tensor, kv: Tensor, window: int | None) -> PromptPlan:
    """``blocks [num_blocks]`` hold positions ``0 .. start + num_tokens``."""
    block_size, end, step = kv.shape[3], start + num_tokens, _tile_size(kv.shape[3])
    borders = [start, *range(start // step * step + step, end, step), end]
    spans = [_key_span(max(0, a + 1 - window) if window else 0, b, block_size) for a, b in pairwise(borders)]
    origin = spans[0].start
    tiles = [
        PromptTile(slice(a - start, b - start), slice(span.start - origin, span.stop - origin))
        for (a, b), span in zip(pairwise(borders), spans, strict=True)
    ]
    keys = torch.arange(origin, spans[-1].stop, device=kv.device)
    columns = (keys[::block_size] // block_size).clamp(max=len(blocks) - 1)
    queries = torch.arange(start, end + ROWS_A_STEP - 1, device=kv.device)[:, None]
    return PromptPlan(_page_rows(blocks[None, columns], kv), _mask(keys, queries, window, kv.dtype), tuple(tiles))


def paged_prompt_attention(q: Tensor, kv: Tensor, plan: PromptPlan, scale: float) -> Tensor:
    """``q [num_tokens, num_heads, head_dim]`` against pages, which hold the span's own KV too -> the same shape."""
    num_kv_heads, block_size, head_dim = kv.shape[2:]
    gathered = _contiguous_runs(kv, block_size * head_dim).index_select(0, plan.pages)
    k, v = gathered.view(2, 1, num_kv_heads, -1, head_dim)
    q, outputs = q.transpose(0, 1)[None], []
    for tile in plan.tiles:
        queries = _pad_queries(q[:, :, tile.rows])
        mask = plan.mask[tile.rows.start : tile.rows.start + queries.shape[2], tile.keys]
        out = functional.scaled_dot_product_attention(
            queries, k[:, :, tile.keys], v[:, :, tile.keys], mask, scale=scale, enable_gqa=True
        )
        outputs.append(out[0, :, : tile.rows.stop - tile.rows.start].transpose(0, 1))
    return torch.cat(outputs)


def _key_span(begin: int, end: int, block_size: int) -> range:
    """The positions to read so that ``begin .. end`` are among them, whole tiles from a whole summand on."""
    summand, tile = lcm(KEYS_A_SUMMAND, block_size), _tile_size(block_size)
    return range(begin // summand * summand, -(-end // tile) * tile)


def _tile_size(block_size: int) -> int:
    return lcm(KEYS_A_TILE, block_size)


def _pad_queries(q: Tensor) -> Tensor:
    """``q [.., num_rows, head_dim]`` with rows added up to a multiple of four."""
    num_missing = -q.shape[-2] % ROWS_A_STEP
    return functional.pad(q, (0, 0, 0, num_missing)) if num_missing else q


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


def decode_attention(
    q: Tensor,
    kv: Tensor,
    block_tables: Tensor,
    lengths: Tensor,
    out: Tensor,
    workspace: object,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    query_starts: Tensor | None = None,
) -> None:
    """As in `paged_attention`, in float32 (float64 for such inputs); needs no workspace and no plan."""
    each = len(q) // len(lengths)
    bounds = [i * each for i in range(len(lengths) + 1)] if query_starts is None else query_starts.tolist()
    for i, length in enumerate(lengths.tolist()):
        rows = slice(bounds[i], bounds[i + 1])
        out[rows] = _attend_with_last(q[rows], kv, block_tables[i], length, scale, window, softcap)


def prefill_attention(
    q: Tensor,
    kv: Tensor,
    query_starts: Tensor,
    starts: Tensor,
    block_tables: Tensor,
    out: Tensor,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
) -> None:
    """As in `paged_attention`, in float32 (float64 for such inputs)."""
    bounds = query_starts.tolist()
    for i, start in enumerate(starts.tolist()):
        rows = slice(bounds[i], bounds[i + 1])
        length = start + bounds[i + 1] - bounds[i]
        out[rows] = _attend_with_last(q[rows], kv, block_tables[i], length, scale, window, softcap)


def _attend_with_last(
    q: Tensor, kv: Tensor, blocks: Tensor, length: int, scale: float, window: int, softcap: float
) -> Tensor:
    """``q [num_queries, num_heads, head_dim]`` are the last of ``length`` tokens, stored in ``blocks``."""
    num_kv_heads, block_size, dtype = kv.shape[2], kv.shape[3], torch.promote_types(q.dtype, torch.float32)
    queries = torch.arange(length - len(q), length, device=q.device)[:, None]
    keys = torch.arange(max(0, length - len(q) + 1 - window) if window else 0, length, device=q.device)
    k, v = kv[blocks[keys // block_size].long(), :, :, keys % block_size].to(dtype).unbind(1)
    grouped = q.to(dtype).unflatten(1, (num_kv_heads, -1))
    scores = torch.einsum("qhgd,khd->hgqk", grouped, k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    is_hidden = keys > queries
    if window:
        is_hidden |= keys <= queries - window
    weights = scores.masked_fill(is_hidden, MASKED).softmax(-1).masked_fill(is_hidden, 0)
    return torch.einsum("hgqk,khd->qhgd", weights, v).flatten(1, 2).to(q.dtype)


def add_rms_norm(x: Tensor | None, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """As in `norm_rope`."""
    if x is not None:
        total = residual.float() + x.float().view(-1, *residual.shape).sum(0)
        residual.copy_(total)
    return rms_norm(residual, weight, eps)


def norm_rope_store(
    qkv: Tensor,
    kv: Tensor,
    cos: Tensor,
    sin: Tensor,
    positions: Tensor | None,
    slots: Tensor,
    num_heads: int,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
) -> None:
    """As in `norm_rope`."""
    num_kv_heads, head_dim = kv.shape[2], kv.shape[4]
    heads = qkv.view(len(qkv), -1, head_dim)
    q, k, _ = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
    for x, weight in ((q, q_norm), (k, k_norm)):
        if weight is not None:
            x.copy_(rms_norm(x, weight, eps))
    if positions is not None:
        cos, sin = cos[positions.long()], sin[positions.long()]
    rotated = heads[:, : num_heads + num_kv_heads]
    rope_(rotated, torch.cat((cos, cos), -1)[:, None], torch.cat((-sin, sin), -1)[:, None])
    is_stored = slots >= 0
    kv_store(kv, store_rows(slots[is_stored].long(), kv), heads[is_stored, num_heads:])


def gather_blocks(pool: Tensor, blocks: Tensor, layers: range) -> Tensor:
    """As in `kv_copy`."""
    return pool[blocks.long(), layers.start : layers.stop]


def scatter_blocks(staging: Tensor, blocks: Tensor, layers: range, pool: Tensor) -> None:
    """As in `kv_copy`."""
    pool[blocks.long(), layers.start : layers.stop] = staging


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """One entry a row, ``[n]`` on the logits' device, as core/request.py means them.

    ``temperature, min_p`` float32, ``top_k`` int32, ``top_p`` float64, ``seed`` int64 (the bits of an unsigned one),
    ``output_index`` int64. Where no row has a top-k or top-p, ``any_top_k`` or ``any_top_p`` may save the search.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    seed: Tensor
    output_index: Tensor
    any_top_k: bool = True
    any_top_p: bool = True

    @staticmethod
    def neutral(num_rows: int, device: torch.device) -> "SamplingTensors":
        """Temperature 1 and no filter."""
        zeros = torch.zeros(num_rows, dtype=torch.int64, device=device)
        ones = torch.ones(num_rows, dtype=torch.float64, device=device)
        return SamplingTensors(ones.float(), zeros.int(), ones, zeros.float(), zeros, zeros, False, False)


@dataclass(frozen=True, slots=True)
class TopLogprobs:
    """``token_logprobs [n]``; ``top_ids, top_logprobs  [n, num_top]``, likeliest first, then by id."""

    token_logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor


def argmax(logits: Tensor) -> Tensor:
    """As in `sampling`."""
    best = logits.max(-1)  # a NaN, where there is one
    return best.indices.where(best.values.isfinite(), -1)


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """As in `sampling`, by sorting."""
    logits = logits.float()
    vocab, top_k = logits.shape[1], params.top_k[:, None]
    scaled = (logits - logits.amax(-1, keepdim=True)) / params.temperature[:, None].clamp(min=1e-30)
    ordered = scaled.sort(-1, descending=True).values
    is_kept = torch.arange(vocab, device=logits.device) < torch.where(top_k > 0, top_k, vocab)
    weights = ordered.double().exp() * is_kept
    reached = weights.cumsum(-1)
    top_p = params.top_p[:, None]
    is_kept &= (reached - weights < top_p * reached[:, -1:]) | (top_p >= 1)
    is_kept[:, 0] = True
    floors = ordered.masked_fill(~is_kept, torch.inf).amin(-1, keepdim=True)
    floors = floors.maximum(params.min_p.double().log().float()[:, None])
    reached = scaled.exp().masked_fill(scaled < floors, 0).cumsum(-1, dtype=torch.float64)
    draws = _uniform(params.seed, params.output_index)[:, None] * reached[:, -1:]
    drawn = torch.searchsorted(reached, draws, right=True).squeeze(-1)
    best = argmax(logits)
    return torch.where((params.temperature < 1e-4) | (params.top_k == 1) | (best < 0), best, drawn)


def _uniform(seeds: Tensor, indices: Tensor) -> Tensor:
    """SplitMix64 as in `sampling`; int64 wraps as unsigned does, but for the shifts to the right."""
    state = _mix(seeds) + (indices + 1) * _signed(0x9E3779B97F4A7C15)
    return _shifted(_mix(state), 12).double() * 2.0**-52


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * _signed(0xBF58476D1CE4E5B9)
    bits = (bits ^ _shifted(bits, 27)) * _signed(0x94D049BB133111EB)
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, count: int) -> Tensor:
    return (bits >> count) & ((1 << (64 - count)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64)


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TopLogprobs:
    """As in `sampling`."""
    logprobs = logits.double().log_softmax(-1)
    top = logits.float().sort(dim=-1, descending=True, stable=True).indices[:, :num_top]
    own = logprobs.gather(-1, token_ids[:, None]).squeeze(-1)
    return TopLogprobs(own.float(), top, logprobs.gather(-1, top).float())


IN_PROMPT = 1 << 30


@dataclass(frozen=True, slots=True)
class Penalties:
    """``counts  int32 [num_places, vocab]``: how often a sequence's output holds a token, plus `IN_PROMPT` where its
    prompt does. ``places  int32 [n]`` say which row of the counts is whose, -1 for a row of logits without penalties;
    ``repetition, presence, frequency  float32 [n]``.
    """

    counts: Tensor
    places: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor


def penalise(logits: Tensor, penalties: Penalties) -> None:
    """As in `penalties`."""
    rows = (penalties.places >= 0).nonzero().squeeze(-1)
    entries = penalties.counts[penalties.places[rows].long()]
    num_output, x = (entries % IN_PROMPT).float(), logits[rows]
    repetition, presence, frequency = (
        column[rows, None] for column in (penalties.repetition, penalties.presence, penalties.frequency)
    )
    repeated = torch.where(x > 0, x / repetition, x * repetition)
    logits[rows] = torch.where(entries > 0, repeated, x) - frequency * num_output - presence * (num_output > 0)


def count_tokens(counts: Tensor, places: Tensor, token_ids: Tensor) -> None:
    """As in `penalties`."""
    is_counted = (places >= 0) & (token_ids >= 0)
    counts[places[is_counted].long(), token_ids[is_counted].long()] += 1


def add_at(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """As in `penalties`."""
    is_entry = rows >= 0
    logits[rows[is_entry].long(), token_ids[is_entry].long()] += values[is_entry]
