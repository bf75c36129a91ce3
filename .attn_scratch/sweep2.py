import sys, time, json, os
import torch
from crossdock.benchmarks import gpu_kernels as g
from crossdock.benchmarks.gpu_kernels import Decode, Prefill, Heads
from crossdock.kernels import paged_attention as pa, split_context, hopper_attention as ha
import triton.experimental.gluon.language as gl

DEC = [(64,4,4),(64,4,3),(128,8,3),(128,4,3),(64,2,4),(64,8,4),(64,4,5),(128,8,4)]
LATE = {"EARLY": False}
mode = sys.argv[1]
def use(c, early=True):
    pa.decode_tile = lambda *a: c
    pa.dependent_launch = (lambda d: {"EARLY": True, "launch_pdl": True}) if early else (lambda d: dict(LATE))
def small(c, early, heads=Heads()):
    use(c, early)
    cache = g.random_cache(heads, (1024,), 2)
    q = heads.queries(1); out = torch.empty(q.shape, dtype=q.dtype, device="cuda")
    ws = g.decode_workspace(1, heads.num_heads, heads.num_kv_heads, heads.head_dim, g.DEVICE)
    g.plan_decode(cache.lengths, ws)
    pa.decode_attention(q, cache.layers[0], cache.block_tables, cache.lengths, out, ws, heads.scale)
    torch.cuda.synchronize()
if mode == "compile":
    for c in DEC[int(sys.argv[2])::8]:
        for e in (True, False):
            try: small(c, e)
            except Exception as ex: print("compile failed", c, repr(ex)[:150])
elif mode == "time":
    t0 = time.time()
    for d in (Decode((1024,)), Decode((1024,)*8), Decode((1024,)*32), Decode((1024,)*64), Decode((1024,)*128), Decode((1024,)*256), Decode((8192,)*32), Decode((32768,)), Decode((32768, *[1024]*31)), Decode(tuple(range(4096, 64, -63)))):
        print(f"{d} floor {d.floor*1e6:.1f}:", end="")
        for c in DEC:
            ts = []
            for e, f in ((True, 1), (True, 2), (True, 3), (False, 2)):
                use(c, e)
                try: ts.append(f"{d.seconds(Heads(), 132*f)*1e6:.1f}")
                except Exception as ex: ts.append("x" + repr(ex)[:30]); break
            print("", c, "/".join(ts), end="", flush=True)
        print()
    print("took", time.time() - t0)
elif mode == "hcheck":
    import random
    torch.manual_seed(5)
    bad = 0
    for n, (heads, counts, starts, window, cap) in enumerate([
        (Heads(), [128], [0], 0, 0.0), (Heads(), [300], [0], 0, 0.0), (Heads(), [77, 1, 500], [0, 40, 900], 0, 0.0),
        (Heads(block_size=64), [77, 1, 500], [0, 40, 900], 0, 0.0), (Heads(), [700, 33], [1000, 5], 200, 8.0),
        (Heads(7, 1, 64, 32), [200, 10], [64, 3], 0, 0.0), (Heads(dtype=torch.float16, block_size=128), [2048, 40], [2000, 0], 333, 0.0)]):
        cache = g.random_cache(heads, [s + c for s, c in zip(starts, counts)], 1)
        kv = g.poisoned(cache, heads, [max(0, s + 1 - window) if window else 0 for s in starts])
        q, bounds = heads.queries(sum(counts)), g.bounds_of(counts)
        out, exp = torch.full_like(q, torch.nan), torch.empty_like(q, dtype=torch.float64)
        where, rules = (bounds, g.integers(starts), cache.block_tables), (heads.scale, window, cap)
        g.reference.prefill_attention(q.double(), kv.double(), *where, exp, *rules)
        pa.prefill_attention(q, kv, *where, out, *rules)
        torch.cuda.synchronize()
        e = (out - exp).norm() / exp.norm()
        rows = ((out - exp).flatten(1).norm(dim=1) / exp.flatten(1).norm(dim=1))
        print("hopper", n, counts, starts, window, f"err {float(e):.2e}", "" if e < 1e-2 else f"BAD rows {rows.isnan().nonzero()[:8].flatten().tolist()} {(rows > 0.02).nonzero()[:8].flatten().tolist()}", flush=True)
elif mode in ("htime", "hcompile"):
    ha.CONSUMER_REGISTERS, ha.PRODUCER_REGISTERS = gl.constexpr(int(sys.argv[2])), gl.constexpr(int(sys.argv[3]))
    for stages in map(int, sys.argv[4].split(",")):
        ha.NUM_STAGES = stages
        if mode == "hcompile":
            Prefill(int(sys.argv[5]), 512).seconds(Heads())
        else:
            print(stages, sys.argv[2:4], "  ".join(f"{p} {(t := p.seconds(Heads()))*1e6:.0f}us {p.floor*793/t:.0f}TF" for p in (Prefill(1, 8192), Prefill(1, 2048), Prefill(16, 1024), Prefill(1, 2048, 6144), Prefill(2, 8192), Prefill(1, 128, 8064))), flush=True)
