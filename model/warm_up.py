"""Compiles the kernels of all steps to come, many at once, while the weights load: each is launched on next to nothing.

Triton compiles a kernel anew for each kind of argument: numbers that are 1, a multiple of 16 or neither, and sizes that
it is told when it compiles. The work here brings every kind that the shapes of `step_shapes` bring.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product

import torch
from torch import Tensor

from ..kernels.activation import silu_and_mul
from ..kernels.gemv import FEW_ROWS, MAX_ROWS
from ..kernels.norm_rope import add_rms_norm
from ..kernels.reference import SamplingTensors
from ..kernels.sampling import argmax, sample, top_logprobs
from .attention import StepAttention
from .cuda_attention import CudaAttention, DeviceBatch, DeviceDecodes, DevicePrompts, RotationTable
from .cuda_layers import CudaLayers, CudaNormedLinear
from .device_stream import DeviceStream
from .engine_plan import EnginePlan
from .kv_tensors import KvTensors
from .layers import DecoderLayer
from .loading import RandomWeights, assemble
from .rope import Rope
from .spec import DecoderSpec
from .step_inputs import COLUMNS
from .step_shapes import StepShape, StepShapes
from .transformer import Transformer

NUM_THREADS = 12
PRODUCT_ROWS = (1, FEW_ROWS, MAX_ROWS)
NORM_ROWS = (MAX_ROWS - 1, MAX_ROWS)

Work = Callable[[], object]


class WarmUp:
    """Begins to compile; `finish` waits until all is done."""

    def __init__(
        self, plan: EnginePlan, make_stream: Callable[[], DeviceStream], num_programs: int | None = None
    ) -> None:
        """``num_programs`` as in `split_context`."""
        self._threads = ThreadPoolExecutor(NUM_THREADS, "compile")
        self._make_stream = make_stream
        stream = make_stream()
        with torch.inference_mode(), stream.launching():
            works = list(all_work(plan, stream.device, num_programs))
        stream.mark().synchronize()
        self._running = [self._threads.submit(self._run, work) for work in works]

    def finish(self) -> None:
        for running in self._running:
            running.result()
        self._threads.shutdown()

    def _run(self, work: Work) -> None:
        stream = self._make_stream()
        with torch.inference_mode(), stream.launching():
            work()
        stream.mark().synchronize()


def all_work(plan: EnginePlan, device: torch.device, num_programs: int | None) -> Iterator[Work]:
    """On a model with one layer of each kind that the plan's has; the longest compilations first."""
    spec = replace(plan.spec, windows=tuple(dict.fromkeys(plan.spec.windows)))
    layout = replace(plan.layout, num_layers=spec.num_layers)

    def attention() -> CudaAttention:
        rotations = RotationTable.of(Rope(spec.rope, spec.head_dim, device), 1)
        return CudaAttention(spec, rotations, plan.config.max_num_seqs, num_programs)

    weights = RandomWeights(spec, 0, plan.dtype, device)
    network = assemble(spec, weights, plan.dtype, device, CudaLayers(), attention())
    for shape in kinds_of_shapes(StepShapes(plan.config.max_num_seqs)):
        kv = KvTensors(layout, 1, device=device)
        attend = partial(attention().plan, empty_batch(shape, COLUMNS, device), kv)
        yield partial(
            _attend, attend, network, torch.ones(shape.num_tokens, spec.qkv_size, dtype=plan.dtype, device=device)
        )
    hidden = torch.ones(NORM_ROWS[-1], spec.hidden_size, dtype=plan.dtype, device=device)
    yield from _sampling(network.head, hidden)
    for rows in PRODUCT_ROWS:
        yield from _products(network.layers[0], network.head, hidden[:rows], spec)
    yield from _elementwise(hidden, torch.ones(1, 2 * spec.intermediate_size, dtype=plan.dtype, device=device))


def _attend(plan: Callable[[], StepAttention], network: Transformer[DeviceBatch], qkv: Tensor) -> None:
    """Attention of all layers, planned once."""
    attend = plan()
    for index, layer in enumerate(network.layers):
        attend(index, layer, qkv)


def _elementwise(hidden: Tensor, gate_up: Tensor) -> Iterator[Work]:
    for rows in NORM_ROWS:
        yield partial(add_rms_norm, None, hidden[:rows], hidden[0], 1e-5)
    yield partial(silu_and_mul, gate_up)


def _products(layer: DecoderLayer, head: object, hidden: Tensor, spec: DecoderSpec) -> Iterator[Work]:
    assert isinstance(head, CudaNormedLinear)
    yield partial(layer.qkv, hidden.clone())
    yield partial(layer.o, hidden.new_ones(len(hidden), spec.q_size), hidden.clone())
    yield partial(layer.mlp, hidden.clone())
    yield partial(head, hidden.clone())


def _sampling(head: object, hidden: Tensor) -> Iterator[Work]:
    assert isinstance(head, CudaNormedLinear)
    logits = hidden.new_ones(2, len(head.weight))
    yield partial(argmax, logits)
    neutral = SamplingTensors.neutral(len(logits), logits.device)
    for top_k, top_p in product((False, True), repeat=2):
        yield partial(sample, logits, replace(neutral, any_top_k=top_k, any_top_p=top_p))
    yield partial(top_logprobs, logits, torch.zeros(2, dtype=torch.int64, device=logits.device), 1)


def kinds_of_shapes(shapes: StepShapes) -> Iterator[StepShape]:
    """One for each way in which attention is compiled: prompts by their number, short prompts, decodes, one decode."""
    for number in reversed(shapes.prompt_ladder):
        yield StepShape(0, number, number, False)
    yield next(shape for shape in shapes.graphed() if shape.is_short)
    for size in dict.fromkeys((shapes.max_num_seqs, 1)):  # one row alone is launched in another way
        yield StepShape(size, 0, size, False)


def empty_batch(shape: StepShape, max_blocks: int, device: torch.device) -> DeviceBatch:
    """Padding alone."""

    def zeros(*sizes: int) -> Tensor:
        return torch.zeros(sizes, dtype=torch.int32, device=device)

    n, num_prompts = shape.num_decodes, shape.num_prompts
    tables = zeros(shape.num_sequences, max_blocks)
    prompts = DevicePrompts(zeros(num_prompts + 1), zeros(num_prompts), zeros(num_prompts), tables[n:], shape.is_short)
    tokens = zeros(shape.num_tokens)
    decodes = DeviceDecodes(zeros(n), tables[:n]) if n else None
    return DeviceBatch(tokens, tokens, tokens - 1, decodes, prompts if num_prompts else None, None)
