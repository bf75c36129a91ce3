"""The pool's memory: one tensor over shared or own memory, and its views.

All memory of a pool holds finite numbers at all times: slots behind the last token of a sequence are read and
masked, and a NaN would survive the mask. It starts as zeros; whoever writes other bytes into a block (a probe)
clears it again.
"""

import numpy as np
import torch
from numpy.typing import NDArray

from ..core.kv_layout import KvLayout

CPU = torch.device("cpu")
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class KvTensors:
    """KV of ``num_blocks`` blocks: ``tensor [num_blocks, layer, K or V, kv head, block_size, head_dim]``.

    Lies in ``buffer`` when given (memory of the host that other processes may write), which must be writable and at
    least ``num_blocks * layout.block_bytes`` long, else in memory of its own on ``device``, zeroed.
    """

    def __init__(
        self, layout: KvLayout, num_blocks: int, buffer: memoryview | None = None, device: torch.device = CPU
    ) -> None:
        dtype, shape = TORCH_DTYPES[layout.dtype], (num_blocks, *layout.block_shape)
        if buffer is None:
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        else:
            count = num_blocks * layout.block_bytes // dtype.itemsize
            self.tensor = torch.frombuffer(buffer, dtype=dtype, count=count).view(shape)
        self.layout = layout
        self.num_blocks = num_blocks
        self.layers = tuple(self.tensor[:, layer] for layer in range(layout.num_layers))

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """The same memory as ``[num_blocks, num_layers, layer_bytes]``, for transfers."""
        flat = self.tensor.view(-1).view(torch.uint8).numpy()
        return flat.reshape(self.num_blocks, self.layout.num_layers, self.layout.layer_bytes)
