"""Is what the GPU computes right? Small random models of every family in float32, against the CPU's path, and mixed work."""

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import count

import torch

from crossdock.benchmarks.offline_engine import Answer, OfflineEngine
from crossdock.core.block_hash import BlockHasher, model_root
from crossdock.core.block_pool import BlockPool
from crossdock.core.block_tables import BlockTables
from crossdock.core.config import EngineConfig
from crossdock.core.prefix_cache import PrefixCache
from crossdock.core.request import SamplingParams
from crossdock.model.cpu_executor import CpuExecutor
from crossdock.model.cuda_startup import build_executor, build_network
from crossdock.model.device_stream import CudaStream
from crossdock.model.engine_plan import EnginePlan
from crossdock.model.executor import Executor
from crossdock.model.families import decoder_spec
from crossdock.model.kv_tensors import KvTensors
from crossdock.model.loading import RandomWeights, build_transformer
from crossdock.model.spec import DecoderSpec
from crossdock.model.startup import LoadedModel

VOCAB = 512
SIZES: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
}
FAMILIES: dict[str, dict[str, object]] = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True},
    "MistralForCausalLM": {"sliding_window": 50},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
}
GREEDY = SamplingParams(temperature=0, max_tokens=24, seed=0)


@dataclass(frozen=True, slots=True)
class Check:
    """``num_equal`` of ``num_all`` tokens; what differs is named in ``note``."""

    name: str
    num_equal: int
    num_all: int
    note: str = ""

    @property
    def is_passed(self) -> bool:
        return self.num_equal == self.num_all


def all_checks() -> Iterator[Check]:
    for name in FAMILIES:
        yield family(name)
    yield mixed_requests()


def family(name: str) -> Check:
    """Greedy tokens of prompts of all lengths, together, on the GPU and on the CPU."""
    spec = decoder_spec({"architectures": [name], **SIZES, **FAMILIES[name]})
    config = EngineConfig(num_blocks=256, max_num_seqs=16, chunk_tokens=128)
    prompts = [random.Random(n).choices(range(VOCAB), k=n) for n in (1, 2, 15, 16, 17, 40, 100, 127, 300, 64, 33)]
    found = []
    for build in (cpu_executor, gpu_executor):
        engine = engine_of(EnginePlan(spec, RandomWeights(spec, 7), torch.float32, config), build)
        found.append(engine.generate(prompts, GREEDY))
        engine.close()
    return compared(f"{name}, float32, GPU and CPU", *found)


def mixed_requests(num_requests: int = 1000) -> Check:
    """Requests with shared prefixes, aborts and preemption, many at once, and those that were not aborted one by one."""
    spec = decoder_spec({"architectures": ["Qwen3ForCausalLM"], **SIZES})
    config = EngineConfig(num_blocks=160, max_num_seqs=32, chunk_tokens=256)
    engine = engine_of(EnginePlan(spec, RandomWeights(spec, 7), torch.float32, config), gpu_executor)
    drawn = random.Random(3)
    prefixes = [drawn.choices(range(VOCAB), k=64) for _ in range(8)]
    prompts = [drawn.choice(prefixes)[: drawn.randrange(65)] + drawn.choices(range(VOCAB), k=drawn.randrange(1, 90)) for _ in range(num_requests)]
    params = [replace_params(drawn) for _ in prompts]
    added = [engine.add(prompt, wanted) for prompt, wanted in zip(prompts, params, strict=True)]
    doomed = set(drawn.sample(range(num_requests), num_requests // 10))
    step = None
    for number in count():
        step = engine.step(step)
        if number % 3 == 0 and doomed:
            engine.abort(added[doomed.pop()][0])
        if step is None:
            break
    engine.run()
    kept = [i for i, (_, answer) in enumerate(added) if answer.is_finished]
    together = [added[i][1] for i in kept[:200]]
    alone = [engine.generate([prompts[i]], params[i])[0] for i in kept[:200]]
    note = f"{engine.num_preemptions()} preemptions, {num_requests - len(kept)} aborted"
    engine.close()
    return replace(compared("mixed requests, at once and one by one", together, alone), note=note)


def replace_params(drawn: random.Random) -> SamplingParams:
    if drawn.random() < 0.5:
        return SamplingParams(temperature=0, max_tokens=drawn.randrange(1, 40), seed=0)
    return SamplingParams(temperature=0.8, top_k=20, max_tokens=drawn.randrange(1, 40), seed=drawn.randrange(1 << 40))


def compared(name: str, one: list[Answer], other: list[Answer]) -> Check:
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a.token_ids, b.token_ids, strict=True)]
    return Check(name, sum(a == b for a, b in pairs), len(pairs))


def cpu_executor(plan: EnginePlan, num_blocks: int) -> Executor:
    transformer = build_transformer(plan.spec, plan.weights, plan.dtype)
    return CpuExecutor(transformer, KvTensors(plan.layout, num_blocks), plan.layout, plan.config.num_layer_groups)


def gpu_executor(plan: EnginePlan, num_blocks: int) -> Executor:
    stream = CudaStream(torch.device("cuda", 0))
    return build_executor(plan, build_network(plan, stream), num_blocks, stream)


def engine_of(plan: EnginePlan, build: object) -> OfflineEngine:
    num_blocks = plan.config.num_blocks or 0
    pool = BlockPool(num_blocks)
    hasher = BlockHasher(b"key", model_root(b"key", "m", plan.layout), plan.config.block_size)
    tables = BlockTables(pool, PrefixCache(pool, True), hasher, plan.config.block_size)
    executor = build(plan, num_blocks)  # type: ignore[operator]
    model = LoadedModel(plan.spec, plan.layout, tables, executor, plan.longest_request(num_blocks))
    return OfflineEngine(model, plan.config)


