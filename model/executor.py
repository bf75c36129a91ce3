"""Runs steps on the device and tells when; the only place that knows that the device is asynchronous.

On a CPU "the device" is one thread of its own, which plays the part of a CUDA stream: steps run in
launch order, the caller's thread stays free to plan, to talk to peers and to push KV. A launched step
announces every layer group as soon as its KV is written.
"""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from ..core.kv_layout import KvLayout
from ..core.sequence import Chunk, ChunkResult
from .batch import build_batch
from .kv_tensors import KvTensors
from .sampler import SamplingRow, prompt_logprobs, sample
from .transformer import Transformer


@dataclass(slots=True, eq=False)
class Launched:
    """A step on its way: the value that goes round the loop.

    ``sampled`` holds the ids drawn, one a sampling chunk, and stays on the device to feed the next step.
    ``num_groups_done`` layer groups have their KV written.
    """

    chunks: Seq[Chunk]
    num_groups_done: int = 0
    sampled: Tensor | None = None
    row_of: dict[int, int] = field(default_factory=dict)
    future: Future[list[ChunkResult]] = field(default_factory=Future)

    @property
    def is_done(self) -> bool:
        return self.future.done()

    def results(self) -> list[ChunkResult]:
        """Blocks until the step has run; one result a chunk, in the order of ``chunks``."""
        return self.future.result()


class Executor:
    """One model on one device with one pool.

    ``wake`` is called, from another thread, whenever a layer group or a step is done.
    """

    def __init__(
        self,
        transformer: Transformer,
        kv: KvTensors,
        layout: KvLayout,
        num_layer_groups: int,
        num_threads: int | None = None,
        wake: Callable[[], None] = lambda: None,
    ) -> None:
        self._transformer = transformer
        self._kv = kv
        self._layout = layout
        self.num_layer_groups = len(layout.layer_groups(num_layer_groups))
        self._group_after_layer = {g.end - 1: i + 1 for i, g in enumerate(layout.layer_groups(num_layer_groups))}
        self._wake = wake
        num_threads = num_threads or torch.get_num_threads()
        self._device = ThreadPoolExecutor(1, "device", initializer=partial(torch.set_num_threads, num_threads))

    def launch(self, chunks: Seq[Chunk], previous: Launched | None) -> Launched:
        """Start a step; it begins when the one before has ended, whose sampled ids it may take."""
        launched = Launched(chunks)
        sampling = [chunk for chunk in chunks if chunk.samples]
        launched.row_of = {id(chunk.sequence): row for row, chunk in enumerate(sampling)}
        rows = [_sampling_row(chunk) for chunk in sampling]
        token_ids = [_known_ids(chunk) for chunk in chunks]
        launched.future = self._device.submit(self._run, launched, token_ids, rows, previous)
        launched.future.add_done_callback(lambda _: self._wake())
        return launched

    def close(self) -> None:
        """Wait for the steps in flight and end the device thread."""
        self._device.shutdown(wait=True)

    @torch.inference_mode()
    def _run(
        self, launched: Launched, token_ids: list[list[int]], rows: list[SamplingRow], previous: Launched | None
    ) -> list[ChunkResult]:
        chunks = launched.chunks
        ends = list(accumulate(chunk.num_tokens for chunk in chunks))
        ids = torch.tensor([i for chunk_ids in token_ids for i in chunk_ids], dtype=torch.int64)
        pending = _pending_ids(chunks, previous)
        for chunk, end, token_id in zip(chunks, ends, pending, strict=True):
            if chunk.takes_pending:
                ids[end - 1] = token_id
        self._clear_opened(chunks)
        hidden = self._transformer.forward(build_batch(chunks, ids, self._layout), self._kv, self._announce(launched))
        sampling = [i for i, chunk in enumerate(chunks) if chunk.samples]
        results = [ChunkResult(None)] * len(chunks)
        if sampling:
            logits = self._transformer.logits(hidden[[ends[i] - 1 for i in sampling]])
            drawn = sample(logits, rows, torch.stack([pending[i] for i in sampling]))
            launched.sampled = drawn.token_ids
            for i, token_id, logprobs in zip(sampling, drawn.token_ids.tolist(), drawn.logprobs, strict=True):
                results[i] = ChunkResult(token_id, logprobs)
        for i, chunk in enumerate(chunks):
            if chunk.sequence.request.params.prompt_logprobs is not None and chunk.start < chunk.sequence.num_prompt:
                results[i] = self._with_prompt_logprobs(results[i], chunk, hidden[ends[i] - chunk.num_tokens : ends[i]])
        return results

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

    def _announce(self, launched: Launched) -> Callable[[int], None]:
        def layer_is_done(layer: int) -> None:
            if layer in self._group_after_layer:
                launched.num_groups_done = self._group_after_layer[layer]
                self._wake()

        return layer_is_done

    def _with_prompt_logprobs(self, result: ChunkResult, chunk: Chunk, hidden: Tensor) -> ChunkResult:
        """Log-probabilities of the prompt tokens that follow each of the chunk's positions."""
        sequence = chunk.sequence
        next_ids = sequence.token_ids[chunk.start + 1 : min(chunk.end + 1, sequence.num_prompt)]
        if not next_ids:
            return result
        logits = self._transformer.logits(hidden[: len(next_ids)])
        num_top = sequence.request.params.prompt_logprobs or 0
        scored = prompt_logprobs(logits, torch.tensor(next_ids), num_top)
        return ChunkResult(result.token_id, result.logprobs, tuple(scored))


def _known_ids(chunk: Chunk) -> list[int]:
    """The chunk's ids as far as the host knows them; a zero holds the place of the pending one."""
    ids = chunk.sequence.token_ids[chunk.start : chunk.end]
    return [*ids, 0] if chunk.takes_pending else ids


def _pending_ids(chunks: Seq[Chunk], previous: Launched | None) -> list[Tensor]:
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


def _sampling_row(chunk: Chunk) -> SamplingRow:
    sequence = chunk.sequence
    return SamplingRow(sequence.request.params, sequence.token_ids, sequence.num_prompt, chunk.output_index)
