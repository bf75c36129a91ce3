"""Forks of one prompt on a real model, on the CPU and with the kernels of a GPU: each is as if it were alone."""

import string
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from msgspec.structs import replace as with_params

from crossdock.benchmarks.offline_engine import Answer
from crossdock.core.grammar import Vocabulary
from crossdock.core.request import SamplingParams
from crossdock.model.engine_plan import BuiltEngine, EnginePlan
from crossdock.model.grammar import Grammars
from crossdock.router.grammar import choice_grammar

from .gpu import HAS_GPU, cpu_executor, engine_of, gpu_executor
from .test_gpu_engine import CONFIG, DRAWN, GREEDY, on_cpu, plan_of, prompt

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy's, of padded rows whose numbers mean nothing
    pytest.mark.timeout(300),
]

SEEDS = [77, 78, (1 << 63) - 1, 5]
PENALISED = with_params(DRAWN, repetition_penalty=1.4, frequency_penalty=0.5, logit_bias={3: 6.0}, logprobs=2)
SCORED = with_params(DRAWN, prompt_logprobs=0)
CASES = [(21, PENALISED), (1, PENALISED), (21, DRAWN), (32, DRAWN), (52, SCORED), (21, GREEDY)]
INTERPRETED = CASES if HAS_GPU else CASES[:1]
"""Triton's interpreter takes ten seconds for one of them."""

Make = Callable[[EnginePlan, int], BuiltEngine]


def alone(plan: EnginePlan, ids: Sequence[int], params: SamplingParams) -> list[Answer]:
    return on_cpu(plan, [ids] * len(SEEDS), [with_params(params, seed=seed) for seed in SEEDS])


def ids_and_top(answers: Sequence[Answer]) -> list[tuple[list[int], list[list[int] | None]]]:
    return [(answer.token_ids, [found.top_ids if found else None for found in answer.logprobs]) for answer in answers]


@pytest.mark.parametrize(
    ("make", "num_prompt", "params"),
    [*((cpu_executor, *case) for case in CASES), *((gpu_executor, *case) for case in INTERPRETED)],
)
def test_each_choice_gets_the_tokens_that_it_gets_alone_with_its_seed(
    make: Make, num_prompt: int, params: SamplingParams
) -> None:
    plan, ids = plan_of(config=replace(CONFIG, max_num_seqs=8)), prompt(num_prompt, num_prompt)
    engine = engine_of(plan, make)
    neighbour = engine.add(prompt(9, 3), GREEDY)[1]
    forked = list(engine.add_choices(ids, with_params(params, seed=SEEDS[0]), SEEDS[1:]).values())
    engine.run()
    engine.close()
    assert ids_and_top(forked) == ids_and_top(alone(plan, ids, params))
    assert neighbour.token_ids == on_cpu(plan, [prompt(9, 3)], [GREEDY])[0].token_ids
    assert len({tuple(answer.token_ids) for answer in forked}) == (1 if params is GREEDY else len(SEEDS))


@pytest.mark.parametrize("make", [cpu_executor, gpu_executor] if HAS_GPU else [cpu_executor])
def test_forks_that_outgrow_the_pool_give_way_and_come_back_with_the_same_tokens(make: Make) -> None:
    """Four choices over a prompt of two blocks, one of them partial, in a pool of six: alone each needs three."""
    plan = plan_of(config=replace(CONFIG, num_blocks=6, max_num_seqs=8))
    engine, ids, params = engine_of(plan, make), prompt(20), with_params(DRAWN, max_tokens=20)
    forked = list(engine.add_choices(ids, with_params(params, seed=SEEDS[0]), SEEDS[1:]).values())
    engine.run()
    engine.close()
    assert engine.num_preemptions > 0
    assert ids_and_top(forked) == ids_and_top(alone(plan, ids, params))


def test_choices_under_a_grammar_follow_it_each_and_end_where_it_is_complete() -> None:
    letters = string.ascii_lowercase
    pieces = [letter.encode() for letter in letters]
    vocabulary = Vocabulary(
        [*pieces, b""], frozenset(), frozenset({len(letters)}), lambda text: [ord(c) - 97 for c in text]
    )
    plan = replace(plan_of(config=replace(CONFIG, max_num_seqs=8)), grammars=Grammars(lambda: vocabulary, 89))
    grammar = choice_grammar(["a", "b", "cd", "ce", "cfg"])
    params = SamplingParams(temperature=1.5, max_tokens=4, stop_token_ids=(len(letters),), grammar=grammar)
    engine, seeds, ids = engine_of(plan, cpu_executor), range(8), prompt(21)
    forked = list(engine.add_choices(ids, with_params(params, seed=0), seeds[1:]).values())
    engine.run()
    engine.close()
    assert all(answer.is_finished for answer in forked)
    said = ["".join(letters[token_id] for token_id in answer.token_ids) for answer in forked]
    assert {len(text) for text in said} == {1, 2} and set(said) <= {"a", "b", "cd", "ce", "cfg"}
    each = on_cpu(plan, [ids] * 8, [with_params(params, seed=seed) for seed in seeds])
    assert [answer.token_ids for answer in forked] == [answer.token_ids for answer in each]
