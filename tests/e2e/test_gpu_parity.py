"""On GPUs, a prefill and a decode worker give the tokens of one worker that does both, over every transport.

Float32, greedy, a model whose choices have no near ties; checksums of what was sent and what landed are compared too.
The workers lie on two GPUs where there are two.
"""

from pathlib import Path

import numpy as np
import pytest
import torch

from crossdock.benchmarks.played_router import PlayedRouter, fleet, random_prompt
from crossdock.core.messages import Role

DEVICE = "cuda"
VOCAB_SIZE, NUM_TOKENS = 319, 40
DRAW = np.random.default_rng(1)
PROMPTS = [random_prompt(DRAW, int(length), VOCAB_SIZE) for length in DRAW.integers(1, 900, size=32)]
NEEDS_TWO = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL joins no processes on one GPU: needs two")
TRANSPORTS = ["cuda_ipc", "ucx", pytest.param("nccl", marks=NEEDS_TWO), "tcp"]

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU or two: run benchmarks/gpu_pair.py there"),
    pytest.mark.timeout(240),
]


def answers(router: PlayedRouter, prefill: Role, decode: Role) -> list[list[int]]:
    pair = router.worker(prefill), router.worker(decode)
    requests = [router.submit(prompt, NUM_TOKENS, *pair) for prompt in PROMPTS]
    router.finish(requests)
    return [request.token_ids for request in requests]


def flags(*more: str) -> list[str]:
    return [f"--device={DEVICE}", "--dtype=float32", "--max-num-seqs=32", "--kv-memory=64MiB", "--threads=1", *more]


@pytest.fixture(scope="module")
def expected(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    with fleet(small_model, [Role.MIXED], flags(), tmp_path_factory.mktemp("mixed")) as router:
        return answers(router, Role.MIXED, Role.MIXED)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_pair_gives_the_tokens_of_a_mixed_worker(
    transport: str, small_model: Path, expected: list[list[int]], tmp_path: Path
) -> None:
    offered = flags(f"--transports={transport}", "--transfer-checksums", "--chunk-tokens=256")
    with fleet(small_model, [Role.PREFILL, Role.DECODE], offered, tmp_path) as router:
        assert [link.transport for link in router.links] == [transport]
        assert answers(router, Role.PREFILL, Role.DECODE) == expected
    assert all(len(tokens) == NUM_TOKENS for tokens in expected)
