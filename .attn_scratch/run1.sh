export PYTHONPATH=$PWD/.typing PYTHONUNBUFFERED=1
t0=$(date +%s)
nvidia-smi --query-gpu=name,clocks.sm,utilization.gpu --format=csv,noheader
python3 - <<'P'
import importlib.util as u
print({m: bool(u.find_spec(m)) for m in ("flash_attn_interface","flash_attn","flash_attn_3","vllm","xformers")})
P
for k in $(seq 0 13); do timeout 100 python3 .attn_scratch/sweep.py compile $k 14 & done
timeout 100 python3 -c "
from crossdock.benchmarks import gpu_kernels as g
if __name__ == '__main__': pass
" ; wait
echo compiled $(( $(date +%s) - t0 ))
timeout 110 python3 .attn_scratch/sweep.py time 2>&1 | tee $OUT/sweep.log
echo swept $(( $(date +%s) - t0 ))
timeout 60 python3 benchmarks/gpu_kernels.py 2>&1 | tee $OUT/bench.log | tail -60
echo benched $(( $(date +%s) - t0 ))
