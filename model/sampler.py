"""From logits to tokens.

Each row of a batch is treated by its own parameters and gets the token it would get alone: penalties and masks, then
the greedy choice, or temperature, top-k, top-p, min-p and one draw. A draw depends on the request's seed and the
token's index in the output alone, so that batch size, preemption and hand-over change nothing. Log-probabilities are
the model's own, taken before any of it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, log

import torch
from torch import Tensor

from ..core.request import MAX_LOGPROBS, SamplingParams, TokenLogprobs

NUM_CANDIDATES = 1024
"""So many of the likeliest tokens are sorted first; nearly always they hold all that top-k and top-p keep."""


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What is to be sampled for one sequence: output token ``output_index``.

    ``token_ids`` are prompt and output; what lies behind the tokens before ``output_index`` is not looked at, so the
    list may be one that grows meanwhile, and the last of them may still be pending.
    """

    params: SamplingParams
    token_ids: Sequence[int]
    num_prompt: int
    output_index: int

    @property
    def is_greedy(self) -> bool:
        return self.params.is_greedy or self.params.top_k == 1

    @property
    def barred_ids(self) -> tuple[int, ...]:
        """No stop token may come before ``min_tokens`` others; a grammar's own mask says so itself."""
        is_early = self.output_index < self.params.min_tokens and not self.params.grammar
        return self.params.stop_token_ids if is_early else ()

    @property
    def output_before_last(self) -> Sequence[int]:
        return self.token_ids[self.num_prompt : self.num_prompt + self.output_index - 1] if self.output_index else ()

    @property
    def last_output(self) -> int:
        """-1 when there is no output yet, or its last token is pending."""
        position = self.num_prompt + self.output_index - 1
        return self.token_ids[position] if self.output_index and position < len(self.token_ids) else -1


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """What some rows of a step may sample: row ``rows[i]`` the tokens whose bits are set in ``bits[i]``.

    ``rows  [n]`` int64, ``bits  [n, ceil(vocab / 32)]`` int32, the lowest bit first, both on the logits' device.
    """

    rows: Tensor
    bits: Tensor

    def of(self, places: Sequence[int]) -> "TokenMasks":
        """The masks of rows that are drawn like these: row ``i`` like row ``places[i]``."""
        mask_of = {row: number for number, row in enumerate(self.rows.tolist())}
        rows = [row for row, place in enumerate(places) if place in mask_of]
        return TokenMasks(torch.tensor(rows, dtype=torch.int64), self.bits[[mask_of[places[row]] for row in rows]])

    def apply(self, logits: Tensor) -> None:
        """Bar all other tokens of these rows of ``logits [num_rows, vocab]``, in place."""
        octets = self.bits.view(torch.uint8)[..., None]
        is_barred = (octets >> torch.arange(8, dtype=torch.uint8, device=logits.device)) & 1 == 0
        logits[self.rows] = logits[self.rows].masked_fill(is_barred.flatten(1)[:, : logits.shape[-1]], -inf)


@dataclass(frozen=True, slots=True)
class Sampled:
    """``token_ids [n]`` int64, on the logits' device; ``logprobs`` one a row, ``None`` where not asked for.

    ``is_sound [n]`` is false where the likeliest token has no finite logit: that row's token means nothing.
    """

    token_ids: Tensor
    is_sound: Tensor
    logprobs: list[TokenLogprobs | None]


def sample(
    logits: Tensor, rows: Sequence[SamplingRow], pending: Tensor | None = None, masks: TokenMasks | None = None
) -> Sampled:
    """Draw a token for every row.

    ``logits  [n, vocab]`` float32, left as they are; -inf bars a token. ``pending  [n]`` int64 holds last output
    tokens that are only on the device yet, -1 for none. ``masks`` are those of grammars.
    """
    assert logits.shape[0] == len(rows), "one row of logits for each sequence"
    adjusted = adjust(logits, rows, pending, masks)
    token_ids = adjusted.argmax(-1)  # of a NaN, where there is one
    is_sound = adjusted.gather(-1, token_ids[:, None]).squeeze(-1).isfinite()
    drawing = [i for i, row in enumerate(rows) if not row.is_greedy]
    if drawing:
        token_ids[drawing] = _draw(adjusted[drawing], [rows[i] for i in drawing])
    return Sampled(token_ids, is_sound, _row_logprobs(logits, rows, token_ids))


# --- what the model says ---------------------------------------------------------------------


def prompt_logprobs(logits: Tensor, next_ids: Tensor, num_top: int) -> list[TokenLogprobs]:
    """Log-probabilities of ``next_ids  [m]`` under ``logits  [m, vocab]``, with the ``num_top`` likeliest tokens."""
    return _logprobs(logits, next_ids, [num_top] * len(next_ids))


def _row_logprobs(logits: Tensor, rows: Sequence[SamplingRow], token_ids: Tensor) -> list[TokenLogprobs | None]:
    found: list[TokenLogprobs | None] = [None] * len(rows)
    num_top = {i: row.params.logprobs for i, row in enumerate(rows) if row.params.logprobs is not None}
    if num_top:
        asking = list(num_top)
        for i, logprobs in zip(asking, _logprobs(logits[asking], token_ids[asking], num_top.values()), strict=True):
            found[i] = logprobs
    return found


def _logprobs(logits: Tensor, token_ids: Tensor, num_top: Iterable[int]) -> list[TokenLogprobs]:
    """Always the same number of top tokens is looked for, lest ties fall out differently beside other rows."""
    best = logits.amax(-1, keepdim=True)
    mass = (logits - best).exp().sum(-1, keepdim=True, dtype=torch.float64)  # float64: the same however it is summed
    total = best + mass.log().to(logits.dtype)
    own = (logits.gather(-1, token_ids[:, None]) - total).squeeze(-1)
    top = logits.topk(min(MAX_LOGPROBS, logits.shape[-1]), -1)
    found = zip(own.tolist(), top.indices.tolist(), (top.values - total).tolist(), num_top, strict=True)
    return [TokenLogprobs(token, top_ids[:k], top_logprobs[:k]) for token, top_ids, top_logprobs, k in found]


# --- what the client asks for on top ---------------------------------------------------------


def adjust(
    logits: Tensor, rows: Sequence[SamplingRow], pending: Tensor | None, masks: TokenMasks | None = None
) -> Tensor:
    """Bias, penalties, barred tokens, grammars, in this order; ``logits`` itself where there are none, else a copy."""
    biases = [(i, token_id, bias) for i, row in enumerate(rows) for token_id, bias in row.params.logit_bias.items()]
    penalised = [i for i, row in enumerate(rows) if row.params.has_penalties]
    barred = [(i, token_id) for i, row in enumerate(rows) for token_id in row.barred_ids]
    if not (biases or penalised or barred or masks):
        return logits
    logits = logits.clone()
    if biases:
        of_row, token_ids, values = zip(*biases, strict=True)
        logits[of_row, token_ids] += torch.tensor(values, dtype=logits.dtype, device=logits.device)
    if penalised:
        last = None if pending is None else pending[penalised]
        logits[penalised] = _penalise(logits[penalised], [rows[i] for i in penalised], last)
    if barred:
        of_row, token_ids = zip(*barred, strict=True)
        logits[of_row, token_ids] = -inf
    if masks:
        masks.apply(logits)
    return logits


def _penalise(logits: Tensor, rows: Sequence[SamplingRow], pending: Tensor | None) -> Tensor:
    """Repetition over prompt and output as Hugging Face does, presence and frequency over the output as OpenAI."""
    num_output = _counts(logits, [row.output_before_last for row in rows])
    last = torch.tensor([[row.last_output] for row in rows], device=logits.device)
    if pending is not None:
        last = torch.where(pending[:, None] >= 0, pending[:, None], last)
    num_output.scatter_add_(1, last.clamp(min=0), (last >= 0).to(logits.dtype))
    is_in_output = num_output > 0
    is_seen = is_in_output | (_counts(logits, [row.token_ids[: row.num_prompt] for row in rows]) > 0)
    repetition = _column(logits, [row.params.repetition_penalty for row in rows])
    presence = _column(logits, [row.params.presence_penalty for row in rows])
    frequency = _column(logits, [row.params.frequency_penalty for row in rows])
    repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
    return torch.where(is_seen, repeated, logits) - frequency * num_output - presence * is_in_output


def _counts(like: Tensor, token_ids: Sequence[Sequence[int]]) -> Tensor:
    """How often each token occurs in each row's list: ``[n, vocab]`` of the shape and dtype of ``like``."""
    of_row = torch.tensor([row for row, ids in enumerate(token_ids) for _ in ids], dtype=torch.int64)
    flat_ids = torch.tensor([token_id for ids in token_ids for token_id in ids], dtype=torch.int64)
    places = (of_row.to(like.device), flat_ids.to(like.device))
    return torch.zeros_like(like).index_put_(places, like.new_ones(()), accumulate=True)


def _column(like: Tensor, values: Sequence[float], dtype: torch.dtype | None = None) -> Tensor:
    return torch.tensor(values, dtype=dtype or like.dtype, device=like.device)[:, None]


# --- the draw --------------------------------------------------------------------------------


def _draw(logits: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """One token a row by the inverse of its cumulative distribution, in the order of the vocabulary; ``[n]``.

    The distances to the best token are divided by the temperature, so that nothing overflows. Sums are float64.
    Logits that are no numbers yield some token of the vocabulary all the same, lest they hurt other rows.
    """
    scaled = (logits - logits.amax(-1, keepdim=True)) / _column(logits, [row.params.temperature for row in rows])
    weights = scaled.exp()
    reached = weights.masked_fill(scaled < _floors(scaled, weights, rows), 0).cumsum(-1, dtype=torch.float64)
    assert all(row.params.seed is not None for row in rows), "the router resolves seeds before a worker sees them"
    draws = _column(logits, [uniform(row.params.seed or 0, row.output_index) for row in rows], torch.float64)
    drawn = torch.searchsorted(reached, draws * reached[:, -1:], right=True).squeeze(-1)
    return drawn.clamp(max=logits.shape[-1] - 1)


def _floors(scaled: Tensor, weights: Tensor, rows: Sequence[SamplingRow]) -> Tensor:
    """The lowest of the scaled logits that each row's filters keep, ``[n, 1]``; tokens equal to it are all kept."""
    floors = _column(scaled, [log(row.params.min_p) if row.params.min_p > 0 else -inf for row in rows])
    filtering = [i for i, row in enumerate(rows) if row.params.top_k > 0 or row.params.top_p < 1]
    if filtering:
        params = [rows[i].params for i in filtering]
        floors[filtering] = floors[filtering].maximum(_top_floors(scaled[filtering], weights[filtering], params))
    return floors


def _top_floors(scaled: Tensor, weights: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Likewise of top-k, then top-p of what that leaves; rows whose likeliest tokens do not suffice are sorted."""
    vocab_size = scaled.shape[-1]
    num_candidates = min(NUM_CANDIDATES, vocab_size)
    top_k = _column(scaled, [p.top_k if 0 < p.top_k < vocab_size else vocab_size for p in params], torch.int64)
    top_p = _column(scaled, [p.top_p if p.top_p < 1 else inf for p in params], torch.float64)
    mass = weights.sum(-1, keepdim=True, dtype=torch.float64)
    candidates = scaled.topk(num_candidates, -1).values
    floors = _lowest_kept(candidates, mass, top_k, top_p)
    has_mass = candidates.exp().sum(-1, keepdim=True, dtype=torch.float64) >= top_p * mass
    suffices = (top_k <= num_candidates) | ((top_k == vocab_size) & has_mass)
    short = (~suffices).squeeze(-1).nonzero().squeeze(-1)
    if len(short):
        ordered = scaled[short].sort(-1, descending=True).values
        floors[short] = _lowest_kept(ordered, mass[short], top_k[short], top_p[short])
    return floors


def _lowest_kept(ordered: Tensor, mass: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """``ordered  [n, c]`` are scaled logits, highest first, ``mass  [n, 1]`` the weight of the whole vocabulary."""
    is_in_top_k = torch.arange(ordered.shape[-1], device=ordered.device) < top_k
    weights = ordered.double().exp() * is_in_top_k
    reached = weights.cumsum(-1)
    mass = torch.where(top_k <= ordered.shape[-1], reached[:, -1:], mass)
    is_kept = is_in_top_k & (reached - weights < top_p * mass)
    is_kept[:, 0] = True
    return ordered.masked_fill(~is_kept, inf).amin(-1, keepdim=True)


_MASK = (1 << 64) - 1


def uniform(seed: int, index: int) -> float:
    """Number ``index`` of the seed's stream, in [0, 1) in steps of 2^-52: its product with a sum stays below the sum.

    SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, OOPSLA 2014; constants of
    https://prng.di.unimi.it/splitmix64.c), started at the mixed seed and computed at its ``index + 1``-th step.
    """
    return (_mix((_mix(seed & _MASK) + (index + 1) * 0x9E3779B97F4A7C15) & _MASK) >> 12) * 2.0**-52


def _mix(bits: int) -> int:
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB & _MASK
    return bits ^ (bits >> 31)
