"""The demo model gives the greedy tokens of Transformers, which reads the same GGUF file.

A few prompts in two modes each time; with ``--full`` 64 prompts of 1 to 900 tokens in every mode (about 15 minutes).
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random

import pytest
import torch
from transformers import AutoModelForCausalLM

from crossdock import LLM, EngineConfig, SamplingParams
from crossdock.deploy.model_source import resolve
from crossdock.router.text import TextModel, load_text

from .conftest import Serve
from .reference import Greedy, differences, greedy
from .server import Server

LICENSE = Path(__file__).parents[2] / "LICENSE"
LONGEST = 900
NUM_TOKENS = 16
NUM_TOKENS_TO_PREEMPT = 56  # three or four blocks more than the prompt: more than admission leaves free

MODES = {
    "1P1D over shm": ("--transports", "shm"),
    "mixed": ("--mixed", "1"),
    "1P1D over tcp": ("--transports", "tcp"),
    "1P1D over ucx": ("--transports", "ucx"),
    "2P2D": ("--prefill", "2", "--decode", "2"),
    "1P1D without prefix reuse": ("--no-prefix-cache",),
    "1P1D in chunks of 64": ("--chunk-tokens", "64"),
    "1P1D in chunks of 2048": ("--chunk-tokens", "2048"),
    "1P1D with preemption": ("--num-blocks", "60", "--max-model-len", "960"),
    "mixed with preemption": ("--mixed", "1", "--num-blocks", "80", "--max-model-len", "960"),
}
ALWAYS = ("1P1D over shm", "mixed")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "mode" in metafunc.fixturenames:
        is_full = metafunc.config.getoption("--full")
        metafunc.parametrize("mode", MODES if is_full else ALWAYS)
        metafunc.parametrize("num_at_once", [32, 1] if is_full else [32])


@pytest.fixture(scope="module")
def text() -> TextModel:
    return load_text(resolve("demo").path)


@pytest.fixture(scope="module")
def prompts(text: TextModel, is_full: bool) -> list[list[int]]:
    """Passages of the license: real text, whose choices are rarely near ties."""
    ids, random = text.encode(LICENSE.read_text()).ids, Random(1)
    lengths = [1, LONGEST, *(random.randint(1, LONGEST) for _ in range(62))][: 64 if is_full else 3]
    starts = [random.randrange(len(ids) - length) for length in lengths]
    return [ids[start : start + length] for start, length in zip(starts, lengths, strict=True)]


@pytest.fixture(scope="module")
def expected(prompts: list[list[int]]) -> list[Greedy]:
    path = resolve("demo").path
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return [greedy(model, prompt, NUM_TOKENS_TO_PREEMPT) for prompt in prompts]


def tokens_over_http(
    server: Server, prompts: Sequence[list[int]], num_tokens: int, num_at_once: int
) -> list[list[str]]:
    """The texts of all answers' tokens."""

    def complete(prompt: list[int]) -> list[str]:
        body = {"prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "logprobs": 0}
        response = server.client.post("/v1/completions", json=body, timeout=300)
        assert response.status_code == 200, response.text
        tokens: list[str] = response.json()["choices"][0]["logprobs"]["tokens"]
        return tokens

    with ThreadPoolExecutor(num_at_once) as clients:
        return list(clients.map(complete, prompts))


@pytest.mark.timeout(1800)
def test_every_mode_gives_the_tokens_of_transformers(
    mode: str,
    num_at_once: int,
    serve: Serve,
    prompts: list[list[int]],
    expected: list[Greedy],
    text: TextModel,
) -> None:
    server = serve("demo", *MODES[mode])
    must_preempt = "preemption" in mode and num_at_once > 1
    num_tokens = NUM_TOKENS_TO_PREEMPT if must_preempt else NUM_TOKENS
    answers = tokens_over_http(server, prompts, num_tokens, num_at_once)
    texts = [Greedy([text.token_text(int(i)) for i in right.tokens[:num_tokens]], right.gaps) for right in expected]
    assert differences(texts, answers) == []
    assert (server.metrics()["crossdock:worker_preemptions_total"] > 0) == must_preempt


@pytest.mark.timeout(1800)
def test_offline_batches_give_the_same_tokens(prompts: list[list[int]], expected: list[Greedy]) -> None:
    llm = LLM("demo", EngineConfig(num_threads=1))
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    outputs = llm.generate(prompts, params, show_progress=False)
    shortened = [Greedy(right.tokens[:NUM_TOKENS], right.gaps) for right in expected]
    assert differences(shortened, [output.outputs[0].token_ids for output in outputs]) == []
