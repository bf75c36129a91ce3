"""The whole engine of a GPU against that of the CPU, which is tested against Transformers: the same tokens in float32.

Without a GPU the kernels run in Triton's interpreter, so models and requests are as small as they can be.
"""

from array import array
from collections.abc import Callable, Collection, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import replace
from math import nan

import pytest
import torch
from msgspec.structs import replace as with_params
from torch import Tensor

from crossdock.benchmarks.offline_engine import Answer, OfflineEngine
from crossdock.core.config import EngineConfig
from crossdock.core.request import Pooling, Request, RequestId, SamplingParams, pack_ids
from crossdock.core.sequence import Chunk, Sequence, take_chunk
from crossdock.model.engine_plan import BuiltEngine, EnginePlan
from crossdock.model.families import decoder_spec
from crossdock.model.loading import RandomWeights

from .gpu import cpu_executor, engine_of, gpu_executor

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of padded rows whose numbers mean nothing
    pytest.mark.timeout(300),
]

SIZES: Mapping[str, object] = {
    "vocab_size": 89,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
}
FAMILIES: Mapping[str, Mapping[str, object]] = {
    "LlamaForCausalLM": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "MistralForCausalLM": {"sliding_window": 9},
    "Qwen2ForCausalLM": {},
    "Qwen3ForCausalLM": {},
}
CONFIG = EngineConfig(num_blocks=40, max_num_seqs=4, chunk_tokens=48, num_layer_groups=2)
GREEDY = SamplingParams(temperature=0, max_tokens=4, seed=0)
DRAWN = SamplingParams(temperature=1.5, max_tokens=4, seed=77)


class Kept:
    """The same weights at every reading."""

    def __init__(self, drawn: RandomWeights) -> None:
        self._tensors = {name: drawn.get(name) for name in drawn.names()}

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def get(self, name: str) -> Tensor:
        return self._tensors[name]


def plan_of(family: str = "Qwen3ForCausalLM", config: EngineConfig = CONFIG) -> EnginePlan:
    spec = decoder_spec({"architectures": [family], **SIZES, **FAMILIES[family]})
    return EnginePlan(spec, Kept(RandomWeights(spec, 5)), torch.float32, config)


@contextmanager
def gpu_engine(plan: EnginePlan) -> Iterator[OfflineEngine]:
    engine = engine_of(plan, gpu_executor)
    yield engine
    engine.close()


def prompt(num_tokens: int, seed: int = 0) -> list[int]:
    return torch.randint(0, 88, (num_tokens,), generator=torch.Generator().manual_seed(seed)).tolist()


def on_cpu(plan: EnginePlan, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[Answer]:
    """Each alone."""
    engine = engine_of(plan, cpu_executor)
    answers = [engine.generate([ids], wanted)[0] for ids, wanted in zip(prompts, params, strict=True)]
    engine.close()
    return answers


def together(engine: OfflineEngine, prompts: Seq[Seq[int]], params: Seq[SamplingParams]) -> list[Answer]:
    answers = [engine.add(ids, wanted)[1] for ids, wanted in zip(prompts, params, strict=True)]
    engine.run()
    return answers


def ids_of(answers: Seq[Answer]) -> list[list[int]]:
    return [answer.token_ids for answer in answers]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_gives_the_greedy_tokens_of_the_cpu(family: str) -> None:
    """Prompts short and long that fit a graph, that need two chunks, that wait for others, one of a single token."""
    plan, prompts = plan_of(family), [prompt(n, n) for n in (7, 52, 1, 17)]
    with gpu_engine(plan) as engine:
        assert ids_of(engine.generate(prompts, GREEDY)) == ids_of(on_cpu(plan, prompts, [GREEDY] * 4))


def test_requests_that_draw_get_the_tokens_of_the_cpu_beside_greedy_ones() -> None:
    plan, prompts = plan_of(), [prompt(n, n) for n in (5, 21, 40, 9, 12, 30)]
    params = [
        GREEDY,
        DRAWN,
        with_params(DRAWN, top_k=7, seed=(1 << 64) - 3),
        with_params(DRAWN, top_p=0.7, min_p=0.02, repetition_penalty=1.4, frequency_penalty=0.5),
        with_params(GREEDY, presence_penalty=2.0, logit_bias={3: 6.0, 4: -90.0}),
        with_params(GREEDY, min_tokens=4, stop_token_ids=tuple(range(0, 89, 2)), max_tokens=7),
    ]
    with gpu_engine(plan) as engine:
        assert ids_of(together(engine, prompts, params)) == ids_of(on_cpu(plan, prompts, params))


def test_log_probabilities_are_those_of_the_cpu() -> None:
    plan, prompts = plan_of(), [prompt(60, 1), prompt(20, 2), prompt(1, 3)]
    params = [with_params(GREEDY, logprobs=3, prompt_logprobs=2), GREEDY, with_params(DRAWN, prompt_logprobs=0)]
    with gpu_engine(plan) as engine:
        ours, theirs = together(engine, prompts, params), on_cpu(plan, prompts, params)
    for one, other in zip(ours, theirs, strict=True):
        assert one.token_ids == other.token_ids
        top_ids = [[found and found.top_ids for found in answer.logprobs] for answer in (one, other)]
        prompt_ids = [[found.top_ids for found in answer.prompt_logprobs] for answer in (one, other)]
        assert (top_ids[0], prompt_ids[0]) == (top_ids[1], prompt_ids[1])
        numbers = [[found.token_logprob for found in answer.prompt_logprobs] for answer in (one, other)]
        assert numbers[0] == pytest.approx(numbers[1], abs=1e-4)
    assert [len(answer.prompt_logprobs) for answer in ours] == [59, 0, 0]


def test_preempted_requests_come_back_with_the_same_tokens() -> None:
    """Three of three blocks each, in a pool of six."""
    plan, prompts = plan_of(config=replace(CONFIG, num_blocks=6)), [prompt(15, n) for n in range(3)]
    penalised = with_params(DRAWN, presence_penalty=1.0)
    params = [with_params(wanted, max_tokens=19) for wanted in (GREEDY, penalised, GREEDY)]
    with gpu_engine(plan) as engine:
        assert ids_of(together(engine, prompts, params)) == ids_of(on_cpu(plan, prompts, params))
        assert engine.num_preemptions > 0


def test_a_cached_prefix_is_not_computed_again() -> None:
    plan, prompts = plan_of(), [prompt(34), [*prompt(34)[:32], 5, 6]]
    with gpu_engine(plan) as engine:
        answers = [engine.generate([ids], GREEDY)[0] for ids in prompts]
    assert [answer.num_cached for answer in answers] == [0, 32]
    assert ids_of(answers) == ids_of(on_cpu(plan, prompts, [GREEDY] * 2))


def test_a_request_that_is_aborted_leaves_the_others_alone() -> None:
    plan, prompts = plan_of(), [prompt(20, 1), prompt(25, 2), prompt(6, 3)]
    with gpu_engine(plan) as engine:
        added = [engine.add(ids, GREEDY) for ids in prompts]
        step = engine.step(engine.step(engine.step(None)))
        engine.abort(added[1][0])
        engine.run(step)
        alone = on_cpu(plan, prompts, [GREEDY] * 3)
        assert [answer.token_ids for _, answer in added[::2]] == ids_of(alone[::2])


def test_a_request_without_numbers_ends_and_those_beside_and_after_it_get_their_tokens() -> None:
    """Its KV is no numbers either, and lies where the next ones write theirs."""
    plan, poison = plan_of(config=replace(CONFIG, num_blocks=8)), 88
    plan.weights.get("model.embed_tokens.weight")[poison] = nan
    barred = SamplingParams(temperature=0, max_tokens=4, seed=0, logit_bias={poison: -100.0})
    sound = [prompt(n, n) for n in (9, 20)]
    with gpu_engine(plan) as engine:
        answers = together(engine, [[*prompt(30), poison], *sound], [GREEDY, barred, barred])
        answers += engine.generate([[*prompt(20, 3), poison, 5]], DRAWN)
        answers += engine.generate(sound, barred)
    expected = ids_of(on_cpu(plan, sound, [barred] * 2))
    assert ids_of(answers) == [[], *expected, [], *expected]
    assert [answer.failure for answer in answers[0::3]] == ["the model's output is not a number"] * 2


def test_layer_groups_are_announced_while_a_step_runs_and_the_loop_is_woken() -> None:
    """That of a prompt alone is a graph a group."""
    woken: list[int] = []
    plan = replace(plan_of(), wake=lambda: woken.append(1))
    with gpu_engine(plan) as engine:
        engine.add(prompt(40), GREEDY)
        step = engine.step(None)
        assert step is not None
        step.launched.results()
        assert (step.launched.num_groups_done, step.launched.is_done) == (2, True)
        engine.run(step)
    assert len(woken) == 2 + 4  # two groups of the prompt's only chunk, and the end of each step


@pytest.mark.parametrize("pooling", Pooling)
def test_shares_of_vectors_are_those_of_the_cpu(pooling: Pooling) -> None:
    """In a step with a prompt that is not pooled, a pooled one of a single token, and one that is not done yet."""
    plan = plan_of()

    def shares(make: Callable[[EnginePlan, int], BuiltEngine]) -> list[list[float]]:
        executor = make(plan, 40).executor
        chunks = [pooled_chunk(9, 9, None, 0), pooled_chunk(1, 1, pooling, 1), pooled_chunk(20, 16, pooling, 2)]
        launched = executor.launch([*chunks, pooled_chunk(5, 5, pooling, 4)], None)
        found = [array("d", result.pooled).tolist() for result in launched.results()]
        executor.close()
        return found

    on_gpu, expected = shares(gpu_executor), shares(cpu_executor)
    assert [len(share) for share in on_gpu] == [0, 32, 32 if pooling is Pooling.MEAN else 0, 32]
    for share, wanted in zip(on_gpu, expected, strict=True):
        assert share == pytest.approx(wanted, abs=1e-4)


def pooled_chunk(num_prompt: int, num_tokens: int, pooling: Pooling | None, first_block: int) -> Chunk:
    params = SamplingParams(max_tokens=0, seed=0)
    packed = pack_ids(prompt(num_prompt, num_prompt))
    request = Request(request_id=RequestId(f"{first_block}"), prompt=packed, params=params, pooling=pooling)
    sequence = Sequence.of(request)
    sequence.blocks = [first_block, first_block + 1]
    return take_chunk(sequence, num_tokens)
