export PYTHONPATH=$PWD/.typing PYTHONUNBUFFERED=1
t0=$(date +%s)
for c in 64,4,4 64,4,3 64,2,4; do timeout 60 python3 .attn_scratch/sweep3.py dcompile $c 1 2>&1 | tail -3 & done
for c in 64,8,4 64,8,3 64,4,3 128,8,2; do timeout 60 python3 .attn_scratch/sweep3.py dcompile $c 32 2>&1 | tail -3 & done
for n in 1 2 16; do for s in 2 3; do timeout 60 python3 .attn_scratch/sweep3.py hcompile $s $n 128 2>&1 | tail -4 & done; done
for s in 2 3; do timeout 60 python3 .attn_scratch/sweep3.py hcompile $s 1 64 2>&1 | tail -4 & done
wait
echo compiled $(( $(date +%s) - t0 ))
timeout 40 python3 .attn_scratch/sweep3.py htime 2>&1 | tail -8
timeout 40 python3 .attn_scratch/sweep3.py dtime 2>&1 | tail -16
echo timed $(( $(date +%s) - t0 ))
timeout 90 python3 benchmarks/gpu_kernels.py 2>&1 | tail -50
echo benched $(( $(date +%s) - t0 ))
timeout 70 python3 -m pytest -c /dev/null --rootdir=. --import-mode=importlib -p no:cacheprovider -q -n 14 tests/kernels/test_paged_attention.py 2>&1 | tail -8
echo tested $(( $(date +%s) - t0 ))
