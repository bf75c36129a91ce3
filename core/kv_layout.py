"""Where the KV of a block lies in memory.

A pool is one array, block-major: ``[block][layer][K,V][kv head][token][head dim]``. A block is one
contiguous span for all layers, and so is the span of consecutive layers inside it, so that transfers,
host offload and re-slicing are plain strided copies.
"""

from dataclasses import dataclass
from itertools import pairwise

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers ``first`` up to but not including ``end``; what one push of a transfer carries."""

    first: int
    end: int


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and dtype of one block; two pools may exchange bytes only if their layouts are equal."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"KV dtype {self.dtype!r} is not one of {sorted(DTYPE_BYTES)}")

    @property
    def block_shape(self) -> tuple[int, int, int, int, int]:
        """``[layer, K or V, kv head, token, head dim]``."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_size, self.head_dim)

    @property
    def layer_bytes(self) -> int:
        """Bytes of one layer of one block, K and V."""
        return 2 * self.num_kv_heads * self.block_size * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.num_layers * self.layer_bytes

    def num_blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold ``num_tokens`` tokens."""
        return -(-num_tokens // self.block_size)

    def layer_groups(self, num_groups: int) -> tuple[LayerGroup, ...]:
        """At most ``num_groups`` contiguous groups whose sizes differ by at most one layer."""
        num_groups = min(num_groups, self.num_layers)
        borders = [self.num_layers * i // num_groups for i in range(num_groups + 1)]
        return tuple(LayerGroup(a, b) for a, b in pairwise(borders))
