"""The kernels beside attention on a GPU: right against float64 first, then timed against the bandwidth of a copy.

`python benchmarks/gpu_kernels_small.py` prints what failed and a table. Shapes are those of an 8B model. A time is the
median of graph replays, divided by the launches in the graph; inputs rotate through more memory than the L2 holds
where that is the question (weights, large batches).
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional

from crossdock.kernels import activation, gemv, kv_copy, norm_rope, reference, sampling

DEVICE = torch.device("cuda")
DTYPE = torch.bfloat16
HIDDEN, NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, FFN, VOCAB = 4096, 32, 8, 128, 14336, 128256
NUM_LAYERS, BLOCK_SIZE = 4, 16
EPS = 1e-5
BATCHES = (1, 32, 256)
ROTATED_BYTES = 600 << 20
GEMV_SHAPES = (
    ("qkv", 6144, HIDDEN),
    ("o", HIDDEN, HIDDEN),
    ("gate_up", 2 * FFN, HIDDEN),
    ("down", HIDDEN, FFN),
    ("lm_head", VOCAB, HIDDEN),
)
GEMV_ROWS = (1, 2, 8, 16, 32)


@dataclass(frozen=True, slots=True)
class Timing:
    """``peer`` is a library's time for the same work."""

    name: str
    seconds: float
    num_bytes: float
    peer: float | None = None


def normal(*shape: int, std: float = 1.0, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE).normal_(std=std)


def seconds(calls: Sequence[Callable[[], object]], repeats: int = 9) -> float:
    """Of one call, all of them in one graph."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    graph.replay()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return float(median(times)) / 1e3 / len(calls)


def copy_bandwidth() -> float:
    """Bytes read and written a second by the library's copy, outside of a graph."""
    source = torch.randint(0, 256, (4 << 30,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    times = []
    for _ in range(9):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        target.copy_(source)
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return 2 * source.numel() / float(median(times)) * 1e3


def error(out: Tensor, expected: Tensor) -> float:
    return float((out.double() - expected.double()).norm() / expected.double().norm())


# --- right -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Checks:
    failed: int = 0

    def within(self, name: str, out: Tensor, expected: Tensor, bound: float = 6e-3) -> None:
        self.holds(name, error(out, expected) <= bound, f"{error(out, expected):.1e}")

    def holds(self, name: str, is_right: bool, found: str = "") -> None:
        if not is_right:
            self.failed += 1
            print(f"WRONG {name} {found}", flush=True)


def check_norm(checks: Checks, num_rows: int) -> None:
    x, residual, weight = normal(num_rows, HIDDEN), normal(num_rows, HIDDEN), normal(HIDDEN)
    total = (residual.double() + x.double()).to(DTYPE)
    out = norm_rope.add_rms_norm(x, residual, weight, EPS)
    checks.holds(f"residual {num_rows}", torch.equal(residual, total))
    checks.within(f"norm {num_rows}", out, functional.rms_norm(total.double(), (HIDDEN,), weight.double(), EPS))


def check_rope(checks: Checks, num_rows: int) -> None:
    inputs = RopeInputs.random(num_rows)
    qkv, kv, norms = (
        inputs.qkv.double(),
        torch.full_like(inputs.kv, torch.nan).double(),
        (normal(HEAD_DIM), normal(HEAD_DIM)),
    )
    q_norm, k_norm = norms
    inputs.kv.fill_(torch.nan)
    table = (inputs.cos.double(), inputs.sin.double(), inputs.positions, inputs.slots, NUM_HEADS)
    reference.norm_rope_store(qkv, kv, *table, q_norm.double(), k_norm.double(), EPS)
    inputs.run(q_norm, k_norm)
    checks.within(f"rope {num_rows}", inputs.qkv, qkv)
    checks.holds(f"stored where {num_rows}", torch.equal(inputs.kv.isnan(), kv.isnan()))
    checks.within(f"stored {num_rows}", inputs.kv.nan_to_num(), kv.nan_to_num())


def check_silu(checks: Checks, num_rows: int) -> None:
    gate_up = normal(num_rows, 2 * FFN)
    gate, up = gate_up.double().chunk(2, -1)
    checks.within(f"silu {num_rows}", activation.silu_and_mul(gate_up), functional.silu(gate) * up)


def check_gemv(
    checks: Checks, name: str, num_outputs: int, depth: int, num_rows: int, dtype: torch.dtype = DTYPE
) -> None:
    x, weight = normal(num_rows, depth, dtype=dtype), normal(num_outputs, depth, std=depth**-0.5, dtype=dtype)
    exact = x.double() @ weight.double().T
    out = torch.full_like(exact, torch.nan, dtype=dtype)
    gemv.gemv(x, weight, out)
    checks.within(f"{name} {num_rows}", out, exact)
    again = torch.full_like(out, torch.nan)
    gemv.gemv(x, weight, again)
    checks.holds(f"{name} {num_rows} repeats", torch.equal(out, again))
    before = out.double()
    gemv.gemv_add(x, weight, out)
    checks.within(f"{name} {num_rows} added", out, before + exact)
    gated = torch.full((num_rows, num_outputs // 2), torch.nan, dtype=dtype, device=DEVICE)
    gemv.gemv_silu(x, weight, gated)
    gate, up = exact.chunk(2, -1)
    checks.within(f"{name} {num_rows} gated", gated, functional.silu(gate) * up)
    if num_rows == 1:
        norm = gemv.InputNorm(normal(depth, dtype=dtype), EPS)
        gemv.gemv(x, weight, out, norm=norm)
        normed = functional.rms_norm(x.double(), (depth,), norm.weight.double(), EPS)
        checks.within(f"{name} {num_rows} normed", out, normed @ weight.double().T)


def check_copies(checks: Checks) -> None:
    pool = torch.randint(0, 256, (64, 32, 65536), dtype=torch.uint8, device=DEVICE)
    blocks = torch.randperm(64, device=DEVICE)[:20].int()
    staging = kv_copy.gather_blocks(pool, blocks, range(8, 16))
    checks.holds("gather", torch.equal(staging, pool[blocks.long(), 8:16]))
    other, expected = torch.zeros_like(pool), torch.zeros_like(pool)
    kv_copy.scatter_blocks(staging, blocks.flip(0), range(8, 16), other)
    expected[blocks.flip(0).long(), 8:16] = staging
    checks.holds("scatter", torch.equal(other, expected))
    span = kv_copy.layer_span(pool, range(32))
    kv_copy.copy_blocks(pool.data_ptr(), other.data_ptr(), blocks, blocks.flip(0), span)
    checks.holds("copy", torch.equal(other[blocks.flip(0).long()], pool[blocks.long()]))


def check_sampling(checks: Checks, num_rows: int, dtype: torch.dtype, spread: float) -> None:
    logits = normal(num_rows, VOCAB, std=spread, dtype=dtype)
    checks.holds(f"argmax {num_rows} {dtype}", torch.equal(sampling.argmax(logits), logits.argmax(-1)))
    params = random_params(num_rows)
    found, expected = sampling.sample(logits, params), reference.sample(logits, params)
    num_other = int((found != expected).sum())
    checks.holds(f"sample {num_rows} {dtype} {spread}", num_other * 50 <= num_rows, f"{num_other} of {num_rows} differ")
    alone = [sampling.sample(logits[i : i + 1], one_row(params, i)).item() for i in range(min(num_rows, 8))]
    checks.holds(f"sample alone {dtype}", alone == found[: len(alone)].tolist())
    top, exact = sampling.top_logprobs(logits, found, 20), reference.top_logprobs(logits, found, 20)
    checks.holds(f"top ids {num_rows} {dtype}", torch.equal(top.top_ids, exact.top_ids))
    checks.within(f"top logprobs {num_rows}", top.top_logprobs, exact.top_logprobs, 1e-5)
    checks.within(f"own logprobs {num_rows}", top.token_logprobs, exact.token_logprobs, 1e-5)


def random_params(num_rows: int) -> reference.SamplingTensors:
    """A mix of everything."""
    pick = partial(torch.randint, size=(num_rows,), device=DEVICE)
    return reference.SamplingTensors(
        temperature=torch.tensor([0.0, 0.6, 1.0, 1.5], device=DEVICE)[pick(4)],
        top_k=torch.tensor([0, 0, 1, 20, 1000], device=DEVICE)[pick(5)].int(),
        top_p=torch.tensor([1.0, 0.95, 0.5], dtype=torch.float64, device=DEVICE)[pick(3)],
        min_p=torch.tensor([0.0, 0.0, 0.05], device=DEVICE)[pick(3)],
        seed=torch.randint(-(2**63), 2**63 - 1, (num_rows,), device=DEVICE),
        output_index=pick(1000),
    )


def one_row(params: reference.SamplingTensors, row: int) -> reference.SamplingTensors:
    rows = slice(row, row + 1)
    return reference.SamplingTensors(
        params.temperature[rows], params.top_k[rows], params.top_p[rows],
        params.min_p[rows], params.seed[rows], params.output_index[rows],
    )  # fmt: skip


def check_all() -> int:
    checks = Checks()
    for num_rows in (1, 7, 300):
        check_norm(checks, num_rows)
        check_rope(checks, num_rows)
        check_silu(checks, num_rows)
    for name, num_outputs, depth in (*GEMV_SHAPES, ("odd", 1002, 1544)):
        for num_rows in GEMV_ROWS:
            check_gemv(checks, name, num_outputs, depth, num_rows)
    for num_rows in (1, 3, 16, 30):
        check_gemv(checks, "float32", 1002, 1544, num_rows, torch.float32)
        check_gemv(checks, "float32 wide", 10240, 9000, num_rows, torch.float32)
    check_copies(checks)
    for dtype in (torch.bfloat16, torch.float32):
        for spread in (1.0, 4.0):
            check_sampling(checks, 100, dtype, spread)
    return checks.failed


# --- fast ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RopeInputs:
    qkv: Tensor
    kv: Tensor
    cos: Tensor
    sin: Tensor
    positions: Tensor
    slots: Tensor

    @staticmethod
    def random(num_rows: int) -> "RopeInputs":
        num_blocks = num_rows // BLOCK_SIZE + 4
        pool = normal(num_blocks, NUM_LAYERS, 2, NUM_KV_HEADS, BLOCK_SIZE, HEAD_DIM)
        angles = torch.rand(9000, HEAD_DIM // 2, device=DEVICE) * 7
        slots = torch.randperm(num_blocks * BLOCK_SIZE, device=DEVICE)[:num_rows].int()
        slots[1::50] = -1
        return RopeInputs(
            normal(num_rows, (NUM_HEADS + 2 * NUM_KV_HEADS) * HEAD_DIM), pool[:, 1], angles.cos(), angles.sin(),
            torch.randint(0, 9000, (num_rows,), device=DEVICE).int(), slots,
        )  # fmt: skip

    def run(self, q_norm: Tensor | None = None, k_norm: Tensor | None = None) -> None:
        table = (self.cos, self.sin, self.positions, self.slots, NUM_HEADS)
        norm_rope.norm_rope_store(self.qkv, self.kv, *table, q_norm, k_norm, EPS)


def time_elementwise(num_rows: int) -> list[Timing]:
    copies = 8 if num_rows > 1000 else 20
    norms = [(normal(num_rows, HIDDEN), normal(num_rows, HIDDEN), normal(HIDDEN)) for _ in range(copies)]
    ropes = [RopeInputs.random(num_rows) for _ in range(copies)]
    gates = [normal(num_rows, 2 * FFN) for _ in range(copies)]
    add_rms_norm = [partial(norm_rope.add_rms_norm, *inputs, EPS) for inputs in norms]
    normed = [partial(inputs.run, *[normal(HEAD_DIM)] * 2) for inputs in ropes]
    rope_size = 2 * num_rows * HEAD_DIM * (2 * NUM_HEADS + 5 * NUM_KV_HEADS)
    return [
        Timing(f"add_rms_norm {num_rows}", seconds(add_rms_norm), 8 * num_rows * HIDDEN),
        Timing(f"rope_store {num_rows}", seconds([inputs.run for inputs in ropes]), rope_size),
        Timing(f"norm_rope_store {num_rows}", seconds(normed), rope_size),
        Timing(
            f"silu_and_mul {num_rows}",
            seconds([partial(activation.silu_and_mul, x) for x in gates]),
            6 * num_rows * FFN,
        ),
    ]


def time_gemv(name: str, num_outputs: int, depth: int, num_rows: int) -> Timing:
    size = num_outputs * depth * 2
    weights = [normal(num_outputs, depth, std=depth**-0.5) for _ in range(max(3, min(24, ROTATED_BYTES // size)))]
    x, out, residual = normal(num_rows, depth), normal(num_rows, num_outputs), normal(num_rows, num_outputs)
    gated, norm = normal(num_rows, num_outputs // 2), gemv.InputNorm(normal(depth), EPS) if num_rows == 1 else None
    calls: dict[str, Callable[[Tensor], object]] = {
        "gate_up": lambda w: gemv.gemv_silu(x, w, gated, norm),
        "o": lambda w: gemv.gemv_add(x, w, residual),
        "down": lambda w: gemv.gemv_add(x, w, residual),
    }
    call = calls.get(name, lambda w: gemv.gemv(x, w, out, norm=norm))
    ours = seconds([partial(call, w) for w in weights] * 2)
    peer = seconds([partial(torch.mm, x, w.T, out=out) for w in weights] * 2)
    return Timing(f"gemv {name} {num_rows}", ours, size, peer)


def time_sampling(num_rows: int) -> list[Timing]:
    rows = [normal(num_rows, VOCAB, std=4.0) for _ in range(max(2, min(12, ROTATED_BYTES // (num_rows * VOCAB * 2))))]
    size = num_rows * VOCAB * 2
    every = torch.ones(num_rows, device=DEVICE)
    plain = reference.SamplingTensors.neutral(num_rows, DEVICE)
    columns = (plain.seed, plain.output_index)
    top_k = reference.SamplingTensors(every, every.int() * 50, every.double(), every * 0, *columns, any_top_p=False)
    top_p = reference.SamplingTensors(
        every, every.int() * 0, every.double() * 0.95, every * 0, *columns, any_top_k=False
    )
    both = reference.SamplingTensors(every, every.int() * 50, every.double() * 0.95, every * 0, *columns)
    ids = torch.zeros(num_rows, dtype=torch.int64, device=DEVICE)
    return [
        Timing(f"argmax {num_rows}", seconds([partial(sampling.argmax, x) for x in rows]), size,
               seconds([partial(torch.argmax, x, -1) for x in rows])),
        *(Timing(f"sample {name} {num_rows}", seconds([partial(sampling.sample, x, params) for x in rows]), size)
          for name, params in (("T", plain), ("top-k", top_k), ("top-p", top_p), ("top-k top-p", both))),
        Timing(f"top_logprobs {num_rows}", seconds([partial(sampling.top_logprobs, x, ids, 20) for x in rows]), size),
    ]  # fmt: skip


def time_copies() -> list[Timing]:
    pool = torch.randint(0, 256, (2048, 32, 65536), dtype=torch.uint8, device=DEVICE)
    order = torch.randperm(2048, device=DEVICE).int()
    blocks, others = order[:512], order[512:1024]
    timings = []
    for layers in (range(32), range(8)):
        size, staging = 2 * 512 * len(layers) * 65536, kv_copy.gather_blocks(pool, blocks, layers)
        addresses, span = (pool.data_ptr(), pool.data_ptr()), kv_copy.layer_span(pool, layers)
        calls: dict[str, Callable[[], object]] = {
            "gather": partial(kv_copy.gather_blocks, pool, blocks, layers),
            "scatter": partial(kv_copy.scatter_blocks, staging, blocks, layers, pool),
            "copy by 16 programs": partial(kv_copy.copy_blocks, *addresses, blocks, others, span),
        }
        timings += [Timing(f"{name} 512 x {len(layers)}", seconds([call]), size) for name, call in calls.items()]
    return timings


def time_decode(num_rows: int) -> Timing:
    """All products of a decode step of 32 layers; ours with norms, activations and sums, the library's without."""
    layers = [[normal(n, k, std=k**-0.5) for _, n, k in GEMV_SHAPES[:-1]] for _ in range(32)]
    lm_head, hidden, attended = normal(VOCAB, HIDDEN, std=0.01), normal(num_rows, HIDDEN), normal(num_rows, HIDDEN)
    qkv, gated, logits = (normal(num_rows, width) for width in (GEMV_SHAPES[0][1], FFN, VOCAB))
    wide = normal(num_rows, 2 * FFN)
    scale = normal(HIDDEN)
    norm = gemv.InputNorm(scale, EPS) if num_rows == 1 else None

    def normed() -> Tensor:
        return hidden if norm is not None else norm_rope.add_rms_norm(None, hidden, scale, EPS)

    def ours() -> None:
        for w_qkv, w_o, w_gate_up, w_down in layers:
            gemv.gemv(normed(), w_qkv, qkv, norm=norm)
            gemv.gemv_add(attended, w_o, hidden)
            gemv.gemv_silu(normed(), w_gate_up, gated, norm)
            gemv.gemv_add(gated, w_down, hidden)
        gemv.gemv(normed(), lm_head, logits, norm=norm)

    def library() -> None:
        for w_qkv, w_o, w_gate_up, w_down in layers:
            torch.mm(hidden, w_qkv.T, out=qkv)
            torch.mm(attended, w_o.T, out=hidden)
            torch.mm(hidden, w_gate_up.T, out=wide)
            torch.mm(gated, w_down.T, out=hidden)
        torch.mm(hidden, lm_head.T, out=logits)

    num_bytes = 2 * (lm_head.numel() + sum(weight.numel() for layer in layers for weight in layer))
    return Timing(f"products of a step {num_rows}", seconds([ours]), num_bytes, seconds([library]))


def main() -> None:
    if failed := check_all():
        print(f"{failed} checks failed")
    bandwidth = copy_bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {bandwidth / 1e12:.2f} TB/s", flush=True)
    timings = [timing for num_rows in (*BATCHES, 8192) for timing in time_elementwise(num_rows)]
    timings += [time_gemv(*shape, num_rows) for shape in GEMV_SHAPES for num_rows in GEMV_ROWS]
    timings += [timing for num_rows in BATCHES for timing in time_sampling(num_rows)]
    timings += [time_decode(num_rows) for num_rows in (1, 8, 16)]
    timings += time_copies()
    print(f"{'kernel':32} {'µs':>9} {'TB/s':>6} {'of copy':>8} {'library µs':>11}")
    for t in timings:
        peer = f"{t.peer * 1e6:11.2f}" if t.peer else ""
        share = t.num_bytes / bandwidth / t.seconds
        print(f"{t.name:32} {t.seconds * 1e6:9.2f} {t.num_bytes / t.seconds / 1e12:6.2f} {share:8.0%} {peer}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
