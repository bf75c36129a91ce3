"""Is what the GPU computes right? Small random models of every family against the CPU's path, then mixed work.

All in float32, where the GPU's tokens must be the CPU's, and those of many requests at once those of each alone. The
latter holds up to near ties: kernels for many rows add in another order than those for one, so that logits differ in
their last bits. Where a request's tokens part, it is looked at whether so little decides between the two.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from crossdock.benchmarks.offline_engine import Answer, OfflineEngine
from crossdock.core.block_hash import BlockHasher, model_root
from crossdock.core.block_pool import BlockPool
from crossdock.core.block_tables import BlockTables
from crossdock.core.config import CHUNK_TOKENS, EngineConfig
from crossdock.core.prefix_cache import PrefixCache
from crossdock.core.request import MAX_LOGPROBS, SamplingParams
from crossdock.kernels import reference
from crossdock.kernels.reference import SamplingTensors
from crossdock.model.cpu_executor import CpuExecutor
from crossdock.model.cuda_startup import build_executor, build_network
from crossdock.model.device_stream import CudaStream
from crossdock.model.engine import Step
from crossdock.model.engine_plan import BuiltEngine, EnginePlan
from crossdock.model.families import decoder_spec
from crossdock.model.grammar import Grammars
from crossdock.model.kv_tensors import KvTensors
from crossdock.model.loading import RandomWeights, build_transformer
from crossdock.model.startup import LoadedModel, no_vocabulary

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
PROMPT_SIZES = (1, 2, 15, 16, 17, 40, 100, 127, 300, 64, 33)
GREEDY = SamplingParams(temperature=0, max_tokens=24, seed=0)
NUM_MIXED = 1000
STEPS_AN_ABORT = 3
TIE = 2e-5
"""Between logits of about 1: many times what float32 makes of them, and so little that hardly a token in 10,000 is one.
"""
NUM_TRIED = 256
TOP_K = MAX_LOGPROBS // 2
"""Fewer than the logits that an engine tells of: the last that is kept may tie with the next."""

Build = Callable[[EnginePlan, int], BuiltEngine]


@dataclass(frozen=True, slots=True)
class Check:
    """``num_equal`` of ``num_all`` tokens."""

    name: str
    num_equal: int
    num_all: int
    note: str = ""

    @property
    def is_passed(self) -> bool:
        return self.num_equal == self.num_all


def all_checks() -> Iterator[Check]:
    torch.set_float32_matmul_precision("highest")  # whatever the machine's environment says
    for name in FAMILIES:
        yield family(name)
    yield mixed_requests()


def family(name: str) -> Check:
    """Greedy tokens of prompts of all sizes, together, on the GPU and on the CPU."""
    config = EngineConfig(num_blocks=256, max_num_seqs=16, chunk_tokens=128)
    prompts = [random.Random(n).choices(range(VOCAB), k=n) for n in PROMPT_SIZES]
    found = []
    for build in (cpu_executor, gpu_executor):
        engine = engine_of(plan_of(name, config), build)
        found.append(engine.generate(prompts, GREEDY))
        engine.close()
    return compared(f"{name}, GPU and CPU", *found)


def mixed_requests() -> Check:
    """Shared prefixes, aborts, preemption, greedy and drawn tokens: many at once, then each of them alone."""
    engine = engine_of(plan_of("Qwen3ForCausalLM", EngineConfig(num_blocks=60, max_num_seqs=32)), gpu_executor)
    drawn = random.Random(3)
    prefixes = [drawn.choices(range(VOCAB), k=64) for _ in range(8)]
    prompts = [_prompt(drawn, prefixes) for _ in range(NUM_MIXED)]
    params = [_params(drawn) for _ in prompts]
    answers = _run_with_aborts(engine, prompts, params, drawn.sample(range(NUM_MIXED), NUM_MIXED // 10))
    kept = [number for number, answer in enumerate(answers) if answer.is_finished]
    alone = {i: engine.generate([prompts[i]], params[i])[0] for i in kept}
    parted = {i: num for i in kept if (num := _num_common(answers[i], alone[i])) is not None}
    ties = {
        i
        for i, num in parted.items()
        if is_near_tie(engine, prompts[i], params[i], answers[i].token_ids[: num + 1], alone[i].token_ids[num])
    }
    told = [
        f"{NUM_MIXED} requests, {engine.num_preemptions} preemptions, {NUM_MIXED - len(kept)} aborted",
        f"{len(parted)} parted, {len(ties)} of them at a near tie",
        *(f"{i} at token {num}, temperature {params[i].temperature}" for i, num in parted.items() if i not in ties),
        f"float32 products: {torch.get_float32_matmul_precision()}",
    ]
    engine.close()
    whole = [i for i in kept if i not in ties]
    found = compared("at once and alone", [answers[i] for i in whole], [alone[i] for i in whole])
    return replace(found, note="; ".join(told))


def _num_common(one: Answer, other: Answer) -> int | None:
    """How many tokens two answers begin with alike; ``None`` if they are the same."""
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=True))
    return next((number for number, (a, b) in pairs if a != b), None)


def is_near_tie(
    engine: OfflineEngine, prompt: list[int], params: SamplingParams, token_ids: list[int], other: int
) -> bool:
    """Whether logits that differ by `TIE` at most lead to the last of ``token_ids``, or else to ``other``."""
    *before, last = token_ids
    asked = msgspec.structs.replace(params, temperature=0, max_tokens=1, logprobs=MAX_LOGPROBS)
    [answer] = engine.generate([prompt + before], asked)
    [likeliest] = answer.logprobs
    assert likeliest is not None, "they were asked for"
    logits = torch.full((VOCAB,), -torch.inf)
    logits[likeliest.top_ids] = torch.tensor(likeliest.top_logprobs)
    return {last, other} <= drawn_nearby(logits, params, len(before))


def drawn_nearby(logits: Tensor, params: SamplingParams, output_index: int) -> set[int]:
    """All tokens that are drawn from ``logits [vocab]`` when each of them changes by `TIE` at most.

    Half of the change is rounding, which makes logits equal that nearly are: top-k keeps all that equal the last.
    """
    noise = torch.rand(NUM_TRIED, len(logits), generator=torch.Generator().manual_seed(0)) - 0.5
    changed = (logits.double() / TIE + noise).round().mul(TIE).float()
    neutral = SamplingTensors.neutral(NUM_TRIED, logits.device)
    rules = replace(
        neutral,
        temperature=torch.full_like(neutral.temperature, params.temperature),
        top_k=torch.full_like(neutral.top_k, params.top_k),
        seed=torch.full_like(neutral.seed, params.seed or 0),
        output_index=torch.full_like(neutral.output_index, output_index),
        any_top_k=True,
    )
    return set(reference.sample(changed, rules).tolist())


def _prompt(drawn: random.Random, prefixes: Sequence[list[int]]) -> list[int]:
    prefix = drawn.choice(prefixes)[: drawn.randrange(65)]
    return prefix + drawn.choices(range(VOCAB), k=drawn.randrange(1, 90))


def _params(drawn: random.Random) -> SamplingParams:
    max_tokens = drawn.randrange(1, 80)
    if drawn.random() < 0.5:
        return SamplingParams(temperature=0, max_tokens=max_tokens, seed=0)
    return SamplingParams(temperature=0.8, top_k=TOP_K, max_tokens=max_tokens, seed=drawn.randrange(1 << 40))


def _run_with_aborts(
    engine: OfflineEngine, prompts: Sequence[list[int]], params: Sequence[SamplingParams], doomed: list[int]
) -> list[Answer]:
    added = [engine.add(prompt, wanted) for prompt, wanted in zip(prompts, params, strict=True)]
    step: Step | None = None
    for number in doomed:
        for _ in range(STEPS_AN_ABORT):
            step = engine.step(step)
        engine.abort(added[number][0])
    engine.run(step)
    return [answer for _, answer in added]


def compared(name: str, one: Sequence[Answer], other: Sequence[Answer]) -> Check:
    pairs = [pair for a, b in zip(one, other, strict=True) for pair in zip(a.token_ids, b.token_ids, strict=True)]
    return Check(name, sum(a == b for a, b in pairs), len(pairs))


def plan_of(name: str, config: EngineConfig) -> EnginePlan:
    spec = decoder_spec({"architectures": [name], **SIZES, **FAMILIES[name]})
    return EnginePlan(spec, RandomWeights(spec, 7), torch.float32, config)


def cpu_executor(plan: EnginePlan, num_blocks: int) -> BuiltEngine:
    transformer = build_transformer(plan.spec, plan.weights, plan.dtype)
    kv = KvTensors(plan.layout, num_blocks)
    return BuiltEngine(CpuExecutor(transformer, kv, plan.layout, plan.config.num_layer_groups), kv)


def gpu_executor(plan: EnginePlan, num_blocks: int) -> BuiltEngine:
    stream = CudaStream(torch.device("cuda", 0))
    with torch.inference_mode(), stream.launching():
        kv = KvTensors(plan.layout, num_blocks, device=stream.device)
    return BuiltEngine(build_executor(plan, build_network(plan, stream), kv, stream), kv)


def engine_of(plan: EnginePlan, build: Build) -> OfflineEngine:
    """An engine over a pool of ``plan.config.num_blocks``."""
    num_blocks, block_size = plan.config.num_blocks or 0, plan.config.block_size
    pool = BlockPool(num_blocks)
    hasher = BlockHasher(b"key", model_root(b"key", "m", plan.layout), block_size)
    tables = BlockTables(pool, PrefixCache(pool, plan.config.prefix_cache), hasher, block_size)
    grammars = Grammars(no_vocabulary, plan.spec.vocab_size)
    built, longest = build(plan, num_blocks), plan.longest_request(num_blocks)
    chunk_tokens = plan.config.chunk_tokens or CHUNK_TOKENS["cuda"]
    model = LoadedModel(plan.spec, plan.layout, tables, built.executor, built.kv, longest, chunk_tokens, grammars)
    return OfflineEngine(model, plan.config)
