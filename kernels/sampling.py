"""From logits to tokens on the device: no sort of the vocabulary, no trip to the host, every launch of a fixed size.

The meaning is that of the CPU's sampler: a draw is the inverse of the cumulative distribution, in the order of the
vocabulary, over the tokens that top-k, top-p and min-p keep, at a number that seed and output index alone determine.

A filter keeps the tokens whose logit is at least a *floor*: the smallest ``v`` for which the tokens above ``v`` weigh
less than a target (top-k: each weighs 1, the target is k; top-p: their probabilities, and p of what top-k leaves). It
is searched in the order-preserving integers of the logits' bits, eight intervals a pass: exact, and with as many
passes as the dtype needs. A row is cut into chunks of one size, a program each, and sums are taken in a fixed order, so
that a row's token does not depend on the rows beside it.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import dependent_launch, let_next_start, wait_for_previous
from .reference import SamplingTensors, TopLogprobs
from .sizes import cdiv, next_power_of_2

CHUNK = 4096
SPANS = 4
"""In so many pieces a chunk is searched, each by one warp, which needs no barrier for its sums."""
BITS_A_PASS = 3
WAYS = 1 << BITS_A_PASS
CONSTANT_BITS = {torch.float32: 0, torch.float16: 13, torch.bfloat16: 16}
"""So many low bits of a logit are always the same once it is a float32."""


def argmax(logits: Tensor) -> Tensor:
    """The first of the best in each row of ``logits [n, vocab]``: ``[n]`` int64; -1 as in `sample`."""
    best = _best(logits)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _best_of_rows[(len(logits),)](*best, token_ids, **_sizes(logits), num_warps=1)
    return token_ids


def sample(logits: Tensor, params: SamplingTensors) -> Tensor:
    """Draw a token for each row of ``logits [n, vocab]``: ``[n]`` int64. -inf bars a token.

    -1 where no token could mean anything: a logit is not a number, or the best is not finite.
    """
    best = _best(logits)
    kept = None
    if params.any_top_k:
        search = _search(logits, best, params, None, by_count=True)
        kept = _keep(logits, best, params, search, is_last=not params.any_top_p)
    if params.any_top_p:
        before = _keep(logits, best, params, None, is_last=False) if kept is None else kept
        search = _search(logits, best, params, before, by_count=False)
        kept = _keep(logits, best, params, search, is_last=True)
    if kept is None:
        kept = _keep(logits, best, params, None, is_last=True)
    token_ids = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    _draw[(len(logits),)](
        logits, *best, kept.floors, kept.masses, params.temperature, params.top_k, params.min_p,
        params.seed, params.output_index, token_ids, **_sizes(logits), CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    return token_ids


def top_logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> TopLogprobs:
    """Log-probabilities of ``token_ids [n]`` and of the ``num_top`` likeliest under ``logits [n, vocab]``.

    They mean nothing where the token is -1.
    """
    best = _best(logits)
    kept = _keep(logits, best, SamplingTensors.neutral(len(logits), logits.device), None, is_last=True)
    found = TopLogprobs(
        torch.empty(len(logits), dtype=torch.float32, device=logits.device),
        torch.empty(len(logits), num_top, dtype=torch.int64, device=logits.device),
        torch.empty(len(logits), num_top, dtype=torch.float32, device=logits.device),
    )
    _top_logprobs[(len(logits),)](
        logits, *best, kept.masses, token_ids, found.token_logprobs, found.top_ids, found.top_logprobs,
        num_top, **_sizes(logits), CHUNK=CHUNK, num_warps=8,
    )  # fmt: skip
    return found


# --- launches --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Kept:
    """What the filters so far keep: ``floors [n]`` float32; of each chunk ``masses [n, num_chunks]`` float64, the sum
    of the probabilities relative to the best token's, and ``counts [n, num_chunks]`` int32.
    """

    floors: Tensor
    masses: Tensor
    counts: Tensor


@dataclass(frozen=True, slots=True)
class _Search:
    """Of every pass ``brackets [num_passes, n, 2]``: keys below and at least the floor; ``sums`` above the thresholds
    between them, ``[num_passes, n, num_spans, WAYS]``; ``targets [n]``.
    """

    by_count: bool
    previous: _Kept | None
    brackets: Tensor
    sums: Tensor
    targets: Tensor


def _sizes(logits: Tensor) -> dict[str, int | bool]:
    num_chunks = cdiv(logits.shape[1], CHUNK)
    early = dependent_launch(logits.device)
    return {"vocab": logits.shape[1], "num_chunks": num_chunks, "CHUNKS": next_power_of_2(num_chunks), **early}


def _best(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The best logit of each chunk and the first token that has it, ``[n, num_chunks]``; -1 if any is not a number."""
    shape = (len(logits), cdiv(logits.shape[1], CHUNK))
    best = torch.empty(shape, dtype=torch.float32, device=logits.device)
    first = torch.empty(shape, dtype=torch.int32, device=logits.device)
    _best_of_chunks[shape[::-1]](
        logits, best, first, logits.shape[1], CHUNK=CHUNK, num_warps=4, **dependent_launch(logits.device)
    )
    return best, first


def _search(
    logits: Tensor, best: tuple[Tensor, Tensor], params: SamplingTensors, previous: _Kept | None, by_count: bool
) -> _Search:
    num_rows, num_spans = len(logits), cdiv(logits.shape[1], CHUNK // SPANS)
    num_passes = cdiv(32 - CONSTANT_BITS[logits.dtype], BITS_A_PASS)
    search = _Search(
        by_count,
        previous,
        torch.empty(num_passes, num_rows, 2, dtype=torch.int64, device=logits.device),
        torch.empty(num_passes, num_rows, num_spans, WAYS, dtype=torch.float32, device=logits.device),
        torch.empty(num_rows, dtype=torch.float64, device=logits.device),
    )
    kept = _Kept(search.targets, search.targets, search.targets) if previous is None else previous
    for index in range(num_passes):
        _search_pass[(num_spans, num_rows)](
            logits, best[0], kept.floors, kept.masses, kept.counts, params.temperature, params.top_k, params.top_p,
            search.brackets, search.sums, search.targets, **_sizes(logits), index=index, BY_COUNT=by_count,
            HAS_PREVIOUS=previous is not None, WAYS=WAYS, LOW_BITS=CONSTANT_BITS[logits.dtype], CHUNK=CHUNK,
            SPANS=SPANS, num_warps=1,
        )  # fmt: skip
    return search


def _keep(
    logits: Tensor, best: tuple[Tensor, Tensor], params: SamplingTensors, search: _Search | None, is_last: bool
) -> _Kept:
    num_rows, num_chunks = best[0].shape
    kept = _Kept(
        torch.empty(num_rows, dtype=torch.float32, device=logits.device),
        torch.empty(num_rows, num_chunks, dtype=torch.float64, device=logits.device),
        torch.empty(num_rows, num_chunks, dtype=torch.int32, device=logits.device),
    )
    brackets, sums, targets = (
        (search.brackets, search.sums, search.targets) if search is not None else (kept.counts,) * 3
    )
    previous = search.previous if search is not None else None
    _keep_chunk[(num_chunks, num_rows)](
        logits, best[0], kept.floors if previous is None else previous.floors,
        params.temperature, params.top_k, params.top_p, params.min_p,
        brackets, sums, targets, kept.floors, kept.masses, kept.counts, **_sizes(logits),
        NUM_PASSES=0 if search is None else len(search.brackets), BY_COUNT=search is not None and search.by_count,
        HAS_PREVIOUS=previous is not None, IS_LAST=is_last, WAYS=WAYS, LOW_BITS=CONSTANT_BITS[logits.dtype],
        CHUNK=CHUNK, SPANS=SPANS, num_warps=4,
    )  # fmt: skip
    return kept


# --- the best tokens -------------------------------------------------------------------------


@triton.jit
def _best_of_chunks(logits, best, first, vocab, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    chunk, row = tl.program_id(0), tl.program_id(1)
    tokens = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _load_chunk(logits, row, tokens, vocab)
    highest = tl.max(x, 0)
    place = row * tl.num_programs(0) + chunk
    tl.store(best + place, highest)
    is_broken = tl.max((x != x).to(tl.int32), 0) > 0
    tl.store(first + place, tl.where(is_broken, -1, _first(x == highest, tokens, vocab)))


@triton.jit
def _load_chunk(logits, row, tokens, vocab):
    places = logits + row.to(tl.int64) * vocab + tokens
    return tl.load(places, mask=tokens < vocab, other=-float("inf")).to(tl.float32)


@triton.jit
def _first(is_wanted, tokens, vocab):
    return tl.min(tl.where(is_wanted, tokens, vocab - 1), 0)


@triton.jit
def _first_best(best, first, row, vocab, num_chunks, CHUNKS: tl.constexpr):
    """The first of the best tokens of a row; -1 where it means nothing."""
    chunks = tl.arange(0, CHUNKS)
    is_chunk = chunks < num_chunks
    x = tl.load(best + row * num_chunks + chunks, mask=is_chunk, other=-float("inf"))
    tokens = tl.load(first + row * num_chunks + chunks, mask=is_chunk, other=0)
    highest = tl.max(x, 0)
    is_sound = (tl.min(tokens, 0) >= 0) & (tl.abs(highest) < float("inf"))
    return tl.where(is_sound, _first((x == highest) & is_chunk, tokens, vocab), -1)


@triton.jit
def _highest(best, row, num_chunks, CHUNKS: tl.constexpr):
    """The best logit of a row; a finite number also where all are barred."""
    chunks = tl.arange(0, CHUNKS)
    x = tl.load(best + row * num_chunks + chunks, mask=chunks < num_chunks, other=-float("inf"))
    return tl.maximum(tl.max(x, 0), -3.0e38)


@triton.jit
def _best_of_rows(best, first, token_ids, vocab, num_chunks, CHUNKS: tl.constexpr, EARLY: tl.constexpr):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0)
    tl.store(token_ids + row, _first_best(best, first, row, vocab, num_chunks, CHUNKS).to(tl.int64))


# --- the floor -------------------------------------------------------------------------------


@triton.jit
def _is_drawn(temperature, top_k):
    """Not greedy (core/request.py)."""
    return (temperature >= 1e-4) & (top_k != 1)


@triton.jit
def _is_searched(temperature, top_k, top_p, vocab, BY_COUNT: tl.constexpr):
    if BY_COUNT:
        return _is_drawn(temperature, top_k) & (top_k > 0) & (top_k < vocab)
    else:
        return _is_drawn(temperature, top_k) & (top_p < 1.0)


@triton.jit
def _to_key(x, LOW_BITS: tl.constexpr):
    """Integers in the order of the float32 ``x``, dense over the values that the dtype has."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) >> LOW_BITS


@triton.jit
def _from_key(key, LOW_BITS: tl.constexpr):
    bits = key << LOW_BITS
    bits = tl.where(key < 0, (bits | ((1 << LOW_BITS) - 1)) ^ 0x7FFFFFFF, bits)
    return bits.to(tl.int32).to(tl.float32, bitcast=True)


@triton.jit
def _thresholds(below, above, WAYS: tl.constexpr):
    return below + ((above - below) * tl.arange(0, WAYS)) // WAYS


@triton.jit
def _narrowed(brackets, sums, targets, index, row, num_rows, num_spans, SPANS: tl.constexpr, WAYS: tl.constexpr):
    """The bracket after pass ``index``: the greatest key above which lies the target, the least where it does not."""
    place = index.to(tl.int64) * num_rows + row
    below, above = tl.load(brackets + place * 2), tl.load(brackets + place * 2 + 1)
    spans = tl.arange(0, SPANS)[:, None]
    tile = (place * num_spans + spans) * WAYS + tl.arange(0, WAYS)[None, :]
    totals = tl.sum(tl.load(sums + tile, mask=spans < num_spans, other=0.0).to(tl.float64), 0)
    keys = _thresholds(below, above, WAYS)
    is_below = (keys <= below) | (totals >= tl.load(targets + row))
    return tl.max(tl.where(is_below, keys, below), 0), tl.min(tl.where(is_below, above, keys), 0)


@triton.jit
def _target_mass(masses, counts, floor, highest, temperature, top_k, row, num_chunks, CHUNKS: tl.constexpr):
    """That of exactly ``top_k`` tokens: more may be kept where several are equal to the floor."""
    chunks = tl.arange(0, CHUNKS)
    places = row * num_chunks + chunks
    mass = tl.sum(tl.load(masses + places, mask=chunks < num_chunks, other=0.0), 0)
    count = tl.sum(tl.load(counts + places, mask=chunks < num_chunks, other=0), 0)
    excess = tl.where((top_k > 0) & (count > top_k), count - top_k, 0)
    weight = tl.where(excess > 0, _weights(floor, highest, temperature), 0.0)
    return mass - excess * weight.to(tl.float64)


@triton.jit(do_not_specialize=["index"])
def _search_pass(
    logits, best, floors, masses, counts, temperatures, top_ks, top_ps, brackets, sums, targets, vocab, num_chunks,
    index, BY_COUNT: tl.constexpr, HAS_PREVIOUS: tl.constexpr, WAYS: tl.constexpr, LOW_BITS: tl.constexpr,
    CHUNK: tl.constexpr, SPANS: tl.constexpr, CHUNKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    span, row, num_rows = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    temperature, top_k, top_p = tl.load(temperatures + row), tl.load(top_ks + row), tl.load(top_ps + row)
    if _is_searched(temperature, top_k, top_p, vocab, BY_COUNT):
        highest = _highest(best, row, num_chunks, CHUNKS)
        if index == 0:
            floor = tl.load(floors + row) if HAS_PREVIOUS else tl.full((), -float("inf"), tl.float32)
            below, above = _to_key(floor, LOW_BITS) - 1, _to_key(highest, LOW_BITS)
            if span == 0:
                if BY_COUNT:
                    tl.store(targets + row, top_k.to(tl.float64))
                else:
                    mass = _target_mass(masses, counts, floor, highest, temperature, top_k, row, num_chunks, CHUNKS)
                    tl.store(targets + row, top_p * mass)
        else:
            below, above = _narrowed(
                brackets, sums, targets, index - 1, row, num_rows, tl.num_programs(0), CHUNKS * SPANS, WAYS
            )
        place = index * num_rows.to(tl.int64) + row
        if span == 0:
            tl.store(brackets + place * 2, below)
            tl.store(brackets + place * 2 + 1, above)
        SPAN: tl.constexpr = CHUNK // SPANS
        ways = tl.arange(0, WAYS)
        found = tl.zeros((WAYS,), tl.float32)
        chunk_best = tl.load(best + row * num_chunks + span // SPANS)
        if _to_key(chunk_best, LOW_BITS) > below + (above - below) // WAYS:
            x = _load_chunk(logits, row, span * SPAN + tl.arange(0, SPAN), vocab)
            if BY_COUNT:
                weights = tl.full((SPAN,), 1.0, tl.float32)
            else:
                weights = _weights(x, highest, temperature)
            for way in tl.static_range(1, WAYS):
                threshold = _from_key(below + ((above - below) * way) // WAYS, LOW_BITS)
                found = tl.where(ways == way, tl.sum(tl.where(x > threshold, weights, 0.0), 0), found)
        tl.store(sums + (place * tl.num_programs(0) + span) * WAYS + ways, found)


@triton.jit
def _keep_chunk(
    logits, best, old_floors, temperatures, top_ks, top_ps, min_ps, brackets, sums, targets, floors, masses, counts,
    vocab, num_chunks, NUM_PASSES: tl.constexpr, BY_COUNT: tl.constexpr, HAS_PREVIOUS: tl.constexpr,
    IS_LAST: tl.constexpr, WAYS: tl.constexpr, LOW_BITS: tl.constexpr,
    CHUNK: tl.constexpr, SPANS: tl.constexpr, CHUNKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    chunk, row, num_rows = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    temperature, top_k = tl.load(temperatures + row), tl.load(top_ks + row)
    if _is_drawn(temperature, top_k):
        floor = tl.load(old_floors + row) if HAS_PREVIOUS else tl.full((), -float("inf"), tl.float32)
        if NUM_PASSES > 0:
            top_p, last = tl.load(top_ps + row), tl.full((), NUM_PASSES - 1, tl.int32)
            if _is_searched(temperature, top_k, top_p, vocab, BY_COUNT):
                num_spans = tl.cdiv(vocab, CHUNK // SPANS)
                _, above = _narrowed(brackets, sums, targets, last, row, num_rows, num_spans, CHUNKS * SPANS, WAYS)
                floor = _from_key(above, LOW_BITS)
        if chunk == 0:
            tl.store(floors + row, floor)
        highest = _highest(best, row, num_chunks, CHUNKS)
        x = _load_chunk(logits, row, chunk * CHUNK + tl.arange(0, CHUNK), vocab)
        min_p = tl.load(min_ps + row) if IS_LAST else tl.full((), 0.0, tl.float32)
        weights = _kept_weights(x, highest, floor, temperature, min_p)
        place = row * num_chunks + chunk
        tl.store(masses + place, tl.sum(weights.to(tl.float64), 0))
        tl.store(counts + place, tl.sum((x >= floor).to(tl.int32), 0))


@triton.jit
def _weights(x, highest, temperature):
    """Probabilities relative to the best token's."""
    return tl.exp2((x - highest) * (1.4426950408889634 / temperature))


@triton.jit
def _kept_weights(x, highest, floor, temperature, min_p):
    """Those of the tokens that reach the floor and, if there is one, the least share of the best token."""
    weights = tl.where(x >= floor, _weights(x, highest, temperature), 0.0)
    if min_p > 0:
        least = tl.log(min_p.to(tl.float64)).to(tl.float32)
        weights = tl.where(tl.div_rn(x - highest, temperature) >= least, weights, 0.0)
    return weights


# --- the draw --------------------------------------------------------------------------------


@triton.jit
def _draw(
    logits, best, first, floors, masses, temperatures, top_ks, min_ps, seeds, output_indices, token_ids,
    vocab, num_chunks, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0)
    token = _first_best(best, first, row, vocab, num_chunks, CHUNKS)
    highest = _highest(best, row, num_chunks, CHUNKS)
    temperature = tl.load(temperatures + row)
    if _is_drawn(temperature, tl.load(top_ks + row)):
        chunks = tl.arange(0, CHUNKS)
        mass = tl.load(masses + row * num_chunks + chunks, mask=chunks < num_chunks, other=0.0)
        total = tl.sum(mass, 0)
        goal = _uniform(tl.load(seeds + row), tl.load(output_indices + row)) * total
        chunk = _place_of(goal, mass, CHUNKS)
        goal -= tl.sum(tl.where(chunks < chunk, mass, 0.0), 0)
        x = _load_chunk(logits, row, chunk * CHUNK + tl.arange(0, CHUNK), vocab)
        weights = _kept_weights(x, highest, tl.load(floors + row), temperature, tl.load(min_ps + row))
        drawn = chunk * CHUNK + _place_of(goal, weights.to(tl.float64), CHUNK)
        token = tl.where((total > 0) & (token >= 0), drawn, token)
    tl.store(token_ids + row, token.to(tl.int64))


@triton.jit
def _place_of(goal, weights, SIZE: tl.constexpr):
    """The first place with weight whose running sum exceeds the goal; if rounding leaves none, the last with weight."""
    places = tl.arange(0, SIZE)
    has_weight = weights > 0
    reached = tl.cumsum(weights, 0)
    found = tl.min(tl.where((reached > goal) & has_weight, places, SIZE), 0)
    return tl.minimum(found, tl.maximum(tl.max(tl.where(has_weight, places, -1), 0), 0))


@triton.jit
def _uniform(seed, index):
    """Number ``index`` of the seed's SplitMix64 stream, in [0, 1) in steps of 2^-52 (model/sampler.py)."""
    state = _mix(seed.to(tl.uint64)) + (index + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    return (_mix(state) >> 12).to(tl.float64) * 2.220446049250313e-16


@triton.jit
def _mix(bits):
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


# --- log-probabilities -----------------------------------------------------------------------


@triton.jit
def _top_logprobs(
    logits, best, first, masses, token_ids, token_logprobs, top_ids, top_logprobs, num_top, vocab, num_chunks,
    CHUNK: tl.constexpr, CHUNKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0)
    chunks = tl.arange(0, CHUNKS)
    places, is_chunk = row * num_chunks + chunks, chunks < num_chunks
    candidates = tl.load(best + places, mask=is_chunk, other=-float("inf"))
    candidate_ids = tl.maximum(tl.load(first + places, mask=is_chunk, other=0), 0)
    mass = tl.sum(tl.load(masses + places, mask=is_chunk, other=0.0), 0)
    total = tl.max(candidates, 0) + tl.log(mass).to(tl.float32)
    own_id = tl.maximum(tl.load(token_ids + row), 0)
    own = tl.load(logits + row.to(tl.int64) * vocab + own_id).to(tl.float32)
    tl.store(token_logprobs + row, own - total)
    for rank in range(num_top):
        highest = tl.max(candidates, 0)
        token = _first((candidates == highest) & is_chunk, candidate_ids, vocab)
        tl.store(top_ids + row * num_top + rank, token.to(tl.int64))
        tl.store(top_logprobs + row * num_top + rank, highest - total)
        chunk = token // CHUNK
        tokens = chunk * CHUNK + tl.arange(0, CHUNK)
        x = _load_chunk(logits, row, tokens, vocab)
        x = tl.where((x < highest) | ((x == highest) & (tokens > token)), x, -float("inf"))
        next_best = tl.max(x, 0)
        candidate_ids = tl.where(
            chunks == chunk, _first((x == next_best) & (tokens < vocab), tokens, vocab), candidate_ids
        )
        candidates = tl.where(chunks == chunk, next_best, candidates)
