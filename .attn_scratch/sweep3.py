import sys, time
import torch
from crossdock.benchmarks import gpu_kernels as g
from crossdock.benchmarks.gpu_kernels import Decode, Prefill, Heads
from crossdock.kernels import paged_attention as pa, hopper_attention as ha
mode = sys.argv[1]
P = (Prefill(1, 8192), Prefill(2, 8192), Prefill(1, 2048), Prefill(16, 1024), Prefill(1, 2048, 6144), Prefill(1, 128, 8064))
if mode == "hcompile":
    ha.NUM_STAGES = int(sys.argv[2])
    Prefill(int(sys.argv[3]), 512).seconds(Heads(head_dim=int(sys.argv[4])))
elif mode == "htime":
    for stages in (2, 3):
        ha.NUM_STAGES = stages
        print(stages, "  ".join(f"{p} {(t := p.seconds(Heads()))*1e6:.0f}us {p.floor*793/t:.0f}TF" for p in P), flush=True)
    for stages in (2, 3):
        ha.NUM_STAGES = stages
        print("d64", stages, "  ".join(f"{p} {(t := p.seconds(Heads(head_dim=64)))*1e6:.0f}us {p.floor*793/2/t:.0f}TF" for p in P[:1]), flush=True)
elif mode == "dcompile":
    pa.decode_tile = lambda *a: eval(sys.argv[2])
    Decode((1024,), num_queries=int(sys.argv[3])).seconds(Heads())
elif mode == "dtime":
    for d in (Decode((1024,)), Decode((1024,)*8), Decode((1024,)*32), Decode((1024,)*128), Decode((8192,)*32), Decode((32768,)), Decode((32768, *[1024]*31))):
        print(d, end=": ")
        for c in ((64,4,4), (64,4,3), (64,2,4)):
            pa.decode_tile = lambda *a: c
            print(c, "/".join(f"{d.seconds(Heads(), 132*f)*1e6:.1f}" for f in (1, 2, 3)), end="  ")
        print(flush=True)
    d = Decode((8192,), num_queries=32)
    for c in ((64,8,4), (64,8,3), (64,4,3), (128,8,2)):
        pa.decode_tile = lambda *a: c
        print(d, c, "/".join(f"{d.seconds(Heads(), 132*f)*1e6:.1f}" for f in (1, 2)))
