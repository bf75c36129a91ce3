"""One step on a GPU, from packed inputs to tokens on their way to the host: as a graph where one is there."""

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from dataclasses import replace as with_fields
from itertools import islice

import numpy as np
import torch
from msgspec.structs import replace
from torch import Tensor

from ..core.kv_layout import LayerGroup
from ..core.sequence import Chunk, ChunkResult, Draw
from ..kernels.kv_copy import LOCAL, copy_blocks, layer_span
from ..kernels.sampling import argmax
from .cuda_attention import DeviceBatch
from .cuda_graphs import StepGraphs
from .cuda_layers import CudaNormedLinear
from .cuda_sampler import CudaSampler, HostDraws, HostLogprobs
from .device_stream import DeviceStream, Mark
from .executor import NO_NUMBERS, BlockCopies, forks_of, pooled_share, pools, scores_prompt
from .grammar import ConstrainedStep
from .kv_tensors import KvTensors
from .step_inputs import StepInputs
from .step_packing import PackedStep
from .step_shapes import StepShape, StepShapes
from .transformer import Transformer

NOTHING = ChunkResult(None)


@dataclass(frozen=True, slots=True)
class PromptYield:
    """What one chunk of a prompt yields beside a token: ``pieces`` of log-probabilities, a share of a vector.

    ``pooled [hidden_size]`` is float64, on the host, and ``None`` where none is wanted.
    """

    pieces: list[HostLogprobs]
    pooled: Tensor | None

    def added_to(self, result: ChunkResult, chunk: Chunk) -> ChunkResult:
        num_top = chunk.sequence.request.params.prompt_logprobs or 0
        logprobs = tuple(row for piece in self.pieces for row in piece.rows([num_top] * len(piece.token_logprobs)))
        pooled = b"" if self.pooled is None else self.pooled.numpy().tobytes()
        return replace(result, prompt_logprobs=logprobs, pooled=pooled)


@dataclass(frozen=True, slots=True)
class RunningStep:
    """A step that is queued on the device: when its layer groups are written, when it is done, and what it yields then.

    ``draws`` are those of the step, in the order of ``packed.sampled``; ``yields[i]`` belongs to ``packed.scored[i]``;
    ``forks`` are the first tokens of all forks of ``packed.forked``. Nothing may be read before the device has passed
    ``end``.
    """

    packed: PackedStep
    group_marks: tuple[Mark, ...]
    end: Mark
    draws: HostDraws
    forks: HostDraws | None
    yields: tuple[PromptYield, ...]

    def results(self, chunks: Seq[Chunk]) -> list[ChunkResult]:
        """One a chunk, once the device has passed ``end``."""
        sampled = self.packed.sampled
        if self.packed.decodes and self.draws.logprobs is None:
            ids: list[int] = self.draws.token_ids.tolist()
            return [ChunkResult(i) if i >= 0 else NO_NUMBERS for i in ids[: len(chunks)]]  # rows are in their order
        drawn = zip(sampled, self.draws.each(_num_top(sampled) if self.draws.logprobs is not None else ()), strict=True)
        results = {id(chunk): _result(own) for chunk, own in drawn if chunk is not None}
        for chunk, forks in self._forks():
            if results[id(chunk)] is not NO_NUMBERS:
                results[id(chunk)] = replace(results[id(chunk)], forks=forks)
        for chunk, found in zip(self.packed.scored, self.yields, strict=True):
            results[id(chunk)] = found.added_to(results.get(id(chunk), NOTHING), chunk)
        return [results.get(id(chunk), NOTHING) for chunk in chunks]

    def _forks(self) -> Iterator[tuple[Chunk, tuple[Draw, ...]]]:
        if self.forks is None:
            return
        forked = [chunk for place in self.packed.forked if (chunk := self.packed.sampled[place]) is not None]
        each = iter(self.forks.each(_num_top([chunk for chunk in forked for _ in forks_of(chunk)])))
        for chunk in forked:
            yield chunk, tuple(islice(each, len(forks_of(chunk))))


def _result(draw: Draw) -> ChunkResult:
    return ChunkResult(draw.token_id, draw.logprobs) if draw.token_id >= 0 else NO_NUMBERS


def _num_top(chunks: Seq[Chunk | None]) -> list[int | None]:
    return [None if chunk is None else chunk.sequence.request.params.logprobs for chunk in chunks]


class CudaRunner:
    """Launches steps in the order of `run`."""

    def __init__(
        self,
        stream: DeviceStream,
        transformer: Transformer[DeviceBatch],
        kv: KvTensors,
        inputs: StepInputs,
        sampler: CudaSampler,
        groups: Seq[LayerGroup],
        shapes: StepShapes,
    ) -> None:
        assert isinstance(transformer.head, CudaNormedLinear), "the head writes to memory that graphs share"
        self._stream = stream
        self._transformer = transformer
        self._head = transformer.head
        self._kv = kv
        self._inputs = inputs
        self._sampler = sampler
        self._last_layers = {group.end - 1 for group in groups}
        shape = (len(inputs.sampled), transformer.spec.vocab_size)
        self._logits = torch.zeros(shape, dtype=transformer.embedding.dtype, device=stream.device)
        self._graphs = StepGraphs(stream, shapes.graphed(), self._launch, self._rehearse)

    def run(self, packed: PackedStep, constrained: ConstrainedStep | None = None) -> RunningStep:
        """Queue a step behind the one before, whose drawn ids it may take.

        The masks of grammars are computed when the model has been queued, while the device is at work.
        """
        with torch.inference_mode(), self._stream.launching():
            self._sampler.seat(packed.newcomers)
            if packed.copies is not None:
                self._copy(packed.copies)
            if packed.scored or packed.shape not in self._graphs:
                return self._run_eagerly(packed, constrained)
            self._inputs.refill(packed)
            marks: list[Mark] = []
            self._graphs.replay(packed.shape, lambda: marks.append(self._stream.mark()))
            logits, logprobs = self._logits[: packed.shape.num_sequences], None
            forks = self._sampler.sample_forks(packed, logits, constrained)
            if not self._sampler.is_plain(packed):
                logprobs = self._sampler.sample(packed, logits, constrained)
            return self._ended(packed, marks, logprobs, forks, ())

    def _copy(self, copies: BlockCopies) -> None:
        """Whole blocks, behind the steps launched before and ahead of this one."""
        pool = self._kv.tensor.view(self._kv.num_blocks, self._kv.layout.num_layers, -1).view(torch.uint8)
        lists = [np.array(blocks, dtype=np.int32) for blocks in (copies.sources, copies.destinations)]
        sources, destinations = self._inputs.to_device(lists)
        span, address = layer_span(pool, range(pool.shape[1])), pool.data_ptr()
        copy_blocks(address, address, sources, destinations, span, LOCAL)

    @torch.inference_mode()
    def _launch(self, shape: StepShape, on_group: Callable[[], None]) -> None:
        """All of a step in which the likeliest tokens are wanted, from fixed inputs to ``sampled``."""
        on_layers = self._at_group_ends(on_group) if shape.has_long_prompts else None
        self._decide(self._transformer.forward(self._inputs.begin(shape), self._kv, on_layers))

    @torch.inference_mode()
    def _rehearse(self, shape: StepShape) -> None:
        """With two layers: those behind the first launch what it does, but for the last."""
        two_layers = with_fields(self._transformer, layers=self._transformer.layers[:2])
        self._decide(two_layers.forward(self._inputs.begin(shape), self._kv))

    def _decide(self, hidden: Tensor) -> None:
        """The likeliest token of each row."""
        logits = self._logits[: len(hidden)]
        self._head.into(hidden, logits)
        self._inputs.sampled[: len(logits)].copy_(argmax(logits))

    def _at_group_ends(self, on_group: Callable[[], None]) -> Callable[[int], None]:
        def on_layers(layer: int) -> None:
            if layer in self._last_layers:
                on_group()

        return on_layers

    def _run_eagerly(self, packed: PackedStep, constrained: ConstrainedStep | None) -> RunningStep:
        marks: list[Mark] = []
        on_layers = self._at_group_ends(lambda: marks.append(self._stream.mark()))
        hidden = self._transformer.forward(self._inputs.upload(packed), self._kv, on_layers)
        logits, logprobs = self._logits[: packed.shape.num_sequences], None
        self._head.into(hidden[: len(logits)], logits)
        forks = self._sampler.sample_forks(packed, logits, constrained)
        if self._sampler.is_plain(packed):
            self._inputs.sampled[: len(logits)].copy_(argmax(logits))
        else:
            logprobs = self._sampler.sample(packed, logits, constrained)
        return self._ended(packed, marks, logprobs, forks, self._yields(packed, hidden[len(logits) :]))

    def _yields(self, packed: PackedStep, hidden: Tensor) -> tuple[PromptYield, ...]:
        """``hidden`` are the rows of the scored chunks, one after the other."""
        if not packed.scored:
            return ()
        each = hidden.split([chunk.num_tokens for chunk in packed.scored])
        return tuple(self._yield(chunk, rows) for chunk, rows in zip(packed.scored, each, strict=True))

    def _yield(self, chunk: Chunk, hidden: Tensor) -> PromptYield:
        pieces = self._sampler.score(chunk, hidden, self._head) if scores_prompt(chunk) else []
        return PromptYield(pieces, self._pooled(chunk, hidden) if pools(chunk) else None)

    def _pooled(self, chunk: Chunk, hidden: Tensor) -> Tensor:
        share = pooled_share(chunk, self._transformer.normed(hidden))
        on_host = self._stream.host_memory(len(share), share.dtype)
        return on_host.copy_(share, non_blocking=True)

    def _ended(
        self,
        packed: PackedStep,
        marks: list[Mark],
        logprobs: HostLogprobs | None,
        forks: HostDraws | None,
        yields: tuple[PromptYield, ...],
    ) -> RunningStep:
        num_sampled = len(packed.sampled)
        token_ids = self._stream.host_memory(num_sampled, torch.int64)
        token_ids.copy_(self._inputs.sampled[:num_sampled], non_blocking=True)
        return RunningStep(packed, tuple(marks), self._stream.mark(), HostDraws(token_ids, logprobs), forks, yields)
