"""The same seed gives the same load, and the load is what was asked for."""

import pytest

from crossdock.benchmarks.workload import Lengths, LoadRequest, PromptSource, arriving_at_rate, random_requests

IDS = PromptSource(vocab_size=1000)
WORDS = PromptSource(vocab_size=0)


def test_lengths_are_one_number_or_a_range() -> None:
    assert Lengths.parse("256") == Lengths(256, 256)
    assert Lengths.parse("128:512") == Lengths(128, 512)


@pytest.mark.parametrize("text", ["0", "9:3", "many", "", "1:2:3"])
def test_lengths_that_are_neither_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"not a range|invalid literal"):
        Lengths.parse(text)


def test_prompts_have_the_lengths_asked_for_and_no_special_tokens() -> None:
    requests = random_requests(50, Lengths(3, 6), Lengths(7, 7), IDS, seed=1)
    assert {len(request.prompt) for request in requests} == {3, 4, 5, 6}
    assert {request.max_tokens for request in requests} == {7}
    assert all(isinstance(token, int) and 100 <= token < 1000 for request in requests for token in request.prompt)


def test_the_same_seed_draws_the_same_requests() -> None:
    first, again, other = (random_requests(3, Lengths(5, 9), Lengths(1, 9), IDS, seed=seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_shared_tokens_open_every_prompt_and_the_rest_differs() -> None:
    one, other = random_requests(2, Lengths(20, 20), Lengths(1, 1), IDS, num_shared=16)
    assert one.prompt[:16] == other.prompt[:16]
    assert one.prompt[16:] != other.prompt[16:]
    assert len(one.prompt) == 20


def test_a_prompt_is_never_only_what_all_share() -> None:
    (request,) = random_requests(1, Lengths(4, 4), Lengths(1, 1), IDS, num_shared=16)
    assert len(request.prompt) == 17


def test_text_prompts_are_words() -> None:
    (request,) = random_requests(1, Lengths(12, 12), Lengths(1, 1), WORDS)
    assert isinstance(request.prompt, str)
    assert len(request.prompt.split(" ")) == 12


def test_poisson_arrivals_start_at_once_and_come_at_their_rate() -> None:
    requests = arriving_at_rate([LoadRequest("x", 1)] * 2001, rate=10.0, seed=0)
    times = [request.at_seconds for request in requests]
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(200.0, rel=0.1)
