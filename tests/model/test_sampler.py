"""The sampler: exact numbers for penalties and floors, and draws that depend on seed and index alone."""

from dataclasses import dataclass
from math import inf, nan

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor
from transformers import RepetitionPenaltyLogitsProcessor

from crossdock.core.request import SamplingParams
from crossdock.model.sampler import NUM_CANDIDATES, SamplingRow, adjust, prompt_logprobs, sample, uniform

GREEDY = SamplingParams(temperature=0.0)


def row(params: SamplingParams, prompt: tuple[int, ...] = (1,), output: tuple[int, ...] = ()) -> SamplingRow:
    return SamplingRow(params, [*prompt, *output], len(prompt), len(output))


def drawn(params: SamplingParams, index: int = 0) -> SamplingRow:
    return SamplingRow(params, [1] * (1 + index), 1, index)


def random_logits(num_rows: int, vocab_size: int, spread: float = 3.0) -> Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(7)) * spread


# --- greedy and temperature ------------------------------------------------------------------


def test_greedy_takes_the_first_of_the_best_tokens() -> None:
    logits = torch.tensor([[0.0, 3.0, 3.0], [9.0, 1.0, 1.0]])
    assert sample(logits, [row(GREEDY)] * 2).token_ids.tolist() == [1, 0]


def test_logits_that_nobody_adjusts_are_not_copied() -> None:
    logits = random_logits(2, 8)
    assert adjust(logits, [row(GREEDY), row(SamplingParams(seed=1))], None) is logits


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_temperatures_near_zero_give_the_greedy_token(dtype: torch.dtype) -> None:
    """Case G1."""
    logits = random_logits(5, 1000).clamp(-1, 1).mul(60).to(dtype).float()
    logits[:, 123] = 60.0
    logits[:, 400:500] = -60.0
    logits[:, 500:600] = -inf
    logits[:, 600:] = logits[:, 600:].clamp(max=59.0)
    logits[:, :123] = logits[:, :123].clamp(max=59.0)
    logits[:, 124:400] = logits[:, 124:400].clamp(max=59.0)
    rows = [drawn(SamplingParams(temperature=t, seed=5)) for t in (0.0, 1e-6, 1e-5, 1e-4, 1e-3)]
    assert sample(logits, rows).token_ids.tolist() == [123] * 5
    assert [sample(logits[i : i + 1], rows[i : i + 1]).token_ids.item() for i in range(5)] == [123] * 5


@pytest.mark.parametrize("nothing", [-inf, nan, inf])
def test_logits_that_are_no_numbers_draw_some_token_and_leave_other_rows_alone(nothing: float) -> None:
    logits = random_logits(3, 50)
    rows = [drawn(SamplingParams(seed=i, top_k=top_k, top_p=0.9)) for i, top_k in enumerate((0, 5, 0))]
    right = sample(logits, rows).token_ids.tolist()
    logits[1] = nothing
    drawn_ids = sample(logits, rows)
    token_ids = drawn_ids.token_ids.tolist()
    assert 0 <= token_ids[1] < 50
    assert (token_ids[0], token_ids[2]) == (right[0], right[2])
    assert drawn_ids.is_sound.tolist() == [True, False, True]


def test_a_row_with_a_single_nan_is_not_sound_whatever_is_drawn() -> None:
    logits = random_logits(2, 50)
    logits[1, 7] = nan
    assert sample(logits, [row(GREEDY), drawn(SamplingParams(seed=1))]).is_sound.tolist() == [True, False]
    assert sample(logits, [row(GREEDY), row(GREEDY)]).is_sound.tolist() == [True, False]


def test_top_k_one_is_greedy_even_between_equal_tokens() -> None:
    """Case F5, in every order of a batch that mixes them."""
    logits = random_logits(4, 50)
    logits[:, 10] = logits[:, 20] = 40.0
    rows = [drawn(SamplingParams(temperature=0.9, top_k=1, seed=s)) for s in (1, 2)] + [row(GREEDY)]
    rows.append(drawn(SamplingParams(temperature=1.0, seed=3, logit_bias={7: 100.0})))
    for shift in range(4):
        order = [(i + shift) % 4 for i in range(4)]
        assert sample(logits[order], [rows[i] for i in order]).token_ids.tolist() == [10 if i < 3 else 7 for i in order]


def test_a_barred_token_is_never_drawn() -> None:
    logits = torch.full((200, 6), -inf)
    logits[:, [2, 4]] = 1.0
    rows = [drawn(SamplingParams(seed=seed)) for seed in range(200)]
    assert set(sample(logits, rows).token_ids.tolist()) == {2, 4}


# --- bias, penalties, min_tokens -------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "output", "changed"),
    [
        (SamplingParams(frequency_penalty=0.5), (7, 9), {7: 1.5, 9: 1.5}),
        (SamplingParams(presence_penalty=0.5), (7, 9), {7: 1.5, 9: 1.5}),
        (SamplingParams(frequency_penalty=0.5), (7, 9, 9), {7: 1.5, 9: 1.0}),
        (SamplingParams(presence_penalty=0.5), (7, 9, 9), {7: 1.5, 9: 1.5}),
        (SamplingParams(repetition_penalty=2.0), (7, 9), {5: -4.0, 7: 1.0, 9: 1.0}),
    ],
)
def test_penalties_count_what_they_should(
    params: SamplingParams, output: tuple[int, ...], changed: dict[int, float]
) -> None:
    """Case G3: presence and frequency see the output, repetition the prompt too."""
    logits = torch.full((1, 12), 2.0)
    logits[0, 5] = -2.0
    expected = {token_id: -2.0 if token_id == 5 else 2.0 for token_id in range(12)} | changed
    found = adjust(logits, [row(params, (5, 5, 7), output)], None)
    assert found[0].tolist() == list(expected.values())
    assert logits[0].tolist() == [-2.0 if token_id == 5 else 2.0 for token_id in range(12)]


def test_repetition_penalty_is_hugging_faces() -> None:
    logits = random_logits(1, 40)
    prompt, output = (3, 4, 4, 39), (0, 9)
    expected = RepetitionPenaltyLogitsProcessor(1.3)(torch.LongTensor([[*prompt, *output]]), logits.clone())
    assert torch.equal(adjust(logits, [row(SamplingParams(repetition_penalty=1.3), prompt, output)], None), expected)


def test_first_token_has_no_output_to_be_penalised_for() -> None:
    logits = random_logits(1, 10)
    params = SamplingParams(frequency_penalty=2.0, presence_penalty=2.0)
    assert torch.equal(adjust(logits, [row(params, (1, 2, 3))], None), logits)


def test_pending_token_counts_as_the_last_output() -> None:
    params = SamplingParams(frequency_penalty=0.5, repetition_penalty=2.0)
    logits = torch.full((3, 12), 2.0)
    known = row(params, (5,), (7, 9))
    pending = SamplingRow(params, [5, 7], 1, output_index=2)
    grown = SamplingRow(params, [5, 7, 9, 11, 11], 1, output_index=2)
    found = adjust(logits, [known, pending, grown], torch.tensor([-1, 9, 9]))
    expected = [2.0] * 12
    expected[5], expected[7], expected[9] = 1.0, 0.5, 0.5
    assert found.tolist() == [expected] * 3


def test_penalties_of_one_row_leave_the_others_alone() -> None:
    logits = random_logits(3, 12)
    found = adjust(logits, [row(GREEDY), row(SamplingParams(presence_penalty=1.0), (1,), (4,)), row(GREEDY)], None)
    assert (found != logits).nonzero().tolist() == [[1, 4]]


def test_bias_comes_before_penalties() -> None:
    params = SamplingParams(logit_bias={3: 2.0}, repetition_penalty=2.0)
    assert adjust(torch.full((1, 5), -1.0), [row(params, (3,))], None)[0].tolist() == [-1.0, -1.0, -1.0, 0.5, -1.0]


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 5])
def test_exactly_min_tokens_come_before_the_first_stop_token(min_tokens: int) -> None:
    """Case G5; the prompt's 50 tokens don't count."""
    eos, stop = 63, 17
    params = SamplingParams(
        temperature=0.0, min_tokens=min_tokens, stop_token_ids=(eos, stop), logit_bias={eos: 100.0, stop: 99.0}
    )
    prompt, output = (2,) * 50, list[int]()
    while not output or output[-1] not in (eos, stop):
        logits = random_logits(1, 64)
        output.append(int(sample(logits, [row(params, prompt, tuple(output))]).token_ids))
    assert len(output) == min_tokens + 1
    assert output[-1] == eos


def test_without_stop_tokens_min_tokens_bars_nothing() -> None:
    """Case G5: with ``ignore_eos`` the stop set is empty, and the last id of the vocabulary keeps its logit."""
    logits = random_logits(1, 64)
    assert adjust(logits, [row(SamplingParams(min_tokens=5, ignore_eos=True))], None) is logits


# --- the draw --------------------------------------------------------------------------------


def test_the_stream_of_seed_zero_is_splitmix64s() -> None:
    """First outputs of the public reference implementation at state 0."""
    published = (0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F)
    assert [uniform(0, i) for i in range(3)] == [(bits >> 12) / 2**52 for bits in published]


def test_any_integer_is_a_seed() -> None:
    numbers = [uniform(seed, 3) for seed in (-1, 0, 1, 2**63, 2**64 - 2, 2**200 + 5)]
    assert len(set(numbers)) == 6
    assert all(0 <= number < 1 for number in numbers)


@dataclass(frozen=True)
class Reference:
    """Filters and draw in float64, one row, one token after the other."""

    params: SamplingParams

    def kept(self, logits: Tensor) -> dict[int, float]:
        """Token -> probability, likeliest first."""
        p = self.params
        probs = torch.softmax(logits.double() / p.temperature, -1)
        ranked = sorted(enumerate(probs.tolist()), key=lambda pair: -pair[1])[: p.top_k or None]
        best, mass, total = ranked[0][1], 0.0, sum(prob for _, prob in ranked)
        nucleus = {}
        for token_id, prob in ranked:
            if mass < p.top_p * total:
                nucleus[token_id] = prob
            mass += prob
        return {token_id: prob for token_id, prob in nucleus.items() if prob >= p.min_p * best}

    def token(self, logits: Tensor, index: int) -> int:
        kept = self.kept(logits)
        left = uniform(self.params.seed or 0, index) * sum(kept.values())
        for token_id in sorted(kept):
            left -= kept[token_id]
            if left < 0:
                return token_id
        return max(kept)


FILTERS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_p=0.9),
    SamplingParams(temperature=1.3, top_k=40),
    SamplingParams(temperature=1.0, top_k=40, top_p=0.8),
    SamplingParams(temperature=1.0, min_p=0.05),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.95, min_p=0.1),
    SamplingParams(temperature=8.0, top_p=0.97),  # flat: the candidates hold too little
    SamplingParams(temperature=1.5, top_k=NUM_CANDIDATES + 500),
    SamplingParams(temperature=6.0, top_k=NUM_CANDIDATES + 500, top_p=0.9),
    SamplingParams(temperature=1.0, top_k=10**9, top_p=0.5),
]


@pytest.mark.parametrize("params", FILTERS)
@pytest.mark.parametrize("vocab_size", [100, 3000])
def test_draws_are_those_of_a_plain_float64_sampler(params: SamplingParams, vocab_size: int) -> None:
    logits = random_logits(4, vocab_size)
    for seed in range(10):
        reference = Reference(replace(params, seed=seed))
        rows = [drawn(reference.params, index) for index in range(4)]
        expected = [reference.token(logits[index], index) for index in range(4)]
        assert sample(logits, rows).token_ids.tolist() == expected


def test_filters_keep_the_best_token_at_least() -> None:
    logits = random_logits(2, 50)
    rows = [drawn(SamplingParams(seed=1, top_p=0.0)), drawn(SamplingParams(seed=1, min_p=1.0))]
    assert sample(logits, rows).token_ids.tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("by", ["seed", "index"])
def test_draws_follow_the_distribution(by: str) -> None:
    """Chi-square over ten tokens; 27.9 is the 0.999 quantile of nine degrees of freedom."""
    num_draws = 4000
    logits = torch.linspace(-2, 1, 10)
    places = [(n, 0) if by == "seed" else (11, n) for n in range(num_draws)]
    rows = [SamplingRow(SamplingParams(temperature=1.5, seed=seed), (), 0, index) for seed, index in places]
    found = torch.bincount(sample(logits.expand(num_draws, 10), rows).token_ids, minlength=10)
    expected = torch.softmax(logits / 1.5, -1) * num_draws
    assert ((found - expected) ** 2 / expected).sum() < 27.9


def test_a_row_gets_the_same_in_a_batch_of_32_as_alone() -> None:
    logits = random_logits(32, 5000)
    rows = [
        SamplingRow(
            replace(
                FILTERS[i % len(FILTERS)],
                seed=1000 + i,
                repetition_penalty=1.2 if i % 3 == 0 else 1.0,
                frequency_penalty=0.3 if i % 5 == 0 else 0.0,
                temperature=0.0 if i % 7 == 0 else FILTERS[i % len(FILTERS)].temperature,
                logprobs=i % 4 if i % 2 == 0 else None,
                min_tokens=9 if i % 6 == 0 else 0,
                stop_token_ids=(i, 4999),
            ),
            list(range(i, i + 12)),
            num_prompt=5,
            output_index=7,
        )
        for i in range(32)
    ]
    together = sample(logits, rows)
    alone = [sample(logits[i : i + 1], rows[i : i + 1]) for i in range(32)]
    assert together.token_ids.tolist() == [int(one.token_ids) for one in alone]
    assert together.logprobs == [one.logprobs[0] for one in alone]


# --- logprobs --------------------------------------------------------------------------------


def test_logprobs_are_the_models_own_whatever_is_asked_for_on_top() -> None:
    logits = random_logits(4, 100)
    logits[:, 50:60] = -inf
    expected = torch.log_softmax(logits, -1)
    rows = [
        row(SamplingParams(temperature=0.0, logprobs=3)),
        row(GREEDY),
        drawn(SamplingParams(temperature=0.3, seed=4, top_k=5, logprobs=0)),
        row(SamplingParams(temperature=0.0, logprobs=20, logit_bias={9: 50.0}, repetition_penalty=1.5), (9,)),
    ]
    found = sample(logits, rows)
    assert found.token_ids[3] == 9
    assert found.logprobs[1] is None
    for i, num_top in ((0, 3), (2, 0), (3, 20)):
        logprobs = found.logprobs[i]
        assert logprobs is not None
        assert logprobs.token_logprob == pytest.approx(expected[i, found.token_ids[i]].item(), abs=1e-5)
        assert logprobs.top_ids == expected[i].argsort(descending=True)[:num_top].tolist()
        assert logprobs.top_logprobs == pytest.approx(expected[i, logprobs.top_ids].tolist(), abs=1e-5)


def test_prompt_logprobs_score_the_tokens_that_follow() -> None:
    logits, next_ids = random_logits(5, 30), torch.tensor([3, 0, 29, 7, 7])
    expected = torch.log_softmax(logits, -1)
    found = prompt_logprobs(logits, next_ids, 2)
    assert [one.token_logprob for one in found] == pytest.approx(expected[range(5), next_ids].tolist(), abs=1e-5)
    assert [one.top_ids for one in found] == expected.argsort(-1, descending=True)[:, :2].tolist()
    assert [one.top_ids for one in prompt_logprobs(logits, next_ids, 0)] == [[]] * 5
