"""What is drawn and when it ends: the same alone, in a crowd, in every mode and through preemption."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from crossdock import LLM, EngineConfig, SamplingParams

from .answers import Answer, Json, ask, ask_all, refusal
from .models import ids_by_text, variant
from .server import Server, serving

MODES = {"mixed": ("--mixed", "1"), "1P1D": ()}
NUM_BLOCKS = 7
EOS_ID, EOS = 319, "hz"
"""The last of the vocabulary, and how logprob entries show it."""
PROMPT = [7, 100, 3] * 17
GREEDY: Json = {"temperature": 0, "logprobs": 0, "ignore_eos": True}
WAYS: list[Json] = [
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 1.4, "top_p": 0.9},
    {"temperature": 0.8, "top_k": 30, "min_p": 0.01},
    {"temperature": 1.0, "presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"temperature": 0, "repetition_penalty": 1.4, "frequency_penalty": -1.0},
    {"temperature": 1.0, "logit_bias": {"65": 6, "66": -100}, "min_tokens": 9},
    {"temperature": 1.2, "top_k": 1},
]
"""All kinds of parameters, greedy and drawn."""


@pytest.fixture(scope="module", params=MODES)
def server(
    request: pytest.FixtureRequest, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    with serving(small_model, tmp_path_factory.mktemp("logs") / "log", *MODES[request.param]) as server:
        yield server


@pytest.fixture(scope="module", params=MODES)
def cramped(
    request: pytest.FixtureRequest, small_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """Seven blocks of sixteen tokens."""
    flags = ("--num-blocks", str(NUM_BLOCKS), *MODES[request.param])
    with serving(small_model, tmp_path_factory.mktemp("logs") / "log", *flags) as server:
        yield server


@pytest.fixture(scope="module")
def id_of(small_model: Path) -> dict[str, int]:
    return ids_by_text(small_model)


@pytest.fixture(scope="module")
def roomy(small_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Asked one thing at a time, it says what is right."""
    with serving(small_model, tmp_path_factory.mktemp("logs") / "log", "--mixed", "1", "--no-prefix-cache") as server:
        yield server


@pytest.fixture(scope="module")
def network(small_model: Path) -> PreTrainedModel:
    network = AutoModelForCausalLM.from_pretrained(small_model)
    network.generation_config.eos_token_id = None
    return network


def random_ids(num_tokens: int, seed: int) -> list[int]:
    random = Random(seed)
    return [random.randrange(EOS_ID) for _ in range(num_tokens)]


def ids(answer: Answer, id_of: dict[str, int]) -> list[list[int]]:
    return [[id_of[token] for token in choice.tokens] for choice in answer.choices]


def assert_same(answers: Sequence[Answer], rights: Sequence[Answer]) -> None:
    """The same tokens and texts, and logprobs as near as sums in another order leave them."""
    for answer, right in zip(answers, rights, strict=True):
        for choice, expected in zip(answer.choices, right.choices, strict=True):
            assert (choice.tokens, choice.text) == (expected.tokens, expected.text)
            assert choice.finish_reason == expected.finish_reason
            assert choice.token_logprobs == pytest.approx(expected.token_logprobs, abs=1e-3)
        assert (answer.num_prompt, answer.num_output) == (right.num_prompt, right.num_output)


# --- seeds -----------------------------------------------------------------------------------------


def crowd(stream: bool) -> list[Json]:
    """Each way with prompts of its own, as different in length as in what they ask for."""
    return [
        {
            **way,
            "prompt": random_ids(3 + 17 * number, seed=number),
            "seed": number - 4,
            "max_tokens": 20 + number,
            "logprobs": 0,
            "stream": stream,
        }
        for number, way in enumerate([*WAYS, *WAYS])
    ]


@pytest.fixture(scope="module")
def alone(roomy: Server) -> list[Answer]:
    return [ask(roomy, **body) for body in crowd(stream=False)]


@pytest.mark.parametrize("stream", [False, True])
def test_a_seed_gives_the_same_text_alone_and_in_any_crowd(server: Server, alone: list[Answer], stream: bool) -> None:
    bodies = crowd(stream)
    assert_same([ask(server, **body) for body in bodies[:4]], alone[:4])
    strangers: list[Json] = [{"prompt": random_ids(40, seed=n), "max_tokens": 30} for n in range(16)]
    mixed = [body for pair in zip(bodies, strangers, strict=True) for body in pair]
    for order in (mixed, mixed[::-1]):
        answers = ask_all(server, order)
        ours = answers[::2] if order is mixed else answers[1::2][::-1]
        assert_same(ours, alone)


def test_other_seeds_and_no_seed_give_other_texts(server: Server) -> None:
    body: Json = {"prompt": PROMPT, "max_tokens": 20, "ignore_eos": True}
    texts = [ask(server, **body, seed=seed).text for seed in (0, 1, -1, 2**62, None, None)]
    assert len(set(texts)) == 6


def test_seeded_and_unseeded_neighbours_with_one_candidate_are_greedy_in_every_order(server: Server) -> None:
    usual = ask(server, prompt=PROMPT, **GREEDY, max_tokens=20)
    body: Json = {**GREEDY, "prompt": PROMPT, "max_tokens": 20, "top_k": 1, "temperature": 0.1, "logprobs": 1}
    for seeds in ([1, 2, None, None], [None, 1, None, 2], [None, None, 1, 2]):
        assert_same(ask_all(server, [{**body, "seed": seed} for seed in seeds]), [usual] * 4)


@pytest.mark.parametrize("stream", [False, True])
def test_every_one_of_n_choices_is_complete(server: Server, stream: bool) -> None:
    body: Json = {"max_tokens": 40, "n": 4, "logit_bias": {str(EOS_ID): 6}, "logprobs": 0, "stream": stream}
    bodies = [{**body, "prompt": random_ids(5, seed=n), "seed": n} for n in range(50)]
    answers = ask_all(server, bodies)
    lengths = {len(choice.tokens) for answer in answers for choice in answer.choices}
    assert len(lengths) > 8, "they must differ for this to mean anything"
    for answer in answers:
        assert len(answer.choices) == 4
        assert sum(len(choice.tokens) for choice in answer.choices) == answer.num_output
        for choice in answer.choices:
            num_before_end = choice.tokens.index(EOS) if choice.finish_reason == "stop" else 39
            assert len(choice.tokens) == num_before_end + 1
            assert EOS not in choice.text
    again = ask_all(server, [{**body, "prompt": random_ids(5, seed=n), "seed": n, "n": 1} for n in range(50)])
    assert [a.only.tokens for a in again] == [a.choices[0].tokens for a in answers]


# --- preemption and room (E1, E3, E5) --------------------------------------------------------------


@pytest.mark.parametrize("way", [{"temperature": 0}, {"temperature": 1, "seed": 5}], ids=["greedy", "seeded"])
@pytest.mark.parametrize("stream", [False, True])
def test_preemption_is_not_seen_by_anyone(cramped: Server, roomy: Server, way: Json, stream: bool) -> None:
    body: Json = {**way, "max_tokens": 35, "ignore_eos": True, "logprobs": 0}
    bodies = [{**body, "prompt": random_ids(34, seed)} for seed in (100, 101)]
    rights = [ask(roomy, **body) for body in bodies]
    before = cramped.scrape().worker("preemptions_total")
    answers = ask_all(cramped, [{**body, "stream": stream} for body in bodies * 4])
    assert_same(answers, rights * 4)
    assert all((answer.num_prompt, answer.num_output, len(answer.only.tokens)) == (34, 35, 35) for answer in answers)
    cramped.wait_until_nothing_is_left(10)
    assert cramped.scrape().worker("preemptions_total") > before


def test_a_crowd_in_a_cramped_pool_gets_what_it_would_get_alone(cramped: Server, roomy: Server) -> None:
    bodies = [
        {**way, "prompt": random_ids(5 + 11 * n, n), "max_tokens": 40 - 3 * n, "seed": n, "logprobs": 0}
        for n, way in enumerate(WAYS)
    ]
    rights = [ask(roomy, **body) for body in bodies]
    assert_same(ask_all(cramped, bodies * 3), rights * 3)


def test_prompts_that_fill_the_pool_all_get_their_answer(cramped: Server, roomy: Server) -> None:
    bodies = [{**GREEDY, "prompt": random_ids(16, n), "max_tokens": 20} for n in range(8)]
    rights = [ask(roomy, **body) for body in bodies]
    assert_same(ask_all(cramped, bodies), rights)


def test_what_can_never_fit_is_refused_at_once_and_keeps_nobody_waiting(cramped: Server, roomy: Server) -> None:
    assert cramped.client.get("/v1/models").json()["data"][0]["max_model_len"] == NUM_BLOCKS * 16
    small: Json = {**GREEDY, "prompt": random_ids(10, 1), "max_tokens": 30}
    usual = ask(roomy, **small)
    for body in ({"prompt": random_ids(1002, 2)}, {"prompt": random_ids(10, 3), "max_tokens": 103}):
        errors = [refusal(cramped, body) for _ in range(5)]
        assert {error["code"] for error in errors} == {"context_length_exceeded"}
        assert "112 tokens" in errors[0]["message"]
        assert_same([ask(cramped, **small)], [usual])
    whole = ask(cramped, **GREEDY, prompt=random_ids(10, 3), max_tokens=102)
    assert (whole.num_output, whole.only.finish_reason) == (102, "length")


# --- temperatures near nothing (G1) ----------------------------------------------------------------

COLD = [1e-300, 1e-6, 1e-5, 9.9e-5, 1e-4, 1e-3]


def test_ever_lower_temperatures_are_greedy_together_and_one_by_one(server: Server) -> None:
    usual = ask(server, **GREEDY, prompt=PROMPT, max_tokens=24)
    bodies = [{**GREEDY, "prompt": PROMPT, "max_tokens": 24, "temperature": cold, "seed": 3} for cold in COLD]
    assert_same(ask_all(server, bodies), [usual] * len(COLD))
    assert_same([ask(server, **body) for body in bodies], [usual] * len(COLD))


def test_low_temperatures_do_not_overflow_bfloat16(small_model: Path, tmp_path: Path) -> None:
    loud = variant(small_model, tmp_path / "loud", {})
    weights = load_file(loud / "model.safetensors")
    weights["lm_head.weight"] *= 5
    save_file(weights, loud / "model.safetensors", {"format": "pt"})
    llm = LLM(str(loud), EngineConfig(num_threads=1, num_blocks=64, dtype="bfloat16"))

    def said(temperature: float) -> tuple[int, ...]:
        params = SamplingParams(temperature=temperature, max_tokens=24, seed=3, ignore_eos=True)
        return llm.generate([PROMPT], params, show_progress=False)[0].outputs[0].token_ids

    assert len({said(temperature) for temperature in (0.0, *COLD)}) == 1


# --- penalties (G3) --------------------------------------------------------------------------------


@pytest.mark.parametrize("penalty", [{"frequency_penalty": 2}, {"presence_penalty": 2}], ids=str)
def test_penalties_of_the_output_do_not_count_the_prompt(server: Server, penalty: Json) -> None:
    body: Json = {**GREEDY, "prompt": "Paris Paris Paris", "max_tokens": 1, "logprobs": 3}
    assert_same([ask(server, **body, **penalty)], [ask(server, **body)])


def penalised(network: PreTrainedModel, num_tokens: int, frequency: float, presence: float) -> list[int]:
    """Greedy, by the formula of OpenAI's reference, over what was generated."""
    token_ids = list(PROMPT)
    for _ in range(num_tokens):
        with torch.inference_mode():
            logits = network(torch.tensor([token_ids])).logits[0, -1]
        counts = torch.bincount(torch.tensor(token_ids[len(PROMPT) :], dtype=torch.int64), minlength=len(logits))
        token_ids.append(int((logits - frequency * counts - presence * (counts > 0)).argmax()))
    return token_ids[len(PROMPT) :]


@pytest.mark.parametrize(("frequency", "presence"), [(2.0, 0.0), (0.0, 2.0), (-2.0, 0.0), (1.0, -2.0)])
def test_penalties_follow_the_formula_token_by_token(
    server: Server, network: PreTrainedModel, id_of: dict[str, int], frequency: float, presence: float
) -> None:
    answer = ask(server, **GREEDY, prompt=PROMPT, max_tokens=24, frequency_penalty=frequency, presence_penalty=presence)
    assert ids(answer, id_of) == [penalised(network, 24, frequency, presence)]


@pytest.mark.parametrize("penalty", [1.5, 0.8])
def test_repetition_penalty_counts_prompt_and_output_as_transformers_does(
    server: Server, network: PreTrainedModel, id_of: dict[str, int], penalty: float
) -> None:
    how = GenerationConfig(max_new_tokens=24, do_sample=False, repetition_penalty=penalty)
    inputs = torch.tensor([PROMPT])
    right = network.generate(inputs, attention_mask=torch.ones_like(inputs), generation_config=how)  # type: ignore[operator]
    answer = ask(server, **GREEDY, prompt=PROMPT, max_tokens=24, repetition_penalty=penalty)
    assert ids(answer, id_of) == [right[0, len(PROMPT) :].tolist()]


# --- floors and ends (G5, F1) ----------------------------------------------------------------------

STOP_ID = 65
ENDS: list[Json] = [
    {"logit_bias": {str(EOS_ID): 100}},
    {"logit_bias": {str(STOP_ID): 100}, "stop_token_ids": [STOP_ID]},
]


@pytest.mark.parametrize("end", ENDS, ids=["eos", "stop id"])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("floor", [0, 1, 2, 5])
def test_exactly_the_floor_comes_before_the_end(
    server: Server, id_of: dict[str, int], end: Json, floor: int, stream: bool
) -> None:
    end_id = STOP_ID if "stop_token_ids" in end else EOS_ID
    body: Json = {**end, "prompt": PROMPT[:50], "temperature": 0, "min_tokens": floor, "logprobs": 0, "stream": stream}
    for limit in (floor + 1, 20):
        answer = ask(server, **body, max_tokens=limit)
        [said] = ids(answer, id_of)
        assert (len(said), answer.num_output) == (floor + 1, floor + 1)
        assert (said.index(end_id), answer.only.finish_reason) == (floor, "stop")
    if floor:
        at_limit = ask(server, **body, max_tokens=floor)
        assert (at_limit.num_output, at_limit.only.finish_reason) == (floor, "length")


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_complete_below_the_floor_is_text(server: Server, stream: bool) -> None:
    body: Json = {**GREEDY, "prompt": "the cat", "max_tokens": 24, "stream": stream}
    whole = ask(server, **body)
    letters = [number for number, token in enumerate(whole.only.tokens) if token.isalnum()]
    first = letters[0]
    stop = whole.only.tokens[first]
    late = ask(server, **body, stop=[stop], min_tokens=first + 1)
    assert late.text.startswith("".join(whole.only.deltas)[: len(late.text)])
    assert late.num_output > first + 1
    early = ask(server, **body, stop=[stop], min_tokens=first)
    assert (early.num_output, early.only.finish_reason) == (first + 1, "stop")


def test_an_ignored_end_of_sequence_keeps_its_logit_and_its_text(server: Server, id_of: dict[str, int]) -> None:
    body: Json = {**GREEDY, "prompt": PROMPT, "max_tokens": 4, "logit_bias": {str(EOS_ID): 100}}
    for floor in (0, 3):
        answer = ask(server, **body, min_tokens=floor)
        assert ids(answer, id_of) == [[EOS_ID] * 4]
        assert (answer.text, answer.only.finish_reason) == ("hzhzhzhz", "length")
    mixed = ask(server, **body, stop_token_ids=[EOS_ID], min_tokens=2)
    assert ids(mixed, id_of)[0].index(EOS_ID) == 2


def test_a_floor_above_the_limit_is_refused(server: Server) -> None:
    for body in ({"prompt": "hi", "max_tokens": 5, "min_tokens": 6}, {"prompt": "hi", "min_tokens": 17}):
        assert refusal(server, body)["param"] == "min_tokens"


def test_an_empty_prompt_without_bos_is_refused(server: Server) -> None:
    empty: list[Json] = [{"prompt": ""}, {"prompt": []}, {"prompt": [[]]}, {"prompt": ["hi", ""]}]
    for body in empty:
        assert refusal(server, body)["param"] == "prompt"
    assert ask(server, **GREEDY, prompt="hi", max_tokens=3).num_output == 3
