"""From files on disk to all of an engine but its parts: weights, pool, tables and executor."""

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..core.block_hash import BlockHasher, ModelFingerprint, model_root
from ..core.block_pool import BlockPool
from ..core.block_tables import BlockTables
from ..core.config import CHUNK_TOKENS, CPU_KV_BYTES, DUMMY, EngineConfig
from ..core.grammar import Vocabulary
from ..core.kv_layout import KvLayout
from ..core.prefix_cache import PrefixCache
from .cpu_executor import CpuExecutor
from .engine_plan import BuiltEngine, EnginePlan
from .executor import Executor
from .families import decoder_spec
from .grammar import Grammars
from .kv_tensors import KvTensors
from .loading import RandomWeights, build_transformer
from .spec import DecoderSpec
from .weights import open_checkpoint, read_config

AUTO = "auto"
DUMMY_SEED = 0
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What steps need; ``kv`` is the pool's memory, ``max_model_len`` the longest request that it can hold alone."""

    spec: DecoderSpec
    layout: KvLayout
    tables: BlockTables
    executor: Executor
    kv: KvTensors
    max_model_len: int
    chunk_tokens: int
    grammars: Grammars


def no_vocabulary() -> Vocabulary:
    """For an engine that knows no text; raises ``ValueError``."""
    raise ValueError("this engine was started without one")


def load_model(
    path: Path,
    fingerprint: ModelFingerprint,
    cluster_key: bytes,
    config: EngineConfig,
    allocate: Callable[[int], memoryview] | None = None,
    wake: Callable[[], None] = lambda: None,
    on_progress: Callable[[int, int], None] | None = None,
    load_vocabulary: Callable[[], Vocabulary] = no_vocabulary,
) -> LoadedModel:
    """Load a checkpoint (a folder or a GGUF file) and build its pool.

    ``allocate(num_bytes)`` provides the pool's memory on a CPU, where other processes must reach it.
    ``on_progress(done, total)`` follows the layers. ``load_vocabulary()`` is for the first request with a grammar, and
    called from another thread. Raises ``ValueError`` for a model or configuration that can't work,
    with the numbers.
    """
    device = choose_device(config.device)
    checkpoint = None if is_dummy(config) else open_checkpoint(path, device)
    spec = decoder_spec(checkpoint.config if checkpoint else read_config(path))
    dtype = choose_dtype(config.dtype, spec.dtype, device)
    weights = checkpoint or RandomWeights(spec, DUMMY_SEED, dtype, device)
    grammars = Grammars(load_vocabulary, spec.vocab_size, wake)
    plan = EnginePlan(spec, weights, dtype, config, wake, on_progress, grammars)
    built = _build_on_cpu(plan, allocate) if device.type == "cpu" else _build_on_gpu(plan, device)
    if checkpoint is not None:
        checkpoint.close()
    pool = BlockPool(built.num_blocks)
    root = model_root(cluster_key, fingerprint.model, plan.layout, fingerprint.weights)
    hasher = BlockHasher(cluster_key, root, config.block_size)
    tables = BlockTables(pool, PrefixCache(pool, config.prefix_cache), hasher, config.block_size)
    gc.collect()
    gc.freeze()  # what is loaded stays; a full collection that looks at it takes as long as a step
    longest = plan.longest_request(built.num_blocks)
    chunk_tokens = config.chunk_tokens or CHUNK_TOKENS[device.type]
    return LoadedModel(spec, plan.layout, tables, built.executor, built.kv, longest, chunk_tokens, grammars)


def is_dummy(config: EngineConfig) -> bool:
    """Whether weights are drawn instead of read; raises ``ValueError`` for a ``load_format`` that is neither."""
    if config.load_format not in (AUTO, DUMMY):
        raise ValueError(f"load_format {config.load_format!r} is not one of {AUTO}, {DUMMY}")
    return config.load_format == DUMMY


def choose_device(name: str) -> torch.device:
    """Raises ``ValueError`` for a device that is not there."""
    if name == AUTO:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    kind, _, number = name.partition(":")
    if name != "cpu" and (kind != "cuda" or not (number or "0").isdecimal()):
        raise ValueError(f"device {name!r} is not one of {AUTO}, cpu, cuda, cuda:N")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name!r} is not there: torch sees {torch.cuda.device_count()} CUDA devices")
    return torch.device("cpu") if kind == "cpu" else torch.device("cuda", int(number or 0))


def choose_dtype(name: str, saved: str, device: torch.device) -> torch.dtype:
    """``auto`` is the dtype that the checkpoint was ``saved`` in on a GPU, float32 on a CPU. Raises ``ValueError``."""
    if name == AUTO:
        name = "float32" if device.type == "cpu" else saved
    if name not in DTYPES:
        raise ValueError(f"dtype {name!r} is not one of {AUTO}, {', '.join(DTYPES)}")
    if name == "float16" and device.type == "cpu":
        raise ValueError("dtype 'float16' needs a GPU; a CPU computes in float32 or bfloat16")
    return DTYPES[name]


def share_gpus(config: EngineConfig, number: int, num_workers: int) -> EngineConfig:
    """The engine of worker ``number`` of the ``num_workers`` of this host: they take its GPUs in turn."""
    if config.device not in (AUTO, "cuda") or choose_device(config.device).type == "cpu":
        return config
    num_gpus = torch.cuda.device_count()
    gpu = number % num_gpus
    return replace(config, device=f"cuda:{gpu}", num_sharing_gpu=len(range(gpu, num_workers, num_gpus)))


def _build_on_cpu(plan: EnginePlan, allocate: Callable[[int], memoryview] | None) -> BuiltEngine:
    config, layout = plan.config, plan.layout
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    num_blocks = config.num_blocks or (config.kv_bytes or CPU_KV_BYTES) // layout.block_bytes
    plan.longest_request(num_blocks)  # refuses before anything slow
    transformer = build_transformer(plan.spec, plan.weights, plan.dtype, plan.on_progress)
    kv = KvTensors(layout, num_blocks, allocate(num_blocks * layout.block_bytes) if allocate else None)
    num_groups, wake = config.num_layer_groups, plan.wake
    executor = CpuExecutor(transformer, kv, layout, num_groups, config.num_threads, wake, plan.grammars)
    return BuiltEngine(executor, kv)


def _build_on_gpu(plan: EnginePlan, device: torch.device) -> BuiltEngine:
    from .cuda_startup import build_on_gpu  # triton, which only machines with a GPU have

    return build_on_gpu(plan, device)
