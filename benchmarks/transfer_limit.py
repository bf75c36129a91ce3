"""What the way between two pools could carry: plain copies by size, within the host's memory or from GPU to GPU."""

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median

import numpy as np
import torch

SIZES = tuple(1 << power for power in (16, 20, 24, 26, 28, 30))
NUM_ROUNDS = 9
MAX_HOST_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class PlainCopy:
    num_bytes: int
    gigabytes_per_second: float


def plain_copies(device: str) -> Iterator[PlainCopy]:
    """From the first GPU to the last, which may be the same one; the median of `NUM_ROUNDS`, the first left out."""
    for num_bytes in SIZES:
        if device == "cuda":
            yield PlainCopy(num_bytes, _rate(_copy_between_gpus(num_bytes), num_bytes))
        elif num_bytes <= MAX_HOST_BYTES:
            yield PlainCopy(num_bytes, _rate(_copy_in_host(num_bytes), num_bytes))


def _copy_in_host(num_bytes: int) -> Callable[[], object]:
    source, target = np.ones(num_bytes, np.uint8), np.empty(num_bytes, np.uint8)
    return lambda: np.copyto(target, source)


def _copy_between_gpus(num_bytes: int) -> Callable[[], object]:
    source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, device="cuda:0")
    target = torch.empty(num_bytes, dtype=torch.uint8, device=f"cuda:{torch.cuda.device_count() - 1}")

    def copy() -> None:
        target.copy_(source)
        torch.cuda.synchronize(source.device)
        torch.cuda.synchronize(target.device)

    return copy


def _rate(copy: Callable[[], object], num_bytes: int) -> float:
    seconds = []
    for _ in range(NUM_ROUNDS + 1):
        begun = time.perf_counter()
        copy()
        seconds.append(time.perf_counter() - begun)
    return num_bytes / median(seconds[1:]) / 1e9


def machine() -> list[str]:
    """Lines about the GPUs and how they are linked; none without a GPU."""
    if not torch.cuda.is_available():
        return []
    numbers = range(torch.cuda.device_count())
    lines = [f"GPU {number}: {torch.cuda.get_device_name(number)}" for number in numbers]
    pairs = [(one, other) for one in numbers for other in numbers if one != other]
    lines += [f"GPU {a} may write to GPU {b}: {torch.cuda.can_device_access_peer(a, b)}" for a, b in pairs]
    ran = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=False)
    return lines + ran.stdout.splitlines()
