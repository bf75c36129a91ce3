"""From files on disk to all of an engine but its parts: weights, pool, tables and executor."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.block_hash import BlockHasher, model_root
from ..core.block_pool import BlockPool
from ..core.block_tables import BlockTables
from ..core.config import CPU_KV_BYTES, EngineConfig
from ..core.kv_layout import KvLayout
from ..core.prefix_cache import PrefixCache
from .cpu_executor import CpuExecutor
from .executor import Executor
from .families import decoder_spec
from .kv_tensors import KvTensors
from .loading import build_transformer
from .spec import DecoderSpec
from .weights import open_checkpoint

DTYPES = {"auto": torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """What steps need; ``max_model_len`` is the longest request that the pool can hold alone."""

    spec: DecoderSpec
    layout: KvLayout
    tables: BlockTables
    executor: Executor
    max_model_len: int


def load_model(
    path: Path,
    fingerprint: str,
    cluster_key: bytes,
    config: EngineConfig,
    allocate: Callable[[int], memoryview] | None = None,
    wake: Callable[[], None] = lambda: None,
    on_progress: Callable[[int, int], None] | None = None,
) -> LoadedModel:
    """Load a checkpoint (a folder or a GGUF file) and build its pool.

    ``allocate(num_bytes)`` provides the pool's memory where another process must reach it; ``on_progress(done, total)``
    follows the layers. Raises ``ValueError`` for a model or configuration that can't work, with the numbers.
    """
    if config.dtype not in DTYPES:
        raise ValueError(f"dtype {config.dtype!r} is not one of {', '.join(DTYPES)}")
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    dtype = DTYPES[config.dtype]
    checkpoint = open_checkpoint(path)
    spec = decoder_spec(checkpoint.config)
    kv_dtype = str(dtype).removeprefix("torch.")
    layout = KvLayout(spec.num_layers, spec.num_kv_heads, spec.head_dim, config.block_size, kv_dtype)
    num_blocks = config.num_blocks or (config.kv_bytes or CPU_KV_BYTES) // layout.block_bytes
    max_model_len = longest_request(config, spec.max_position_embeddings, num_blocks)
    transformer = build_transformer(spec, checkpoint, dtype, on_progress=on_progress)
    checkpoint.close()
    kv = KvTensors(layout, num_blocks, allocate(num_blocks * layout.block_bytes) if allocate else None)
    pool = BlockPool(num_blocks)
    hasher = BlockHasher(cluster_key, model_root(cluster_key, fingerprint, layout), config.block_size)
    tables = BlockTables(pool, PrefixCache(pool, config.prefix_cache), hasher, config.block_size)
    executor = CpuExecutor(transformer, kv, layout, config.num_layer_groups, config.num_threads, wake)
    return LoadedModel(spec, layout, tables, executor, max_model_len)


def longest_request(config: EngineConfig, model_limit: int, num_blocks: int) -> int:
    """Tokens of the longest request that is let in: the model's limit, or what was asked for, capped by the pool.

    Capping keeps the promise that every admitted request fits the pool alone. Raises ``ValueError`` for a pool that
    can't hold any.
    """
    capacity = num_blocks * config.block_size
    if num_blocks < 2:
        raise ValueError(f"the pool would have {num_blocks} blocks of {config.block_size} tokens; give it more memory")
    return min(config.max_model_len or model_limit, capacity)
