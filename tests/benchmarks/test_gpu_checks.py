"""Where two answers part, a near tie is told from a fault."""

import random

import msgspec
import pytest
import torch

from crossdock.benchmarks import gpu_checks
from crossdock.benchmarks.gpu_checks import TOP_K, VOCAB, cpu_executor, drawn_nearby, engine_of, is_near_tie, plan_of
from crossdock.core.config import EngineConfig
from crossdock.core.request import SamplingParams

PROMPT = random.Random(0).choices(range(VOCAB), k=40)
DRAWN = SamplingParams(temperature=0.8, top_k=TOP_K, max_tokens=6, seed=5)
GREEDY = SamplingParams(temperature=0, max_tokens=6, seed=0)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_only_what_such_a_change_of_the_logits_leads_to_is_a_near_tie(
    params: SamplingParams, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(plan_of("Qwen3ForCausalLM", EngineConfig(num_blocks=40, max_num_seqs=2)), cpu_executor)
    token_ids = engine.generate([PROMPT], params)[0].token_ids
    assert is_near_tie(engine, PROMPT, params, token_ids, token_ids[-1])
    asked = msgspec.structs.replace(params, max_tokens=1, logprobs=20)
    [likeliest] = engine.generate([PROMPT + token_ids[:-1]], asked)[0].logprobs
    assert likeliest is not None
    others = set(likeliest.top_ids) - {token_ids[-1]}
    assert not any(is_near_tie(engine, PROMPT, params, token_ids, token) for token in others)
    monkeypatch.setattr(gpu_checks, "TIE", 5.0)
    assert sum(is_near_tie(engine, PROMPT, params, token_ids, token) for token in others) > 3
    engine.close()


@pytest.mark.parametrize(("gap", "is_tie"), [(3e-6, True), (1e-3, False)])
def test_the_last_that_top_k_keeps_may_tie_with_the_next(gap: float, is_tie: bool) -> None:
    """Seen on an H200: with both kept, as equals, a draw that was to be the second token's is the first's."""
    logits = torch.full((VOCAB,), -torch.inf)
    logits[: TOP_K + 1] = 0.0
    logits[[0, 1]] = torch.tensor([-1.0 - gap, -1.0])  # the tenth is token 1, the eleventh token 0
    params = [SamplingParams(temperature=1, top_k=TOP_K, max_tokens=1, seed=seed) for seed in range(40)]
    found = [drawn_nearby(logits, each, 0) for each in params]
    assert any({1, 2} <= tokens for tokens in found) == is_tie
    assert any(len(tokens) > 1 for tokens in found) == is_tie
