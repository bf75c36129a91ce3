"""Builds an engine on a GPU: weights, the memory that lasts, a measured worst step, the pool, the graphs."""

import logging
import time

import torch

from ..core.config import CHUNK_TOKENS
from .cuda_attention import CudaAttention, DeviceBatch, DevicePrompts, RotationTable
from .cuda_executor import CudaExecutor
from .cuda_layers import CudaLayers
from .cuda_runner import CudaRunner
from .cuda_sampler import CudaSampler
from .device_stream import CudaStream, DeviceStream
from .engine_plan import MIN_BLOCKS, BuiltEngine, EnginePlan
from .gpu_memory import GIB, GpuMemory
from .kv_tensors import KvTensors
from .loading import assemble
from .rope import Rope
from .step_inputs import StepInputs
from .step_packing import StepPacker
from .step_shapes import FEW_PROMPTS, StepShapes
from .transformer import Transformer
from .warm_up import WarmUp

GRAPH_BYTES = GIB // 2
"""Set aside for the graphs of a step's ladder; their buffers are shared."""
CONTEXT_BYTES = GIB * 3 // 4
"""What CUDA itself takes for a process, compiled kernels included."""
COPIES_OF_LOGITS = 3
"""In float32, that sampling with penalties and filters makes at most."""

_log = logging.getLogger("crossdock.gpu")


def build_on_gpu(plan: EnginePlan, device: torch.device) -> BuiltEngine:
    """Raises ``ValueError`` if the pool finds no room."""
    torch.cuda.set_device(device)
    stream, phases = CudaStream(device), _Phases()
    warm_up = WarmUp(plan, lambda: CudaStream(device))
    transformer = build_network(plan, stream)
    phases.end("weights")
    warm_up.finish()
    del warm_up  # and its memory
    phases.end("kernels")
    num_blocks = _num_blocks(plan, transformer, stream)
    phases.end("largest step")
    free_before, _ = torch.cuda.mem_get_info(device)
    with torch.inference_mode(), stream.launching():
        kv = KvTensors(plan.layout, num_blocks, device=device)
    executor = build_executor(plan, transformer, kv, stream)
    torch.cuda.synchronize(device)
    phases.end("graphs")
    pool_bytes = num_blocks * plan.layout.block_bytes
    other_bytes = free_before - torch.cuda.mem_get_info(device)[0] - pool_bytes
    _log.info(
        "ready: %s; pool of %d blocks (%.1f GiB), graphs and buffers %.2f GiB",
        phases, num_blocks, pool_bytes / GIB, other_bytes / GIB,
    )  # fmt: skip
    return BuiltEngine(executor, kv)


class _Phases:
    """How long each phase took."""

    def __init__(self) -> None:
        self._begun_at = time.perf_counter()
        self._seconds: dict[str, float] = {}

    def end(self, name: str) -> None:
        now = time.perf_counter()
        self._seconds[name], self._begun_at = now - self._begun_at, now

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self._seconds.items())


def build_network(plan: EnginePlan, stream: DeviceStream, num_programs: int | None = None) -> Transformer[DeviceBatch]:
    """The model with the classes of a GPU; ``num_programs`` as in `split_context`."""
    spec, device = plan.spec, stream.device
    with torch.inference_mode(), stream.launching():
        rotations = RotationTable.of(Rope(spec.rope, spec.head_dim, device), plan.max_model_len)
        attention = CudaAttention(spec, rotations, plan.config.max_num_seqs, num_programs)
        return assemble(spec, plan.weights, plan.dtype, device, CudaLayers(), attention, plan.on_progress)


def build_executor(
    plan: EnginePlan, transformer: Transformer[DeviceBatch], kv: KvTensors, stream: DeviceStream
) -> CudaExecutor:
    """Everything but weights and pool."""
    shapes, layout, num_seats = StepShapes(plan.config.max_num_seqs), plan.layout, 2 * plan.config.max_num_seqs
    max_blocks = layout.num_blocks_for(plan.longest_request(kv.num_blocks))
    groups = layout.layer_groups(plan.config.num_layer_groups)
    with torch.inference_mode(), stream.launching():
        inputs = StepInputs(stream, shapes, num_seats, max_blocks)
        sampler = CudaSampler(stream, num_seats, plan.spec.vocab_size, inputs.sampled)
        runner = CudaRunner(stream, transformer, kv, inputs, sampler, groups, shapes)
    packer = StepPacker(shapes, num_seats, layout.block_size)
    return CudaExecutor(runner, packer, len(groups), plan.wake, plan.grammars)


def _num_blocks(plan: EnginePlan, transformer: Transformer[DeviceBatch], stream: CudaStream) -> int:
    config, layout, device = plan.config, plan.layout, stream.device
    if config.num_blocks or config.kv_bytes:
        return config.num_blocks or (config.kv_bytes or 0) // layout.block_bytes
    activations = _largest_step(plan, transformer, stream)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    is_alone = config.num_sharing_gpu == 1  # what others take meanwhile is their share
    in_use = total - free if is_alone else torch.cuda.memory_reserved(device) + CONTEXT_BYTES
    share = config.gpu_memory_utilization / config.num_sharing_gpu
    memory = GpuMemory(total, share, in_use + fixed_bytes(plan), activations, GRAPH_BYTES)
    return memory.num_blocks(layout.block_bytes, MIN_BLOCKS)


def fixed_bytes(plan: EnginePlan) -> int:
    """What `StepInputs`, the logits and the counts of penalised sequences will take."""
    num_seats, vocab_size = 2 * plan.config.max_num_seqs, plan.spec.vocab_size
    max_sequences = StepShapes(plan.config.max_num_seqs).max_sequences
    max_blocks = plan.layout.num_blocks_for(plan.max_model_len)
    logits = max_sequences * vocab_size * plan.dtype.itemsize
    return 4 * max_blocks * (num_seats + max_sequences) + logits + 4 * num_seats * vocab_size


def _largest_step(plan: EnginePlan, transformer: Transformer[DeviceBatch], stream: CudaStream) -> int:
    """Bytes that a step of full chunks takes at its peak, measured without keeping its KV; compiles kernels beside."""
    device = stream.device
    with torch.inference_mode(), stream.launching():
        kv = KvTensors(plan.layout, 1, device=device)
        batch = empty_prompt(plan, plan.config.chunk_tokens or CHUNK_TOKENS["cuda"], device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        transformer.head(transformer.forward(batch, kv))
    torch.cuda.synchronize(device)
    logits_bytes = 4 * plan.config.max_num_seqs * plan.spec.vocab_size
    return torch.cuda.max_memory_allocated(device) - before + COPIES_OF_LOGITS * logits_bytes


def empty_prompt(plan: EnginePlan, num_tokens: int, device: torch.device) -> DeviceBatch:
    """A prompt of zeros whose KV is not stored; it reads what lies in block 0."""

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    none = [0] * (FEW_PROMPTS - 1)
    zeros = torch.zeros(num_tokens, dtype=torch.int32, device=device)
    tables = torch.zeros(FEW_PROMPTS, plan.layout.num_blocks_for(num_tokens), dtype=torch.int32, device=device)
    starts, lengths = ints(0, *none), ints(num_tokens, *none)
    query_starts = ints(0, *[num_tokens] * FEW_PROMPTS)
    prompts = DevicePrompts(query_starts, starts, lengths, tables, False)
    return DeviceBatch(zeros, zeros, zeros - 1, None, prompts, ints(num_tokens - 1))
