"""Several choices of one prompt before real workers, mixed and apart: one prefill, one transfer, the same texts."""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from random import Random

import httpx
import pytest

from crossdock.router.sampling import choice_seed

from .answers import ask, ask_all, refusal
from .clients import Json, complete, complete_for, crowd
from .questions import VOCAB_SIZE
from .server import Server, serving

MODES = {"mixed": ("--mixed", "1"), "1P1D": ()}
SMALL = ("--num-blocks", "48", "--max-model-len", "400", "--chunk-tokens", "64")
DRAWN: Json = {"temperature": 1.0, "max_tokens": 24, "ignore_eos": True, "logprobs": 2, "seed": 7}
PENALISED: Json = {**DRAWN, "presence_penalty": 1.0, "repetition_penalty": 1.3}
GREEDY: Json = {**DRAWN, "temperature": 0}


@pytest.fixture(scope="module", params=MODES)
def server(
    request: pytest.FixtureRequest, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("choices") / "server.log"
    with serving(small_model, log, "--threads", "1", *MODES[request.param], *SMALL) as server:
        yield server


def random_prompt(seed: int, num_tokens: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(VOCAB_SIZE) for _ in range(num_tokens)]


@pytest.mark.parametrize(("num_tokens", "params"), [(90, PENALISED), (96, DRAWN), (90, GREEDY)])
def test_four_choices_cost_one_prefill_and_one_transfer_and_say_what_each_says_alone(
    server: Server, num_tokens: int, params: Json
) -> None:
    prompt, is_mixed = random_prompt(num_tokens, num_tokens), bool(server.worker_pids("mixed"))
    before = server.settled()
    four = ask(server, prompt=prompt, n=4, **params)
    changes = server.settled().changes_since(before)
    assert changes("prompt_tokens_total") - changes("cached_tokens_total") == num_tokens - four.cached_tokens
    assert changes("output_tokens_total") == 4 * 23
    shipped = changes("blocks_pushed_total") + changes("blocks_skipped_total")
    assert (changes("transfers_total"), shipped) == ((0, 0) if is_mixed else (1, 6))
    assert (four.num_prompt, four.num_output) == (num_tokens, 4 * 24)
    alone = ask_all(server, [{"prompt": prompt, **params, "seed": choice_seed(7, k)} for k in range(4)])
    assert [(c.tokens, c.token_logprobs) for c in four.choices] == [
        (a.only.tokens, a.only.token_logprobs) for a in alone
    ]
    assert len({choice.text for choice in four.choices}) == (1 if params is GREEDY else 4)


def test_every_answer_of_unequal_choices_has_all_of_them(server: Server) -> None:
    """A hundred possible ends make them stop at different tokens."""
    body: Json = {"n": 4, "temperature": 1.0, "max_tokens": 30, "stop_token_ids": list(range(0, VOCAB_SIZE, 20))}
    bodies = [{**body, "prompt": random_prompt(number, 40), "stream": number % 2 == 1} for number in range(50)]
    answers = ask_all(server, bodies)
    assert [len(answer.choices) for answer in answers] == [4] * 50
    assert {choice.finish_reason for answer in answers for choice in answer.choices} == {"stop", "length"}
    server.settled()


def test_the_best_of_several_is_the_likeliest_and_all_are_paid_for(server: Server) -> None:
    prompt = random_prompt(5, 30)
    every = ask(server, prompt=prompt, n=4, **DRAWN)
    best = ask(server, prompt=prompt, best_of=4, n=2, **DRAWN)
    ranked = sorted(every.choices, key=lambda choice: -sum(filter(None, choice.token_logprobs)))
    assert [choice.tokens for choice in best.choices] == [choice.tokens for choice in ranked[:2]]
    assert (best.num_prompt, best.num_output) == (30, 4 * 24)


def test_a_stop_string_ends_one_choice_and_the_others_go_on(server: Server) -> None:
    prompt = random_prompt(6, 30)
    texts = [choice.text for choice in ask(server, prompt=prompt, n=4, **DRAWN).choices]
    stop = texts[1][5:9]
    assert sum(stop in text for text in texts) == 1
    stopped = ask(server, prompt=prompt, n=4, stop=stop, **DRAWN)
    assert [choice.text for choice in stopped.choices] == [texts[0], texts[1][: texts[1].index(stop)], *texts[2:]]
    assert [choice.finish_reason for choice in stopped.choices] == ["length", "stop", "length", "length"]


def test_more_choices_than_the_pool_can_hold_are_refused(server: Server) -> None:
    told = refusal(server, {"prompt": random_prompt(1, 370), "n": 30, "max_tokens": 20})
    assert (told["param"], told["message"]) == (
        "n",
        "30 choices over 370 prompt tokens are asked for, the workers hold 25.",
    )


def test_clients_that_leave_strand_no_block_of_any_choice(server: Server) -> None:
    """Two hundred of them at pools with room for a few, each with four choices."""

    async def visit(number: int, client: httpx.AsyncClient) -> None:
        random = Random(number)
        prompt = random_prompt(number, random.randint(1, 200))
        body: Json = {"prompt": prompt, "n": 4, "max_tokens": random.randint(2, 60), "ignore_eos": True, "stream": True}
        if number % 2:
            await complete_for(client, body, random.uniform(0, 1))
        else:
            await complete(client, body, max_events=random.randint(1, 60))

    asyncio.run(crowd(server.url, [partial(visit, number) for number in range(200)], num_at_once=24))
    server.settled()
    assert ask(server, prompt=random_prompt(1, 300), n=4, max_tokens=5).num_output > 0
