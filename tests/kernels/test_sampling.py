"""The device's sampler draws what the CPU's sampler draws, from any mixture of rows."""

import os
from math import inf, nan

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from crossdock.core.request import SamplingParams
from crossdock.kernels import reference
from crossdock.model import sampler

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from crossdock.kernels import sampling  # noqa: E402

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
VOCAB = sampling.CHUNK + 300
MIXTURE = (
    SamplingParams(temperature=0.0, seed=1),
    SamplingParams(temperature=1.0, seed=2),
    SamplingParams(temperature=0.7, top_k=50, seed=2**63 + 5),
    SamplingParams(temperature=1.3, top_p=0.9, seed=4),
    SamplingParams(temperature=0.8, top_p=0.5, top_k=20, seed=2**64 - 1),
    SamplingParams(temperature=1.0, min_p=0.02, top_k=1000, top_p=0.99, seed=6),
)


def random_logits(num_rows: int, vocab: int = VOCAB, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows + vocab)
    return torch.randn(num_rows, vocab, generator=generator).mul_(3).to(DEVICE, dtype)


def tensors(rows: tuple[SamplingParams, ...], indices: list[int]) -> reference.SamplingTensors:
    def column(values: list[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=DEVICE)

    seeds = [row.seed or 0 for row in rows]
    return reference.SamplingTensors(
        column([row.temperature for row in rows], torch.float32),
        column([row.top_k for row in rows], torch.int32),
        column([row.top_p for row in rows], torch.float64),
        column([row.min_p for row in rows], torch.float32),
        torch.tensor([seed - 2**64 if seed >= 2**63 else seed for seed in seeds], device=DEVICE),
        torch.tensor(indices, device=DEVICE),
        any(row.top_k for row in rows),
        any(row.top_p < 1 for row in rows),
    )


def drawn_by_seed(logits: Tensor, params: SamplingParams, num_seeds: int) -> set[int]:
    """The tokens that any of the first seeds draws from one row of logits."""
    rows = [replace(params, seed=seed) for seed in range(num_seeds)]
    return set(drawn(logits.expand(num_seeds, -1).contiguous(), *rows))


def drawn(logits: Tensor, *rows: SamplingParams, index: int = 0) -> list[int]:
    """By the device's sampler; by the CPU's and the twin the same."""
    params = tensors(rows, [index] * len(rows))
    on_cpu = [sampler.SamplingRow(row, [1] * (1 + index), 1, index) for row in rows]
    expected: list[int] = sampler.sample(logits.cpu().float(), on_cpu).token_ids.tolist()
    found: list[int] = sampling.sample(logits, params).tolist()
    assert reference.sample(logits, params).tolist() == expected
    assert found == expected
    return found


# --- the best --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sampling.CONSTANT_BITS)
def test_the_best_token_of_each_row(dtype: torch.dtype) -> None:
    logits = random_logits(3, dtype=dtype)
    logits[1, VOCAB - 1] = 60
    assert sampling.argmax(logits).tolist() == reference.argmax(logits).tolist()
    assert sampling.argmax(logits)[1] == VOCAB - 1


def test_of_equal_tokens_the_first_in_whatever_chunk() -> None:
    logits = torch.full((2, 2 * sampling.CHUNK), -1.0, device=DEVICE)
    logits[0, [70, sampling.CHUNK + 3]] = 5.0
    logits[1, [sampling.CHUNK + 3, sampling.CHUNK + 9]] = 5.0
    assert sampling.argmax(logits).tolist() == [70, sampling.CHUNK + 3]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy's, in Triton's interpreter: inf less inf
def test_rows_that_mean_nothing_yield_no_token_and_leave_the_others_alone() -> None:
    logits = random_logits(7)
    alone = logits[[0, 6]].contiguous()
    for row, (places, value) in enumerate(
        [([*range(VOCAB)], -inf), ([0], nan), ([VOCAB - 1], nan), ([*range(VOCAB)], nan), ([sampling.CHUNK + 5], inf)],
        1,
    ):
        logits[row, places] = value
    first, last = sampling.argmax(alone).tolist()
    assert sampling.argmax(logits).tolist() == reference.argmax(logits).tolist() == [first, *[-1] * 5, last]
    first, last = drawn(alone, MIXTURE[2], MIXTURE[2])
    params = tensors((MIXTURE[2],) * 7, [0] * 7)
    assert reference.sample(logits, params).tolist() == [first, *[-1] * 5, last]
    token_ids = sampling.sample(logits, params)
    assert token_ids.tolist() == [first, *[-1] * 5, last]
    found, expected = sampling.top_logprobs(logits, token_ids, 3), sampling.top_logprobs(alone, token_ids[[0, 6]], 3)
    torch.testing.assert_close(found.token_logprobs[[0, 6]], expected.token_logprobs)
    assert ((found.top_ids >= 0) & (found.top_ids < VOCAB)).all()


# --- draws -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sampling.CONSTANT_BITS)
def test_every_kind_of_row_beside_the_others_draws_what_the_cpu_draws(dtype: torch.dtype) -> None:
    drawn(random_logits(len(MIXTURE), dtype=dtype), *MIXTURE, index=3)


def test_a_row_draws_alone_what_it_draws_beside_others() -> None:
    logits = random_logits(3, 700)
    rows = MIXTURE[2:5]
    assert drawn(logits, *rows) == [drawn(logits[i : i + 1], row)[0] for i, row in enumerate(rows)]


def test_draws_follow_seed_and_index() -> None:
    logits = torch.zeros(1, 1000, device=DEVICE)
    ids = [drawn(logits, SamplingParams(seed=seed), index=index)[0] for seed, index in ((0, 0), (0, 1), (1, 0))]
    assert ids == [int(sampler.uniform(seed, index) * 1000) for seed, index in ((0, 0), (0, 1), (1, 0))]


def test_tokens_equal_to_the_floor_are_all_kept() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 1.0, -3.0]], device=DEVICE)
    assert drawn_by_seed(logits, SamplingParams(top_k=2), 8) == {1, 2, 3, 4}


def test_top_p_takes_its_share_of_what_top_k_leaves() -> None:
    logits = torch.tensor([[0.5, 0.25, 0.125, 0.0625, 0.0625]], device=DEVICE).log()
    assert drawn_by_seed(logits, SamplingParams(top_k=2, top_p=0.6), 4) == {0}
    assert drawn_by_seed(logits, SamplingParams(top_p=0.7), 4) == {0, 1}


def test_a_temperature_near_zero_is_greedy_and_a_barred_token_never_drawn() -> None:
    """Case G1."""
    logits = random_logits(4, 300).mul_(20).clamp_(-60, 59)
    logits[:, 123] = 60
    logits[:, 200:] = -inf
    rows = [SamplingParams(temperature=t, seed=5) for t in (1e-6, 1e-5, 1e-4, 1e-3)]
    assert drawn(logits, *rows) == [123] * 4


def test_a_vocabulary_smaller_than_top_k_is_kept_whole() -> None:
    logits = torch.zeros(1, 5, device=DEVICE)
    assert drawn_by_seed(logits, SamplingParams(top_k=9), 16) == set(range(5))


# --- log-probabilities -----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", sampling.CONSTANT_BITS)
def test_log_probabilities_of_the_token_and_of_the_likeliest(dtype: torch.dtype) -> None:
    logits, token_ids = random_logits(2, dtype=dtype), torch.tensor([5, VOCAB - 1], device=DEVICE)
    logits[0, 4090:4100] = logits[0].max() + 1
    found, expected = sampling.top_logprobs(logits, token_ids, 20), reference.top_logprobs(logits, token_ids, 20)
    assert found.top_ids[0, :10].tolist() == list(range(4090, 4100))
    assert torch.equal(found.top_ids, expected.top_ids)
    torch.testing.assert_close(found.top_logprobs, expected.top_logprobs)
    torch.testing.assert_close(found.token_logprobs, expected.token_logprobs)
