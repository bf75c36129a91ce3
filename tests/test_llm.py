"""Offline batches: what the server would answer, in one call, and nothing left behind."""

import itertools
import os
import re
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from msgspec import convert
from msgspec.structs import replace
from transformers import AutoTokenizer

from crossdock import LLM, EngineConfig, SamplingParams
from crossdock.core.sequence import FinishReason
from crossdock.model.engine import Engine, Step
from crossdock.router.grammar import lark_grammar, regex_grammar

from .e2e.answers import ask
from .e2e.models import chat_model, reciting_model, variant
from .e2e.server import serving

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
DRAWN = SamplingParams(temperature=1.3, top_p=0.95, top_k=40, seed=11, max_tokens=12, n=3, logprobs=2)
PROMPTS = ["hello", "a longer prompt than the other one, by far", "hell"]
END = 258
"""``<|end|>`` in a reciter that has no pieces of more than a byte."""
CHATS: list[list[dict[str, object]]] = [
    [{"role": "user", "content": "say hello"}],
    [{"role": "system", "content": "naïve 🙂"}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}],
    [
        {"role": "user", "content": "call"},
        {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}]},
        {"role": "tool", "content": "2"},
    ],
]

TOOLS: list[dict[str, object]] = [{"type": "function", "function": {"name": "look"}}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def llm(model: Path) -> LLM:
    return LLM(str(model), EngineConfig(num_threads=1, num_blocks=64))


def texts(llm: LLM, prompts: str | Sequence[str] | Sequence[Sequence[int]], params: SamplingParams) -> list[str]:
    outputs = llm.generate(prompts, params, show_progress=False)
    return [output.outputs[0].text for output in outputs]


def assert_nothing_is_left(llm: LLM) -> None:
    books = llm.books
    assert (books.leased, books.quarantined, books.free + books.cached) == (0, 0, 64)


# --- answers ---------------------------------------------------------------------------------------


def test_a_prompt_is_a_text_or_ids_and_answers_come_in_the_order_of_prompts(llm: LLM) -> None:
    prompts = ["hello", "", "a longer prompt than the others, by far", "hello"]
    outputs = llm.generate(prompts, GREEDY, show_progress=False)
    assert [output.prompt for output in outputs] == prompts
    assert [output.outputs[0].finish_reason for output in outputs] == [FinishReason.LENGTH] * 4
    assert outputs[0].outputs == outputs[3].outputs != outputs[1].outputs
    ids = [list(output.prompt_token_ids) for output in outputs]
    assert texts(llm, ids, GREEDY) == [output.outputs[0].text for output in outputs]
    assert texts(llm, "hello", GREEDY) == texts(llm, ["hello"], GREEDY)
    assert llm.generate([], GREEDY) == []
    assert_nothing_is_left(llm)


def test_one_conversation_or_several(llm: LLM, model: Path) -> None:
    several = llm.chat(CHATS, GREEDY, show_progress=False)
    alone = [llm.chat(chat, GREEDY, show_progress=False) for chat in CHATS]
    assert [(output.outputs, output.prompt) for output in several] == [(a.outputs, a.prompt) for [a] in alone]
    tokenizer = AutoTokenizer.from_pretrained(model)
    messages = [{"role": "user", "content": "say hello"}]
    rendered = str(tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False))
    assert list(several[0].prompt_token_ids) == tokenizer(rendered, add_special_tokens=False).input_ids
    assert "[user]hi<|end|>" in several[1].prompt
    assert '[assistant](f {"x": 1})<|end|>[tool]2' in several[2].prompt


def test_the_model_is_told_of_tools_behind_the_one_bos(llm: LLM) -> None:
    [output] = llm.chat(CHATS[0], GREEDY, show_progress=False, tools=TOOLS)
    assert output.prompt.startswith("<s>[system]You can call functions.")
    assert '"name":"look"' in output.prompt
    assert output.prompt.count("<s>") == 1
    with pytest.raises(ValueError, match=r"tools\.0\.function"):
        llm.chat(CHATS[0], GREEDY, tools=[{"type": "function", "function": {}}])


def test_a_chat_template_from_a_file_replaces_the_models(model: Path, tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text("{{ bos_token }}{{ messages[0].content }}!")
    llm = LLM(str(model), EngineConfig(num_threads=1, num_blocks=8), str(template))
    assert llm.chat(CHATS[0], GREEDY, show_progress=False)[0].prompt == "<s>say hello!"


def test_n_choices_differ_and_are_the_same_again_with_the_same_seed(llm: LLM) -> None:
    [output] = llm.generate("hello", DRAWN, show_progress=False)
    assert [choice.index for choice in output.outputs] == [0, 1, 2]
    assert len({choice.text for choice in output.outputs}) == 3
    [again] = llm.generate("hello", DRAWN, show_progress=False)
    assert again.outputs == output.outputs
    unseeded = SamplingParams(temperature=1.3, max_tokens=12)
    assert texts(llm, "hello", unseeded) != texts(llm, "hello", unseeded)


def test_a_stop_string_over_token_borders_ends_the_answer_before_it(llm: LLM, tmp_path: Path) -> None:
    reciter = LLM(
        str(reciting_model(tmp_path / "recital", {"A": [b"on", b"e t", b"wo", b" th", b"ree"]})),
        EngineConfig(num_threads=1, num_blocks=8),
    )
    for stop, said, num_tokens in ((("two",), "one ", 3), (("zzz", "o t"), "one tw", 4), (("one",), "", 2)):
        [output] = reciter.generate("A", SamplingParams(temperature=0, stop=stop), show_progress=False)
        [answer] = output.outputs
        assert (answer.text, answer.finish_reason) == (said, FinishReason.STOP)
        assert len(answer.token_ids) == num_tokens
    [output] = reciter.generate("A", SamplingParams(temperature=0, stop=("zzz",)), show_progress=False)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("one two three", FinishReason.STOP)


def test_logprobs_come_one_a_token_and_of_the_prompt_too(llm: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    [output] = llm.generate("hello", params, show_progress=False)
    [answer] = output.outputs
    assert [len(entry.top) for entry in answer.logprobs] == [2, 2, 2]
    assert [entry.logprob for entry in answer.logprobs] == [entry.top[0].logprob for entry in answer.logprobs]
    assert [entry.text for entry in output.prompt_logprobs] == ["<s>", *"hello"]
    scored = llm.generate(
        [[*output.prompt_token_ids, *answer.token_ids]],
        SamplingParams(max_tokens=0, prompt_logprobs=0),
        show_progress=False,
    )[0]
    assert scored.outputs[0].token_ids == ()
    together = [*output.prompt_logprobs, *answer.logprobs]
    assert scored.prompt_logprobs[0].logprob is None
    for entry, again in zip(together[1:], scored.prompt_logprobs[1:], strict=True):
        assert entry.logprob == pytest.approx(again.logprob, abs=1e-4)


@pytest.mark.parametrize(
    ("generation_config", "is_end"),
    [
        ({"eos_token_id": [END, 1]}, True),
        ({"eos_token_id": END}, True),
        ({"eos_token_id": [END, 100_000, -1]}, True),
        ({"eos_token_id": 1}, False),
        (None, False),
    ],
)
def test_the_end_is_what_generation_config_says(
    generation_config: dict[str, object] | None, is_end: bool, tmp_path: Path
) -> None:
    recital = reciting_model(tmp_path / "recital", {"A": [b"h", b"i"]})
    llm = LLM(str(variant(recital, tmp_path / "variant", generation_config)), EngineConfig(num_threads=1, num_blocks=8))
    [output] = llm.generate("A", SamplingParams(temperature=0, max_tokens=5), show_progress=False)
    [answer] = output.outputs
    assert (answer.text, answer.finish_reason) == ("hi", FinishReason.STOP if is_end else FinishReason.LENGTH)
    assert answer.token_ids == (ord("h"), ord("i"), END, END, END)[: 3 if is_end else 5]


# --- the server ------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [(), ("--mixed", "1")], ids=["1P1D", "mixed"])
def test_the_server_gives_the_same_answers(llm: LLM, model: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    prompts = ["hello", "naïve 🙂", "x" * 100]
    fields: list[dict[str, object]] = [
        {"temperature": 0, "logprobs": 3},
        {"temperature": 1.5, "seed": 7, "n": 3, "logprobs": 0},
        {"temperature": 0.9, "top_p": 0.8, "min_p": 0.02, "seed": -5, "presence_penalty": 1.5, "logprobs": 1},
        {"top_k": 5, "seed": 2**63 - 1, "frequency_penalty": -0.5, "repetition_penalty": 1.3, "logprobs": 1},
        {"temperature": 0.7, "seed": 0, "logit_bias": {"65": 8.0}, "min_tokens": 3, "logprobs": 1},
    ]
    with serving(model, tmp_path / "server.log", *flags) as server:
        for wanted in fields:
            answer = ask(server, prompt=prompts, max_tokens=20, **wanted)
            assert shown(llm, prompts, wanted) == [
                (choice.text, choice.finish_reason, choice.tokens, choice.token_logprobs) for choice in answer.choices
            ]
        for chat, output in zip(CHATS, llm.chat(CHATS, GREEDY, show_progress=False), strict=True):
            answer = ask(server, messages=chat, temperature=0, max_tokens=12, ignore_eos=True)
            assert (answer.text, answer.num_prompt) == (output.outputs[0].text, len(output.prompt_token_ids))
        [output] = llm.chat(CHATS[0], GREEDY, show_progress=False, tools=TOOLS)
        answer = ask(server, messages=CHATS[0], tools=TOOLS, temperature=0, max_tokens=12, ignore_eos=True)
        assert (answer.text, answer.num_prompt) == (output.outputs[0].text, len(output.prompt_token_ids))


def shown(llm: LLM, prompts: list[str], wanted: dict[str, object]) -> list[tuple[str, str, list[str], list[object]]]:
    """Offline answers as the server would show them."""
    bias = {int(key): value for key, value in dict(wanted.get("logit_bias", {})).items()}  # type: ignore[call-overload]
    params = convert({**wanted, "logit_bias": bias, "max_tokens": 20}, SamplingParams)
    return [
        (
            choice.text,
            choice.finish_reason,
            [entry.text for entry in choice.logprobs],
            [pytest.approx(entry.logprob, abs=1e-3) for entry in choice.logprobs],
        )
        for output in llm.generate(prompts, params, show_progress=False)
        for choice in output.outputs
    ]


# --- refusals --------------------------------------------------------------------------------------

NOT_A_PROMPT: list[tuple[object, str]] = [
    ([[]], "the prompt is empty"),
    ([[323]], "token id 323 lies outside the vocabulary of 323 tokens"),
    ([[5], [-1]], "token id -1 lies outside"),
    ([[2**40]], "token id 1099511627776 lies outside"),
    (["fine", "\ud800"], "surrogates not allowed"),
    ([[5] * 1024], "1025 tokens (1024 in the prompt, 1 in the completion)"),
    ([[5] * 3000], "maximum context length is 1024 tokens"),
]
NOT_PARAMS: list[tuple[dict[str, object], str]] = [
    ({"n": 0}, "'n'"),
    ({"temperature": -1}, "'temperature'"),
    ({"temperature": float("nan")}, "'temperature'"),
    ({"temperature": "hot"}, "'temperature'"),
    ({"top_p": 1.5}, "'top_p'"),
    ({"stop": ("",)}, "'stop.0'"),
    ({"stop_token_ids": (323,)}, "'stop_token_ids'"),
    ({"logit_bias": {-1: 1.0}}, "'logit_bias'"),
    ({"logit_bias": {1: float("inf")}}, "'logit_bias'"),
    ({"logprobs": 21}, "'logprobs'"),
    ({"max_tokens": -1}, "'max_tokens'"),
    ({"n": 65}, "65 choices over 5 prompt tokens are asked for, the workers hold 64"),
    ({"max_tokens": 1024}, "1029 tokens (5 in the prompt, 1024 in the completion)"),
    ({"min_tokens": 6, "max_tokens": 5}, "'min_tokens'"),
    ({"min_tokens": 1, "stop_token_ids": tuple(range(323))}, "every token of the vocabulary is a stop token"),
]


@pytest.mark.parametrize(("prompts", "reason"), NOT_A_PROMPT)
def test_a_prompt_that_cannot_be_served_is_refused_before_any_work(
    llm: LLM, prompts: list[list[int]], reason: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        llm.generate(prompts)
    assert_nothing_is_left(llm)


@pytest.mark.parametrize(("said", "reason"), NOT_PARAMS)
def test_parameters_that_the_server_refuses_are_refused_here(llm: LLM, said: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        llm.generate("hell", SamplingParams(**said))  # type: ignore[arg-type]
    assert_nothing_is_left(llm)


def test_one_stop_string_is_not_taken_for_its_letters(llm: LLM) -> None:
    [whole] = texts(llm, "hello", GREEDY)
    absent = whole[::-1][:5]
    assert absent not in whole
    assert texts(llm, "hello", replace(GREEDY, stop=absent)) == [whole]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([[]], "Invalid 'messages'"),
        ([{"role": "user"}], "a message of role 'user' needs 'content'"),
        ([{"role": "wizard", "content": "x"}], "Invalid 'messages.0.role'"),
        ([{"role": "user", "content": 5}], "Invalid 'messages.0.content'"),
    ],
)
def test_messages_that_the_server_refuses_are_refused_here(
    llm: LLM, messages: list[dict[str, object]], reason: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        llm.chat(messages)


# --- what is left ----------------------------------------------------------------------------------


def test_the_bar_counts_answers(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["hello", "world"], replace(GREEDY, n=2))
    assert "requests: 100%" in capsys.readouterr().err.splitlines()[-1]
    llm.generate("hello", GREEDY, show_progress=False)
    assert capsys.readouterr().err == ""


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Shells have their jobs in the background ignore interrupts."""
    former = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, former)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_leaves_nothing_behind(llm: LLM) -> None:
    right = texts(llm, PROMPTS, GREEDY)
    for seconds in (0.05, 0.2, 0.5):
        timer = threading.Timer(seconds, os.kill, [os.getpid(), signal.SIGINT])
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS * 40, replace(GREEDY, max_tokens=500), show_progress=False)
        assert_nothing_is_left(llm)
        assert texts(llm, PROMPTS, GREEDY) == right


def test_a_fault_in_mid_work_leaves_nothing_behind(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    right = texts(llm, PROMPTS, GREEDY)
    finish, num_steps = Engine.finish, itertools.count()

    def failing(engine: Engine, step: Step, now: float) -> None:
        if next(num_steps) == 5:
            raise RuntimeError("out of memory")
        finish(engine, step, now)

    monkeypatch.setattr(Engine, "finish", failing)
    with pytest.raises(RuntimeError, match="out of memory"):
        llm.generate(PROMPTS, GREEDY, show_progress=False)
    assert_nothing_is_left(llm)
    assert texts(llm, PROMPTS, GREEDY) == right


def test_a_prefix_is_computed_once(llm: LLM) -> None:
    long = "the same beginning, again and again " * 4  # BOS and 148 letters
    params = replace(GREEDY, n=2)
    [first] = llm.generate(long + "one", params, show_progress=False)
    [second] = llm.generate(long + "two", params, show_progress=False)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 144)


# --- grammars ----------------------------------------------------------------------------------------


def test_an_answer_conforms_to_its_grammar_and_ends_with_it(llm: LLM) -> None:
    params = replace(DRAWN, grammar=regex_grammar("[a-z]{4}-(yes|no)"), logprobs=None)
    outputs = llm.generate(PROMPTS, params, show_progress=False)
    answers = [answer for output in outputs for answer in output.outputs]
    assert [answer.finish_reason for answer in answers] == [FinishReason.STOP] * 9
    assert all(re.fullmatch("[a-z]{4}-(yes|no)", answer.text) for answer in answers)
    assert_nothing_is_left(llm)


def test_a_bad_grammar_is_a_value_error_and_one_too_complex_ends_the_batch(llm: LLM) -> None:
    with pytest.raises(ValueError, match=r"'grammar'.*unclosed group"):
        llm.generate(PROMPTS, replace(GREEDY, grammar=regex_grammar("(")))
    right = texts(llm, PROMPTS, GREEDY)
    choices = "|".join(
        f'"a{first}{second}{third}"' for first, second, third in itertools.product("bcdefghijklmn", repeat=3)
    )
    with pytest.raises(RuntimeError, match="max is 2000"):
        llm.generate(PROMPTS, replace(GREEDY, grammar=lark_grammar(f"start: {choices}")), show_progress=False)
    assert_nothing_is_left(llm)
    assert texts(llm, PROMPTS, GREEDY) == right
