"""Our attention kernels on one GPU: right first, then how near the chip's limits, against torch's on the same work.

    python benchmarks/gpu_kernels.py

Correctness: random shapes drawn afresh against the float64 twin, outputs and unseen slots poisoned with NaN. Time:
one CUDA graph with a launch for each of several layers, so that no layer's KV is still in the L2 cache.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from crossdock.kernels import reference
from crossdock.kernels.paged_attention import decode_attention, prefill_attention
from crossdock.kernels.split_context import decode_workspace, plan_decode

DEVICE = torch.device("cuda")
COPY_BYTES_PER_SECOND = 4.25e12
MATRIX_FLOP_PER_SECOND = 793e12
MIN_BYTES_A_ROUND = 1 << 28
MAX_LAYERS = 32
NUM_CHECKS = 36
NUM_PROCESSES = 12
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


@dataclass(frozen=True, slots=True)
class Heads:
    """By default those of Llama-3.1-8B."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16

    @property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def token_bytes(self) -> int:
        """KV of one token in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    def queries(self, num_tokens: int) -> Tensor:
        """The first heads of random rows as wide as those of the QKV product."""
        width = self.num_heads + 2 * self.num_kv_heads
        rows = torch.randn(num_tokens, width, self.head_dim, dtype=self.dtype, device=DEVICE)
        return rows[:, : self.num_heads]


@dataclass(frozen=True, slots=True)
class Cache:
    """Random KV of some sequences at random places in a pool: a view for each layer, and who has which blocks."""

    layers: tuple[Tensor, ...]
    block_tables: Tensor
    lengths: Tensor


def random_cache(heads: Heads, lengths: Sequence[int], num_layers: int) -> Cache:
    num_blocks = [-(-length // heads.block_size) for length in lengths]
    shape = (sum(num_blocks), num_layers, 2, heads.num_kv_heads, heads.block_size, heads.head_dim)
    pool = torch.empty(shape, dtype=heads.dtype, device=DEVICE).normal_()
    order = torch.randperm(sum(num_blocks), dtype=torch.int32, device=DEVICE).split(num_blocks)
    tables = torch.zeros(len(lengths), -(-max(num_blocks) // 16) * 16, dtype=torch.int32, device=DEVICE)
    for table, blocks in zip(tables, order, strict=True):
        table[: len(blocks)] = blocks
    return Cache(tuple(pool[:, layer] for layer in range(num_layers)), tables, integers(lengths))


def integers(values: Sequence[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def bounds_of(counts: Sequence[int]) -> Tensor:
    return integers([sum(counts[:i]) for i in range(len(counts) + 1)])


def seconds_each(launches: Iterable[Callable[[], object]], num_replays: int = 15) -> float:
    """Median over replays of a graph of all launches, for one of them."""
    launches = list(launches)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        launches[0]()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(num_replays)]
    graph.replay()
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return float(median(begin.elapsed_time(end) for begin, end in events) / len(launches) / 1e3)


# --- right first ---------------------------------------------------------------------------------


def poisoned(cache: Cache, heads: Heads, first_seen: Sequence[int]) -> Tensor:
    """The cache's only layer with NaN in every slot that no query sees."""
    kv = cache.layers[0]
    seen = torch.zeros(len(kv), heads.block_size, dtype=torch.bool, device=DEVICE)
    for table, first, length in zip(cache.block_tables, first_seen, cache.lengths.tolist(), strict=True):
        tokens = torch.arange(first, length, device=DEVICE)
        seen[table[tokens // heads.block_size].long(), tokens % heads.block_size] = True
    return kv.masked_fill_(~seen[:, None, None, :, None], torch.nan)


@dataclass(frozen=True, slots=True)
class Checked:
    kernel: str
    heads: Heads
    error: float

    @property
    def dtype(self) -> torch.dtype:
        return self.heads.dtype


def error_of_random_shape(draw: random.Random) -> Checked:
    """The relative error of decode or prefill, whichever is drawn."""
    dtype = draw.choice(list(TOLERANCE))
    group, num_kv_heads = draw.choice([1, 2, 3, 4, 7, 8]), draw.choice([1, 2, 4])
    heads = Heads(
        group * num_kv_heads, num_kv_heads, draw.choice([64, 80, 96, 128, 256]), draw.choice([16, 32, 64, 128]), dtype
    )
    window, softcap = draw.choice([0, 0, 33, 500]), draw.choice([0.0, 0.0, 8.0])
    is_decode, num_seqs = draw.random() < 0.5, draw.randint(1, 9)
    counts = [draw.randint(1, 4 if is_decode else 400) for _ in range(num_seqs)]
    starts = [draw.choice([0, draw.randint(0, 3000)]) for _ in counts]
    cache = random_cache(heads, [start + count for start, count in zip(starts, counts, strict=True)], 1)
    kv = poisoned(cache, heads, [max(0, start + 1 - window) if window else 0 for start in starts])
    q, bounds = heads.queries(sum(counts)), bounds_of(counts)
    out, expected = torch.full_like(q, torch.nan), torch.empty_like(q, dtype=torch.float64)
    where, rules = (bounds, integers(starts), cache.block_tables), (heads.scale, window, softcap)
    reference.prefill_attention(q.double(), kv.double(), *where, expected, *rules)
    if is_decode:
        workspace = decode_workspace(num_seqs, heads.num_heads, num_kv_heads, heads.head_dim, DEVICE, max(counts))
        plan_decode(cache.lengths, workspace, window)
        decode_attention(q, kv, cache.block_tables, cache.lengths, out, workspace, *rules, bounds)
    else:
        prefill_attention(q, kv, *where, out, *rules)
    kernel = f"{'decode' if is_decode else 'prefill'} {counts} behind {starts}, window {window}, soft cap {softcap}"
    return Checked(kernel, heads, float((out - expected).norm() / expected.norm()))


def checked(seed: int) -> Checked:
    torch.manual_seed(seed)
    return error_of_random_shape(random.Random(seed))


def check(seeds: Sequence[int]) -> None:
    """Most of the time goes into compiling, so in several processes."""
    worst = dict.fromkeys(TOLERANCE, 0.0)
    with ProcessPoolExecutor(NUM_PROCESSES, get_context("spawn")) as pool:
        for seed, result in zip(seeds, pool.map(checked, seeds), strict=True):
            assert result.error < TOLERANCE[result.dtype], f"seed {seed}: {result}"
            worst[result.dtype] = max(worst[result.dtype], result.error)
    print(f"{len(seeds)} random shapes from seed {seeds[0]} on, worst relative errors against float64:", worst)


# --- then fast -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Decode:
    """A batch with some queries a sequence; FlashAttention-3's time for it on the same kind of machine."""

    lengths: tuple[int, ...]
    flash_3_us: float | None = None
    num_queries: int = 1

    def __str__(self) -> str:
        longest, shortest = max(self.lengths), min(self.lengths)
        context = f"{longest}" if longest == shortest else f"{shortest}-{longest}"
        queries = f", {self.num_queries} queries" if self.num_queries > 1 else ""
        return f"decode {len(self.lengths)} x {context}{queries}"

    @property
    def floor(self) -> float:
        return sum(self.lengths) * Heads().token_bytes / COPY_BYTES_PER_SECOND

    def seconds(self, heads: Heads, num_programs: int | None = None) -> float:
        num_bytes = sum(self.lengths) * heads.token_bytes
        cache = random_cache(heads, self.lengths, min(MAX_LAYERS, 1 + MIN_BYTES_A_ROUND // num_bytes))
        q = heads.queries(len(self.lengths) * self.num_queries)
        out = torch.empty(q.shape, dtype=q.dtype, device=DEVICE)
        sizes = (len(self.lengths), heads.num_heads, heads.num_kv_heads, heads.head_dim)
        workspace = decode_workspace(*sizes, DEVICE, self.num_queries, num_programs)
        plan_decode(cache.lengths, workspace)

        def launch(kv: Tensor) -> Callable[[], None]:
            where = (cache.block_tables, cache.lengths, out)
            return lambda: decode_attention(q, kv, *where, workspace, heads.scale)

        return seconds_each(launch(kv) for kv in cache.layers)


@dataclass(frozen=True, slots=True)
class Prefill:
    """Chunks of ``num_queries`` tokens each behind ``start`` cached ones."""

    num_seqs: int
    num_queries: int
    start: int = 0
    flash_3_us: float | None = None

    def __str__(self) -> str:
        return f"prefill {self.num_seqs} x {self.num_queries}" + (f" behind {self.start}" if self.start else "")

    @property
    def floor(self) -> float:
        num_scores = self.num_seqs * self.num_queries * (self.start + (self.num_queries + 1) / 2)
        return 4 * Heads().num_heads * Heads().head_dim * num_scores / MATRIX_FLOP_PER_SECOND

    def seconds(self, heads: Heads) -> float:
        num_tokens, length = self.num_seqs * self.num_queries, self.start + self.num_queries
        cache = random_cache(heads, [length] * self.num_seqs, 4)
        q = heads.queries(num_tokens)
        out = torch.empty(q.shape, dtype=q.dtype, device=DEVICE)
        where = (bounds_of([self.num_queries] * self.num_seqs), integers([self.start] * self.num_seqs))

        def launch(kv: Tensor) -> Callable[[], None]:
            return lambda: prefill_attention(q, kv, *where, cache.block_tables, out, heads.scale)

        return seconds_each(launch(kv) for kv in cache.layers)

    def seconds_of_torch(self, heads: Heads, backend: SDPBackend) -> float:
        """`scaled_dot_product_attention` on the heads of a QKV product, which is possible for whole prompts."""
        shape = (self.num_seqs, self.num_queries, heads.num_heads + 2 * heads.num_kv_heads, heads.head_dim)
        qkv = torch.randn(shape, dtype=heads.dtype, device=DEVICE).transpose(1, 2)
        q, k, v = qkv.split([heads.num_heads, heads.num_kv_heads, heads.num_kv_heads], 1)

        def launch() -> None:
            functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=heads.scale, enable_gqa=True)

        with sdpa_kernel(backend):
            return seconds_each([launch] * 4)


DECODES = (
    Decode((1024,), 10.5),
    Decode((1024,) * 8),
    Decode((1024,) * 32, 42),
    Decode((1024,) * 64),
    Decode((1024,) * 128, 147),
    Decode((1024,) * 256, 287),
    Decode((8192,) * 32, 194),
    Decode((32768,)),
    Decode((32768, *[1024] * 31)),
    Decode(tuple(range(4096, 64, -63))),
    Decode((1024,) * 32, num_queries=4),
    Decode((8192,), num_queries=32),
)
PREFILLS = (
    Prefill(1, 2048, flash_3_us=80),
    Prefill(1, 8192, flash_3_us=850),
    Prefill(2, 8192, flash_3_us=1898),
    Prefill(16, 1024, flash_3_us=357),
    Prefill(1, 2048, 6144),
    Prefill(1, 128, 8064),
)


def row(name: str, seconds: float, floor: float, flash_3_us: float | None) -> str:
    peer = "" if flash_3_us is None else f"{flash_3_us:9.1f}"
    return f"{name:34} {seconds * 1e6:9.1f} {floor * 1e6:9.1f} {floor / seconds:7.0%} {peer}"


def main() -> None:
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    seed = random.SystemRandom().randrange(1 << 30)
    check(range(seed, seed + NUM_CHECKS))
    heads = Heads()
    print(f"{'':34} {'us':>9} {'floor':>9} {'share':>7} {'FA3 us':>9}")
    for decode in DECODES:
        print(row(str(decode), decode.seconds(heads), decode.floor, decode.flash_3_us))
    for prefill in PREFILLS:
        print(row(str(prefill), prefill.seconds(heads), prefill.floor, prefill.flash_3_us))
        if not prefill.start:
            for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION):
                seconds = prefill.seconds_of_torch(heads, backend)
                print(row(f"  torch {backend.name.lower()}", seconds, prefill.floor, None))


if __name__ == "__main__":
    main()
