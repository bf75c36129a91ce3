"""From logits to tokens on a GPU, by what each request wants, without waiting: the host reads the results later.

What a request wants is noted once, by its seat; a step gathers the columns that its kernels read. The meaning is that
of `sampler`, whose results these are but for rounding.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from math import inf

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.request import MAX_LOGPROBS, TokenLogprobs
from ..core.sequence import Chunk, Draw, Sequence
from ..kernels.penalties import add_at, count_tokens, penalise
from ..kernels.reference import IN_PROMPT, Penalties, SamplingTensors
from ..kernels.sampling import sample, top_logprobs
from .device_stream import DeviceStream
from .executor import forks_of, next_prompt_ids, sampling_row
from .grammar import ConstrainedStep
from .sampler import TokenMasks
from .seats import Seat
from .step_packing import PackedStep

SCORED_AT_ONCE = 256
"""Rows of a prompt whose logits are in memory at a time."""


@dataclass(frozen=True, slots=True)
class HostLogprobs:
    """Log-probabilities on their way to the host; to be read when the step is done."""

    token_logprobs: Tensor
    top_ids: Tensor
    top_logprobs: Tensor

    def rows(self, num_top: Seq[int]) -> list[TokenLogprobs]:
        """One for each of the first rows, with so many alternatives each."""
        columns = (self.token_logprobs.tolist(), self.top_ids.tolist(), self.top_logprobs.tolist())
        return [TokenLogprobs(own, ids[:n], top[:n]) for own, ids, top, n in zip(*columns, num_top, strict=False)]


@dataclass(frozen=True, slots=True)
class HostDraws:
    """Tokens on their way to the host, and log-probabilities if any are wanted; to be read when the step is done."""

    token_ids: Tensor
    logprobs: HostLogprobs | None

    def each(self, num_top: Seq[int | None]) -> list[Draw]:
        """With so many alternatives each, or no log-probabilities."""
        ids: list[int] = self.token_ids.tolist()
        if self.logprobs is None:
            return [Draw(token_id) for token_id in ids]
        rows = self.logprobs.rows([number or 0 for number in num_top])
        return [Draw(i, None if n is None else row) for i, n, row in zip(ids, num_top, rows, strict=True)]


class Wishes:
    """What the sequence in each seat wants, as columns; the last row is that of no sequence."""

    def __init__(self, num_seats: int) -> None:
        num_rows = num_seats + 1
        self.is_plain = np.full(num_rows, True)
        self.has_bias = np.full(num_rows, False)
        self.has_logprobs = np.full(num_rows, False)
        self.num_prompt = np.zeros(num_rows, np.int64)
        self.num_barred = np.zeros(num_rows, np.int64)
        self.top_p = np.ones(num_rows, np.float64)
        self.seed = np.zeros(num_rows, np.int64)
        self.temperature = np.zeros(num_rows, np.float32)
        self.min_p = np.zeros(num_rows, np.float32)
        self.top_k = np.zeros(num_rows, np.int32)
        self.repetition = np.ones(num_rows, np.float32)
        self.presence = np.zeros(num_rows, np.float32)
        self.frequency = np.zeros(num_rows, np.float32)

    def note(self, seat: int, sequence: Sequence) -> None:
        params = sequence.request.params
        is_greedy = params.is_greedy or params.top_k == 1
        is_adjusted = params.has_penalties or params.min_tokens > 0 or bool(params.logit_bias or params.grammar)
        self.is_plain[seat] = is_greedy and not is_adjusted and params.logprobs is None
        self.has_bias[seat] = bool(params.logit_bias)
        self.has_logprobs[seat] = params.logprobs is not None
        self.num_prompt[seat] = sequence.num_prompt
        self.num_barred[seat] = params.min_tokens
        self.top_p[seat] = params.top_p
        self.seed[seat] = _wrapped([params.seed or 0])[0]
        self.temperature[seat] = params.temperature
        self.min_p[seat] = params.min_p
        self.top_k[seat] = params.top_k
        self.repetition[seat] = params.repetition_penalty
        self.presence[seat] = params.presence_penalty
        self.frequency[seat] = params.frequency_penalty


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows that are drawn from: the chunk and the seat of each, ``None`` and -1 where nothing is wanted.

    ``indices int64`` are those of the tokens drawn, in the output.
    """

    chunks: Seq[Chunk | None]
    seats: NDArray[np.int32]
    indices: NDArray[np.int64]


class CudaSampler:
    """Steps in launch order. ``sampled`` is the memory that the tokens drawn lie in for the next step."""

    def __init__(self, stream: DeviceStream, num_seats: int, vocab_size: int, sampled: Tensor) -> None:
        self._stream = stream
        self._vocab_size = vocab_size
        self._sampled = sampled
        self._wishes = Wishes(num_seats)
        self._places = np.full(num_seats + 1, -1, dtype=np.int32)
        self._free_places = list(range(num_seats))
        self._num_places = num_seats
        self._counts: Tensor | None = None

    def seat(self, newcomers: Seq[Seat]) -> None:
        """Note what newcomers want; call it before the step's own rows are sampled."""
        for seat in newcomers:
            self._wishes.note(seat.number, seat.sequence)
            if (place := int(self._places[seat.number])) >= 0:
                self._free_places.append(place)
                self._places[seat.number] = -1
            if seat.sequence.request.params.has_penalties:
                self._places[seat.number] = self._free_places.pop()
                self._count_known(seat)

    def is_plain(self, packed: PackedStep) -> bool:
        """Whether the step wants nothing but the likeliest tokens."""
        return bool(self._wishes.is_plain[packed.sampled_seats].all()) and not packed.scored

    def sample_forks(
        self, packed: PackedStep, logits: Tensor, constrained: ConstrainedStep | None = None
    ) -> HostDraws | None:
        """The first tokens of the forks of ``packed.forked``; call it before `sample`, which counts what it draws."""
        if not packed.forked:
            return None
        drawing = [(place, chunk) for place in packed.forked if (chunk := packed.sampled[place]) is not None]
        seeds = [fork.seed for _, chunk in drawing for fork in forks_of(chunk)]
        places = [place for place, chunk in drawing for _ in forks_of(chunk)]
        rows = self._rows(packed, places)
        own = logits[self._to_device(np.array(places))]
        masks = self._on_device(constrained.masks().of(places) if constrained is not None else None)
        drawn = sample(self._adjust(rows, own, masks), self._tensors(rows, _wrapped(seeds)))
        logprobs = self._logprobs(own, drawn, MAX_LOGPROBS) if self._want_logprobs(rows) else None
        return HostDraws(self._to_host(drawn), logprobs)

    def sample(
        self, packed: PackedStep, logits: Tensor, constrained: ConstrainedStep | None = None
    ) -> HostLogprobs | None:
        """Draw a token for each row of ``logits [num_sampled, vocab]``; the log-probabilities if any row wants them."""
        rows = self._rows(packed, range(len(packed.sampled)))
        masks = self._on_device(constrained.masks() if constrained is not None else None)
        drawn = sample(self._adjust(rows, logits, masks), self._tensors(rows, self._wishes.seed[rows.seats]))
        self._sampled[: len(drawn)].copy_(drawn)
        if (self._places[rows.seats] >= 0).any():
            count_tokens(self._all_counts(), self._to_device(self._places[rows.seats]), drawn)
        return self._logprobs(logits, drawn, MAX_LOGPROBS) if self._want_logprobs(rows) else None

    def score(self, chunk: Chunk, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> list[HostLogprobs]:
        """Log-probabilities of the prompt's tokens behind each of the chunk's rows ``hidden [num_tokens, size]``."""
        ids = np.array(next_prompt_ids(chunk), dtype=np.int64)
        on_device = self._to_device(ids)
        spans = [slice(first, first + SCORED_AT_ONCE) for first in range(0, len(ids), SCORED_AT_ONCE)]
        return [self._logprobs(head(hidden[: len(ids)][span]), on_device[span], MAX_LOGPROBS) for span in spans]

    # --- what the sampling kernels read --------------------------------------------------------

    def _rows(self, packed: PackedStep, places: Seq[int]) -> _Rows:
        chunks, seats = [packed.sampled[place] for place in places], packed.sampled_seats[places]
        return _Rows(chunks, seats, packed.arrays.lengths[places] - self._wishes.num_prompt[seats])

    def _want_logprobs(self, rows: _Rows) -> bool:
        return bool(self._wishes.has_logprobs[rows.seats].any())

    def _tensors(self, rows: _Rows, seeds: NDArray[np.int64]) -> SamplingTensors:
        wishes, seats = self._wishes, rows.seats
        return SamplingTensors(
            temperature=self._to_device(wishes.temperature[seats]),
            top_k=self._to_device(wishes.top_k[seats]),
            top_p=self._to_device(wishes.top_p[seats]),
            min_p=self._to_device(wishes.min_p[seats]),
            seed=self._to_device(seeds),
            output_index=self._to_device(rows.indices),
            any_top_k=bool((wishes.top_k[seats] > 0).any()),
            any_top_p=bool((wishes.top_p[seats] < 1).any()),
        )

    def _on_device(self, masks: TokenMasks | None) -> TokenMasks | None:
        if masks is None or not len(masks.rows):
            return None
        bits = self._to_device(masks.bits.numpy()).view(masks.bits.shape)
        return TokenMasks(self._to_device(masks.rows.numpy()), bits)

    def _adjust(self, rows: _Rows, logits: Tensor, masks: TokenMasks | None) -> Tensor:
        """Bias, penalties, barred tokens, grammars, in this order; ``logits`` where there are none, else a copy."""
        wishes, seats = self._wishes, rows.seats
        biases = [
            (row, token_id, bias)
            for row, chunk in _chosen(rows.chunks, wishes.has_bias[seats])
            for token_id, bias in chunk.sequence.request.params.logit_bias.items()
        ]
        early = _chosen(rows.chunks, rows.indices < wishes.num_barred[seats])
        barred = [(row, token_id, -inf) for row, c in early for token_id in set(sampling_row(c).barred_ids)]
        places = self._places[seats]
        is_penalised = bool((places >= 0).any())
        if not (biases or barred or is_penalised or masks):
            return logits
        logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
        self._add(logits, biases)
        if is_penalised:
            columns = (places, wishes.repetition[seats], wishes.presence[seats], wishes.frequency[seats])
            penalise(logits, Penalties(self._all_counts(), *(self._to_device(column) for column in columns)))
        self._add(logits, barred)
        if masks:
            masks.apply(logits)
        return logits

    def _add(self, logits: Tensor, entries: Seq[tuple[int, int, float]]) -> None:
        if entries:
            rows, token_ids, values = zip(*entries, strict=True)
            columns = (np.array(rows, np.int32), np.array(token_ids, np.int32), np.array(values, np.float32))
            add_at(logits, *(self._to_device(column) for column in columns))

    # --- counts of penalised sequences ---------------------------------------------------------

    def _count_known(self, seat: Seat) -> None:
        """Count the tokens that the host knows; those sampled later are counted as they are drawn."""
        sequence = seat.sequence
        prompt = np.unique(np.array(sequence.token_ids[: sequence.num_prompt], dtype=np.int64))
        output, times = np.unique(np.array(sequence.output_ids, dtype=np.int64), return_counts=True)
        counts = self._all_counts()[int(self._places[seat.number])]
        counts.zero_()
        counts.index_fill_(0, self._to_device(prompt), IN_PROMPT)
        counts.index_add_(0, self._to_device(output), self._to_device(times.astype(np.int32)))

    def _all_counts(self) -> Tensor:
        if self._counts is None:  # as large as the logits of a full step, and most services never need it
            shape = (self._num_places, self._vocab_size)
            self._counts = torch.zeros(shape, dtype=torch.int32, device=self._stream.device)
        return self._counts

    # --- to and from the device ----------------------------------------------------------------

    def _logprobs(self, logits: Tensor, token_ids: Tensor, num_top: int) -> HostLogprobs:
        found = top_logprobs(logits, token_ids, min(num_top, self._vocab_size))
        return HostLogprobs(*(self._to_host(t) for t in (found.token_logprobs, found.top_ids, found.top_logprobs)))

    def _to_device(self, values: NDArray[np.generic]) -> Tensor:
        given = torch.from_numpy(values)
        host = self._stream.host_memory(given.numel(), given.dtype)
        host.copy_(given.reshape(-1))
        return host.to(self._stream.device, non_blocking=True)

    def _to_host(self, values: Tensor) -> Tensor:
        host = self._stream.host_memory(values.numel(), values.dtype).view(values.shape)
        host.copy_(values, non_blocking=True)
        return host


def _wrapped(seeds: Seq[int]) -> NDArray[np.int64]:
    """Their lowest 64 bits."""
    return np.array([seed & ((1 << 64) - 1) for seed in seeds], dtype=np.uint64).astype(np.int64)


def _chosen(chunks: Seq[Chunk | None], are_chosen: NDArray[np.bool_]) -> list[tuple[int, Chunk]]:
    """With their rows."""
    return [(row, c) for row in map(int, np.flatnonzero(are_chosen)) if (c := chunks[row]) is not None]
