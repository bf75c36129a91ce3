"""What an engine is built from on any device, and what building it yields."""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..core.config import EngineConfig
from ..core.kv_layout import KvLayout
from .executor import Executor
from .grammar import Grammars
from .kv_tensors import KvTensors
from .loading import Weights
from .spec import DecoderSpec

MIN_BLOCKS = 2


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """``wake`` is called, from another thread, whenever a layer group or a step is done; ``on_progress(done, total)``
    follows the layers while they load; ``grammars`` are those that requests may have, if any.
    """

    spec: DecoderSpec
    weights: Weights
    dtype: torch.dtype
    config: EngineConfig
    wake: Callable[[], None] = lambda: None
    on_progress: Callable[[int, int], None] | None = None
    grammars: Grammars | None = None

    @property
    def layout(self) -> KvLayout:
        return self.spec.kv_layout(self.config.block_size, str(self.dtype).removeprefix("torch."))

    @property
    def max_model_len(self) -> int:
        """The longest request that is wanted, whatever the pool holds."""
        return self.config.max_model_len or self.spec.max_position_embeddings

    def longest_request(self, num_blocks: int) -> int:
        """Tokens of the longest request that is let in: what is wanted, capped by a pool of so many blocks.

        Capping keeps the promise that every admitted request fits the pool alone. Raises ``ValueError`` for a pool that
        can't hold any.
        """
        block_size = self.config.block_size
        if num_blocks < MIN_BLOCKS:
            raise ValueError(f"the pool would have {num_blocks} blocks of {block_size} tokens; give it more memory")
        return min(self.max_model_len, num_blocks * block_size)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An executor and its pool."""

    executor: Executor
    kv: KvTensors

    @property
    def num_blocks(self) -> int:
        return self.kv.num_blocks
