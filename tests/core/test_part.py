"""The last door before a worker: what it refuses, and the budget of a step."""

import pytest
from msgspec.structs import replace

from crossdock.core.part import StepBudget
from crossdock.core.request import Request, RequestId, SamplingParams, pack_ids
from crossdock.core.unfit import refuse_unfit

from ..parts import card

CARD = replace(card(num_blocks=4), vocab_size=100, max_model_len=10)
FIT = SamplingParams(max_tokens=4, seed=0)


def reason(prompt: bytes, params: SamplingParams = FIT) -> str | None:
    request = Request(request_id=RequestId("r"), prompt=prompt, params=params)
    return refuse_unfit(request, CARD)


def test_planning_takes_tokens_and_a_sequence_from_the_budget() -> None:
    budget = StepBudget(num_tokens=512, num_sequences=8)
    budget.take(500)
    budget.take(1)
    assert budget == StepBudget(num_tokens=11, num_sequences=6)


def test_a_request_that_just_fits_is_served() -> None:
    edges = SamplingParams(max_tokens=4, seed=0, stop_token_ids=(0, 99), logit_bias={0: 1.0, 99: -1.0})
    assert reason(pack_ids([0, 1, 2, 3, 98, 99]), edges) is None


@pytest.mark.parametrize("prompt", [b"", b"\0" * 3, b"\0" * 5])
def test_a_prompt_must_be_a_list_of_ids(prompt: bytes) -> None:
    assert reason(prompt) == "the prompt is empty or not a list of 32-bit ids"


@pytest.mark.parametrize("params", [SamplingParams(seed=0), SamplingParams(max_tokens=4)])
def test_the_router_must_have_resolved_limit_and_seed(params: SamplingParams) -> None:
    assert reason(pack_ids([1]), params) == "max_tokens and seed are unset"


def test_a_request_that_can_never_fit_is_refused_with_its_length() -> None:
    assert reason(pack_ids([1] * 7)) == "prompt and max_tokens are 11 tokens, the limit is 10"


def test_an_id_beyond_the_vocabulary_is_named() -> None:
    assert reason(pack_ids([1, 100])) == "token id 100 lies outside the vocabulary of 100"


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(max_tokens=4, seed=0, stop_token_ids=(100,)),
        SamplingParams(max_tokens=4, seed=0, stop_token_ids=(-1,)),
        SamplingParams(max_tokens=4, seed=0, logit_bias={100: 1.0}),
        SamplingParams(max_tokens=4, seed=0, logit_bias={-1: 1.0}),
    ],
)
def test_ids_in_parameters_lie_in_the_vocabulary_too(params: SamplingParams) -> None:
    assert reason(pack_ids([1]), params) == "a stop_token_ids or logit_bias id lies outside the vocabulary of 100"
