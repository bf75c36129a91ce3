"""How large the pool of a GPU may be: what its share of the memory leaves once all else has been measured."""

from dataclasses import dataclass

GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of one GPU. ``in_use`` is what this process and others hold: context, weights, fixed buffers.

    ``activations`` is what the largest step took at its peak, ``graphs`` what the graphs may take.
    """

    total: int
    utilization: float
    in_use: int
    activations: int
    graphs: int

    @property
    def for_pool(self) -> int:
        return int(self.total * self.utilization) - self.in_use - self.activations - self.graphs

    def num_blocks(self, block_bytes: int, at_least: int) -> int:
        """Blocks that fit. Raises ``ValueError`` with the arithmetic if they are less than ``at_least``."""
        num_blocks = max(0, self.for_pool) // block_bytes
        if num_blocks < at_least:
            raise ValueError(
                f"no room for the KV pool: {self.utilization:g} of {_gib(self.total)} is "
                f"{_gib(int(self.total * self.utilization))}, of which {_gib(self.in_use)} are in use, the largest "
                f"step takes {_gib(self.activations)} and graphs {_gib(self.graphs)}; that leaves "
                f"{_gib(self.for_pool)}, and {at_least} blocks take {_gib(at_least * block_bytes)}. A higher "
                "gpu_memory_utilization, fewer chunk_tokens or a smaller max_num_seqs help"
            )
        return num_blocks


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.2f} GiB"
