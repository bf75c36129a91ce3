"""The engine of a GPU: on one where there is one, else under Triton's interpreter, with a stream that runs at once."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from crossdock.benchmarks.offline_engine import OfflineEngine  # noqa: E402
from crossdock.core.block_hash import BlockHasher, model_root  # noqa: E402
from crossdock.core.block_pool import BlockPool  # noqa: E402
from crossdock.core.block_tables import BlockTables  # noqa: E402
from crossdock.core.config import CHUNK_TOKENS  # noqa: E402
from crossdock.core.prefix_cache import PrefixCache  # noqa: E402
from crossdock.kvtransfer.pool_bytes import PASSED  # noqa: E402
from crossdock.model.cpu_executor import CpuExecutor  # noqa: E402
from crossdock.model.cuda_startup import build_executor, build_network  # noqa: E402
from crossdock.model.device_stream import CudaStream, DeviceStream, Launch, Mark  # noqa: E402
from crossdock.model.engine_plan import BuiltEngine, EnginePlan  # noqa: E402
from crossdock.model.grammar import Grammars  # noqa: E402
from crossdock.model.kv_tensors import KvTensors  # noqa: E402
from crossdock.model.loading import build_transformer  # noqa: E402
from crossdock.model.startup import LoadedModel, no_vocabulary  # noqa: E402

NUM_PROGRAMS = None if HAS_GPU else 6


class ImmediateStream:
    """`DeviceStream` of a CPU: all that is launched has run when the launch returns, and a graph launches anew."""

    device = torch.device("cpu")
    handle = 0

    def launching(self) -> AbstractContextManager[object]:
        return nullcontext()

    def host_memory(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        return torch.empty(num_elements, dtype=dtype)

    def mark(self) -> Mark:
        return PASSED

    def capture(self, launch: Launch, rehearse: Callable[[], None]) -> Launch:
        return launch


def gpu_stream(number: int = 0) -> DeviceStream:
    return CudaStream(torch.device("cuda", number)) if HAS_GPU else ImmediateStream()


def gpu_executor(plan: EnginePlan, num_blocks: int) -> BuiltEngine:
    stream = gpu_stream()
    with torch.inference_mode(), stream.launching():
        kv = KvTensors(plan.layout, num_blocks, device=stream.device)
    return BuiltEngine(build_executor(plan, build_network(plan, stream, NUM_PROGRAMS), kv, stream), kv)


def cpu_executor(plan: EnginePlan, num_blocks: int) -> BuiltEngine:
    transformer = build_transformer(plan.spec, plan.weights, plan.dtype)
    kv = KvTensors(plan.layout, num_blocks)
    num_groups = plan.config.num_layer_groups
    executor = CpuExecutor(transformer, kv, plan.layout, num_groups, wake=plan.wake, grammars=plan.grammars)
    return BuiltEngine(executor, kv)


def engine_of(plan: EnginePlan, make: Callable[[EnginePlan, int], BuiltEngine]) -> OfflineEngine:
    """An engine over a pool of ``plan.config.num_blocks``."""
    num_blocks, block_size = plan.config.num_blocks or 0, plan.config.block_size
    pool = BlockPool(num_blocks)
    hasher = BlockHasher(b"key", model_root(b"key", "m", plan.layout), block_size)
    tables = BlockTables(pool, PrefixCache(pool, plan.config.prefix_cache), hasher, block_size)
    grammars = plan.grammars or Grammars(no_vocabulary, plan.spec.vocab_size)
    built, longest = make(plan, num_blocks), plan.longest_request(num_blocks)
    chunk_tokens = plan.config.chunk_tokens or CHUNK_TOKENS["cpu"]
    model = LoadedModel(plan.spec, plan.layout, tables, built.executor, built.kv, longest, chunk_tokens, grammars)
    return OfflineEngine(model, plan.config)
