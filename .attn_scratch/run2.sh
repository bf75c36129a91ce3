export PYTHONPATH=$PWD/.typing PYTHONUNBUFFERED=1
t0=$(date +%s)
for k in $(seq 0 7); do timeout 60 python3 .attn_scratch/sweep2.py compile $k & done
for n in 1 2 16; do for s in 2 3; do timeout 60 python3 .attn_scratch/sweep2.py hcompile 224 56 $s $n 2>&1 | tail -4 & done; done
for n in 1 2 16; do timeout 60 python3 .attn_scratch/sweep2.py hcompile 216 72 2 $n 2>&1 | tail -4 & done
wait
echo compiled $(( $(date +%s) - t0 ))
timeout 45 python3 .attn_scratch/sweep2.py hcheck 2>&1 | tail -20
echo hcheck $(( $(date +%s) - t0 ))
timeout 40 python3 .attn_scratch/sweep2.py htime 224 56 2,3 2>&1 | tail -6
timeout 40 python3 .attn_scratch/sweep2.py htime 216 72 2 2>&1 | tail -4
echo htimed $(( $(date +%s) - t0 ))
timeout 70 python3 .attn_scratch/sweep2.py time 2>&1 | tee $OUT/sweep.log
echo swept $(( $(date +%s) - t0 ))
