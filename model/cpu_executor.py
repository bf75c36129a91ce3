"""Steps on a CPU: "the device" is one thread of its own, which plays the part of a CUDA stream.

The caller's thread stays free to plan, to talk to peers and to push KV.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from dataclasses import replace as with_fields
from functools import partial
from itertools import accumulate

import torch
from msgspec.structs import replace
from torch import Tensor

from ..core.kv_layout import KvLayout
from ..core.sequence import Chunk, ChunkResult, Draw
from .batch import Batch, build_batch
from .executor import (
    NO_NUMBERS,
    Launched,
    block_copies,
    forks_of,
    known_ids,
    next_prompt_ids,
    pooled_share,
    pools,
    sampling_row,
    scores_prompt,
    wanted_rows,
)
from .grammar import ConstrainedStep, Grammars
from .kv_tensors import KvTensors
from .sampler import SamplingRow, TokenMasks, prompt_logprobs, sample
from .transformer import Transformer


@dataclass(slots=True, eq=False)
class CpuLaunched:
    """`Launched`. ``sampled`` holds the ids drawn, one a sampling chunk, in rows ``row_of`` sequences."""

    chunks: Seq[Chunk]
    num_groups_done: int = 0
    sampled: Tensor | None = None
    row_of: dict[int, int] = field(default_factory=dict)
    future: Future[list[ChunkResult]] = field(default_factory=Future)

    @property
    def is_done(self) -> bool:
        return self.future.done()

    def results(self) -> list[ChunkResult]:
        return self.future.result()


@dataclass(frozen=True, slots=True)
class _WantedDraws:
    """One row a sampling chunk, then one a fork; ``places[i]`` is the chunk whose logits row ``i`` is drawn from."""

    rows: list[SamplingRow]
    places: list[int]


def _wanted_draws(sampling: Seq[Chunk]) -> _WantedDraws:
    draws = _WantedDraws([sampling_row(chunk) for chunk in sampling], list(range(len(sampling))))
    for place, chunk in enumerate(sampling):
        own = draws.rows[place]
        for fork in forks_of(chunk):
            draws.rows.append(with_fields(own, params=replace(own.params, seed=fork.seed)))
            draws.places.append(place)
    return draws


def _draw(
    logits: Tensor, draws: _WantedDraws, pending: Tensor, masks: TokenMasks | None
) -> tuple[Tensor, list[ChunkResult]]:
    """The tokens of all rows, on the device, and what each sampling chunk yields."""
    num_chunks = len(logits)
    if len(draws.rows) > num_chunks:
        logits, pending = logits[draws.places], pending[draws.places]
        masks = masks.of(draws.places) if masks is not None else None
    drawn = sample(logits, draws.rows, pending, masks)
    each = [Draw(*one) for one in zip(drawn.token_ids.tolist(), drawn.logprobs, strict=True)]
    forks: list[list[Draw]] = [[] for _ in range(num_chunks)]
    for place, draw in zip(draws.places[num_chunks:], each[num_chunks:], strict=True):
        forks[place].append(draw)
    results = [
        ChunkResult(own.token_id, own.logprobs, forks=tuple(of_forks)) if is_sound else NO_NUMBERS
        for own, of_forks, is_sound in zip(each[:num_chunks], forks, drawn.is_sound.tolist(), strict=False)
    ]
    return drawn.token_ids, results


class CpuExecutor:
    """`Executor`. ``wake`` is called, from the device's thread, whenever a layer group or a step is done."""

    def __init__(
        self,
        transformer: Transformer[Batch],
        kv: KvTensors,
        layout: KvLayout,
        num_layer_groups: int,
        num_threads: int | None = None,
        wake: Callable[[], None] = lambda: None,
        grammars: Grammars | None = None,
    ) -> None:
        """Without ``grammars`` no request may have one."""
        self._transformer = transformer
        self._kv = kv
        self._layout = layout
        self.num_layer_groups = len(layout.layer_groups(num_layer_groups))
        self._group_after_layer = {g.end - 1: i + 1 for i, g in enumerate(layout.layer_groups(num_layer_groups))}
        self._wake = wake
        self._grammars = grammars
        num_threads = num_threads or torch.get_num_threads()
        self._device = ThreadPoolExecutor(1, "device", initializer=partial(torch.set_num_threads, num_threads))

    def launch(self, chunks: Seq[Chunk], previous: Launched | None) -> CpuLaunched:
        assert previous is None or isinstance(previous, CpuLaunched), "steps of one executor follow each other"
        launched = CpuLaunched(chunks)
        sampling = [chunk for chunk in chunks if chunk.samples]
        launched.row_of = {id(chunk.sequence): row for row, chunk in enumerate(sampling)}
        token_ids = [known_ids(chunk) for chunk in chunks]
        constrained = self._grammars.begin(sampling) if self._grammars else None
        draws = _wanted_draws(sampling)
        launched.future = self._device.submit(self._run, launched, token_ids, draws, constrained, previous)
        launched.future.add_done_callback(lambda _: self._wake())
        return launched

    def close(self) -> None:
        self._device.shutdown(wait=True)

    @torch.inference_mode()
    def _run(
        self,
        launched: CpuLaunched,
        token_ids: Seq[Seq[int]],
        draws: _WantedDraws,
        constrained: ConstrainedStep | None,
        previous: CpuLaunched | None,
    ) -> list[ChunkResult]:
        chunks = launched.chunks
        ends = accumulate(chunk.num_tokens for chunk in chunks)
        ids = torch.tensor([i for chunk_ids in token_ids for i in chunk_ids], dtype=torch.int64)
        pending = _pending_ids(chunks, previous)
        for chunk, end, token_id in zip(chunks, ends, pending, strict=True):
            if chunk.takes_pending:
                ids[end - 1] = token_id
        if copies := block_copies(chunks, self._layout.block_size):
            self._kv.tensor[copies.destinations] = self._kv.tensor[copies.sources]
        self._clear_opened(chunks)
        wanted = wanted_rows(chunks)
        batch = build_batch(chunks, ids, self._layout, wanted.rows)
        normed = self._transformer.forward(batch, self._kv, self._announce(launched))
        sampling = [i for i, chunk in enumerate(chunks) if chunk.samples]
        results = [ChunkResult(None)] * len(chunks)
        if sampling:
            logits = self._transformer.logits(normed[[wanted.of_chunk[i][-1] for i in sampling]])
            masks = constrained.masks() if constrained else None
            launched.sampled, found = _draw(logits, draws, torch.stack([pending[i] for i in sampling]), masks)
            for i, result in zip(sampling, found, strict=True):
                results[i] = result
        for i, chunk in enumerate(chunks):
            if scores_prompt(chunk):
                results[i] = self._with_prompt_logprobs(results[i], chunk, normed[wanted.of_chunk[i]])
            if pools(chunk):
                share = pooled_share(chunk, self._transformer.normed(normed[wanted.of_chunk[i]]))
                results[i] = replace(results[i], pooled=share.numpy().tobytes())
        return constrained.settled(chunks, results) if constrained else results

    def _clear_opened(self, chunks: Seq[Chunk]) -> None:
        """Zero the blocks that this step begins but does not fill.

        Whatever lay there before could be no number at all, and a masked NaN still poisons an attention's sum.
        """
        block_size = self._layout.block_size
        opened = [
            chunk.blocks[chunk.end // block_size]
            for chunk in chunks
            if chunk.end % block_size and chunk.start <= chunk.end - chunk.end % block_size
        ]
        if opened:
            self._kv.tensor[opened] = 0

    def _announce(self, launched: CpuLaunched) -> Callable[[int], None]:
        def layer_is_done(layer: int) -> None:
            if layer in self._group_after_layer:
                launched.num_groups_done = self._group_after_layer[layer]
                self._wake()

        return layer_is_done

    def _with_prompt_logprobs(self, result: ChunkResult, chunk: Chunk, normed: Tensor) -> ChunkResult:
        """Log-probabilities of the prompt tokens that follow each of the chunk's positions."""
        next_ids = next_prompt_ids(chunk)
        if not next_ids:
            return result
        logits = self._transformer.logits(normed[: len(next_ids)])
        num_top = chunk.sequence.request.params.prompt_logprobs or 0
        scored = prompt_logprobs(logits, torch.tensor(next_ids, dtype=torch.int64), num_top)
        return replace(result, prompt_logprobs=tuple(scored))


def _pending_ids(chunks: Seq[Chunk], previous: CpuLaunched | None) -> list[Tensor]:
    """For each chunk the id that the step before sampled for it, -1 where the host knows all ids."""
    none = torch.tensor(-1)
    ids = []
    for chunk in chunks:
        if chunk.takes_pending:
            assert previous is not None and previous.sampled is not None, "a pending token comes from the step before"
            ids.append(previous.sampled[previous.row_of[id(chunk.sequence)]])
        else:
            ids.append(none)
    return ids
