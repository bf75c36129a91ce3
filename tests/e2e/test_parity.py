"""The same greedy tokens as Transformers, in every mode (float32, token for token)."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from crossdock import LLM, EngineConfig, SamplingParams
from crossdock.router.text import TextModel, load_text

from .conftest import Serve
from .reference import Greedy, differences, greedy, random_prompts
from .server import Server

NUM_PROMPTS = 64
LONGEST = 900
NUM_TOKENS = 56  # each takes three or four blocks more than its prompt: more than admission leaves free
PROMPTS = random_prompts(NUM_PROMPTS, LONGEST, 319, seed=1)


@pytest.fixture(scope="module")
def expected(small_model: Path) -> list[Greedy]:
    model = AutoModelForCausalLM.from_pretrained(small_model)
    model.generation_config.eos_token_id = None
    return [greedy(model, prompt, NUM_TOKENS) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def text(small_model: Path) -> TextModel:
    return load_text(small_model)


def answers_over_http(server: Server, text: TextModel, num_at_once: int) -> list[list[int]]:
    """Ids of all answers, read from the texts of their logprob entries, which differ from token to token."""
    id_of = {text.token_text(token_id): token_id for token_id in range(320)}

    def complete(prompt: list[int]) -> list[int]:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        response = server.client.post("/v1/completions", json=body)
        assert response.status_code == 200, response.text
        return [id_of[token] for token in response.json()["choices"][0]["logprobs"]["tokens"]]

    with ThreadPoolExecutor(num_at_once) as clients:
        return list(clients.map(complete, PROMPTS))


MODES = {
    "mixed": ("--mixed", "1"),
    "1P1D over shm": ("--transports", "shm"),
    "1P1D over tcp": ("--transports", "tcp"),
    "1P1D over ucx": ("--transports", "ucx"),
    "2P2D": ("--prefill", "2", "--decode", "2"),
    "1P1D without prefix reuse": ("--no-prefix-cache",),
    "1P1D in small chunks": ("--chunk-tokens", "64"),
    "1P1D in large chunks": ("--chunk-tokens", "2048"),
    "1P1D with preemption": ("--num-blocks", "62", "--max-model-len", "1000"),
    "mixed with preemption": ("--mixed", "1", "--num-blocks", "80", "--max-model-len", "1000"),
}


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_tokens_of_transformers(
    mode: str, small_model: Path, serve: Serve, expected: list[Greedy], text: TextModel
) -> None:
    server = serve(small_model, *MODES[mode])
    assert differences(expected, answers_over_http(server, text, num_at_once=32)) == []
    preemptions = server.metrics()["crossdock:worker_preemptions_total"]
    assert (preemptions > 0) == ("preemption" in mode)


def test_requests_one_at_a_time_give_the_same_tokens(
    small_model: Path, serve: Serve, expected: list[Greedy], text: TextModel
) -> None:
    server = serve(small_model)
    assert differences(expected, answers_over_http(server, text, num_at_once=1)) == []


ENGINES = {
    "default": EngineConfig(num_threads=1),
    "small chunks, no reuse": EngineConfig(num_threads=1, prefix_cache=False, chunk_tokens=64),
    "preemption": EngineConfig(num_threads=1, num_blocks=80, max_model_len=1000),
}


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_offline_batches_give_the_same_tokens(small_model: Path, expected: list[Greedy], engine: EngineConfig) -> None:
    llm = LLM(str(small_model), engine)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(PROMPTS, params, show_progress=False)
    assert differences(expected, [output.outputs[0].token_ids for output in outputs]) == []
