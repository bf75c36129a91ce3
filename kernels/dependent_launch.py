"""Kernels that start while the one before them in the stream still runs (programmatic dependent launch, Hopper on).

A kernel launched so must wait before it reads what earlier kernels wrote and before it writes anything; until then it
may read what never changes, such as weights. Every program of it waits, also one that has nothing to do: only then
does the end of a kernel mean that all before it have ended. Kernels of others (cuBLAS, torch) may stand between.
"""

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra import cuda

FIRST_CAPABILITY = (9, 0)
NOT_EARLY = {"EARLY": False}


@cache
def dependent_launch(device: torch.device) -> dict[str, bool]:
    """How to launch a kernel that calls `let_next_start` and `wait_for_previous` and has a parameter ``EARLY``."""
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < FIRST_CAPABILITY:
        return NOT_EARLY
    return {"EARLY": True, "launch_pdl": True}


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Once all programs of this kernel have come here, those of the next may take the room that is left."""
    if EARLY:
        cuda.gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Until all earlier kernels have ended and their writes are seen."""
    if EARLY:
        cuda.gdc_wait()
