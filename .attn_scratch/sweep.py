import sys, time, json, os, traceback
import torch
from crossdock.benchmarks import gpu_kernels as g
from crossdock.benchmarks.gpu_kernels import Decode, Prefill, Heads
from crossdock.kernels import paged_attention as pa

DEC = [(64,4,3),(64,4,4),(64,4,2),(128,4,2),(128,4,3),(128,8,3),(64,8,3),(64,2,3),(64,2,4),(32,2,4),(32,1,4),(32,4,5)]
PRE = [(128,128,8,3),(128,128,8,2),(128,64,8,3),(128,64,8,4),(128,64,4,2),(128,64,4,3),(64,64,4,3),(64,64,4,2),(64,128,4,2),(256,64,8,3)]
PRE256 = [(64,32,8,2),(128,64,8,2),(128,32,8,3),(64,64,4,2)]
PRE64 = [(128,128,8,3),(128,64,4,3),(128,128,8,4)]
H256 = Heads(16, 8, 256)
H64 = Heads(32, 8, 64)
JOBS = [("d", c, Heads()) for c in DEC] + [("p", c, Heads()) for c in PRE] + [("p", c, H256) for c in PRE256] + [("p", c, H64) for c in PRE64]

def use(kind, c):
    if kind == "d":
        pa.decode_tile = lambda *a: c
    else:
        pa.prefill_tile = lambda *a: c

def small(kind, c, heads):
    use(kind, c)
    if kind == "d":
        cache = g.random_cache(heads, (1024,), 2)
        q = heads.queries(1); out = torch.empty(q.shape, dtype=q.dtype, device="cuda")
        ws = g.decode_workspace(1, heads.num_heads, heads.num_kv_heads, heads.head_dim, g.DEVICE)
        g.plan_decode(cache.lengths, ws)
        pa.decode_attention(q, cache.layers[0], cache.block_tables, cache.lengths, out, ws, heads.scale)
    else:
        cache = g.random_cache(heads, (512,), 2)
        q = heads.queries(512); out = torch.empty(q.shape, dtype=q.dtype, device="cuda")
        pa.prefill_attention(q, cache.layers[0], g.bounds_of([512]), g.integers([0]), cache.block_tables, out, heads.scale)
    torch.cuda.synchronize()

if sys.argv[1] == "compile":
    k, n = int(sys.argv[2]), int(sys.argv[3])
    for job in JOBS[k::n]:
        try:
            small(*job)
        except Exception as e:
            print("compile failed", job, repr(e)[:200], flush=True)
else:
    full = {}
    t0 = time.time()
    for d in (Decode((1024,)), Decode((1024,)*32), Decode((1024,)*128), Decode((1024,)*256), Decode((8192,)*32), Decode((32768,)), Decode((32768, *[1024]*31))):
        res = []
        for c in DEC:
            use("d", c)
            for f in (1, 2, 3, 4):
                if f in (1, 3) and max(d.lengths) == 1024 and len(d.lengths) > 100: continue
                try:
                    res.append((d.seconds(Heads(), 132 * f) * 1e6, c, f))
                except Exception as e:
                    print("failed", d, c, repr(e)[:100]); break
        res.sort()
        full[str(d)] = res
        print(f"{d} floor {d.floor*1e6:.1f}: " + "  ".join(f"{c}x{f}={t:.1f}" for t, c, f in res[:7]) + " ... " + "  ".join(f"{c}x{f}={t:.1f}" for t, c, f in res if c == (64,4,3)), flush=True)
    print("decode sweep", time.time() - t0)
    def flops(p, h): return 4*h.num_heads*h.head_dim*p.num_seqs*p.num_queries*(p.start+(p.num_queries+1)/2)
    for heads, confs, ps in ((Heads(), PRE, (Prefill(1, 8192), Prefill(1, 2048))), (H256, PRE256, (Prefill(1, 4096),)), (H64, PRE64, (Prefill(1, 4096),))):
        for p in ps:
            res = []
            for c in confs:
                use("p", c)
                try:
                    res.append((p.seconds(heads) * 1e6, c))
                except Exception as e:
                    print("failed", p, c, repr(e)[:100])
            res.sort()
            full[f"{p} {heads.head_dim}"] = res
            print(f"{p} d{heads.head_dim}: " + "  ".join(f"{c}={t:.0f}us/{flops(p,heads)/t/1e6:.0f}TF" for t, c in res), flush=True)
    print("sweep", time.time() - t0)
    json.dump(full, open(os.environ["OUT"] + "/sweep.json", "w"))
