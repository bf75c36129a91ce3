"""The door: what bodies are taken, refused and made of, and how refusals read."""

import functools
import itertools
import json
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from crossdock.core.request import SamplingParams
from crossdock.router.access.request_id import RequestIds
from crossdock.router.openai_api import ChatCompletionRequest, CompletionRequest
from crossdock.router.openai_errors import ApiError, exception_handlers
from crossdock.router.prepare import Limits, PreparedRequest, prepare_chat, prepare_completion
from crossdock.router.text import TextModel
from crossdock.router.tokenizer import GenerationDefaults, TokenizerParts
from crossdock.router.wire_format import ChatFormat, CompletionFormat

Json = dict[str, Any]

BOS, EOS, VOCAB_SIZE = 256, 257, 260
"""The tokenizer has 258 tokens, the model two rows more."""
LIMITS = Limits("toy", max_model_len=64, vocab_size=VOCAB_SIZE, max_choices=256)

NEUTRAL = GenerationDefaults()

PLAIN_TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content + '</s>' }}{% endfor %}"
    "{{ '[assistant]' if add_generation_prompt }}"
)
TOOL_TEMPLATE = (
    "{% for m in messages %}{{ '[' + m.role + ']' + m.content }}"
    "{% for call in m.tool_calls %}({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}"
    "{% endfor %}"
)
STRICT_TEMPLATE = "{% if messages[0].role != 'user' %}{{ raise_exception('start with the user') }}{% endif %}ok"


@functools.cache
def model(
    template: str | None = PLAIN_TEMPLATE, adds_bos: bool = False, defaults: GenerationDefaults = NEUTRAL
) -> TextModel:
    """Its tokens are the 256 bytes, ``<s>`` and ``</s>``."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", BOS)])
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return TextModel.of(TokenizerParts(tokenizer, special, frozenset({EOS}), template, defaults))


def chat(text: TextModel | None = None, **fields: Any) -> PreparedRequest:
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], **fields})
    return prepare_chat(body, text or model(), LIMITS, itertools.count(7).__next__)


def completion(text: TextModel | None = None, **fields: Any) -> PreparedRequest:
    body = CompletionRequest.model_validate({"prompt": "hi", **fields})
    return prepare_completion(body, text or model(), LIMITS, itertools.count(7).__next__)


def rendered(text: TextModel | None = None, **fields: Any) -> str:
    return chat(text, **fields).choices[0].prompt.text


def params(prepared: PreparedRequest) -> SamplingParams:
    return prepared.choices[0].params


@functools.cache
def client() -> TestClient:
    """The two endpoints as far as the door; what gets through is answered with its prompts' ids."""
    app = FastAPI(exception_handlers=exception_handlers)
    app.add_middleware(RequestIds)

    def ids(prepared: PreparedRequest) -> list[list[int]]:
        return [choice.prompt.token_ids for choice in prepared.choices]

    @app.post("/v1/chat/completions")
    async def take_chat(body: ChatCompletionRequest) -> list[list[int]]:
        return ids(prepare_chat(body, model(), LIMITS, lambda: 7))

    @app.post("/v1/completions")
    async def take_completion(body: CompletionRequest) -> list[list[int]]:
        return ids(prepare_completion(body, model(), LIMITS, lambda: 7))

    @app.get("/fault")
    async def fault() -> None:
        raise AssertionError("a secret of the inside")

    @app.get("/full")
    async def full() -> None:
        raise ApiError.overloaded("no pair of workers is ready", retry_after=2)

    return TestClient(app, raise_server_exceptions=False)


def refusal(endpoint: str, body: Json | bytes) -> Json:
    """The error object of a 400."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    response = client().post(f"/v1/{endpoint}", content=content, headers={"content-type": "application/json"})
    assert response.status_code == 400, response.text
    (error,) = response.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    return error  # type: ignore[no-any-return]


HELLO = {"messages": [{"role": "user", "content": "hi"}]}

# --- what is refused ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"logit_bias": {str(VOCAB_SIZE): 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 5}}, "logit_bias"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"٣": 5}}, "logit_bias"),
        ({"stop_token_ids": [VOCAB_SIZE + 10]}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"stop": {"a": 1}}, "stop"),
        ({"n": 0}, "n"),
        ({"n": 0, "stream": True}, "n"),
        ({"n": 129}, "n"),
        ({"temperature": -0.1}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"temperature": "1"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"top_k": 10**30}, "top_k"),
        ({"top_k": -2}, "top_k"),
        ({"min_p": -1}, "min_p"),
        ({"seed": 2**63}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"presence_penalty": 2.1}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"repetition_penalty": 1e300}, "repetition_penalty"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 6, "max_tokens": 5}, "min_tokens"),
        ({"max_tokens": 10**9}, None),
        ({"max_tokens": True}, "max_tokens"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"every": 1}}, "stream_options.every"),
        ({"frobnicate": 1}, "frobnicate"),
        ({"x-Y": None}, "x-Y"),
        ({"user": "\ud800"}, "user"),
        ({"\ud800": 1}, "?"),
        ({"model": 5}, "model"),
    ],
)
@pytest.mark.parametrize("endpoint", ["chat/completions", "completions"])
def test_a_bad_value_is_a_400_that_names_its_field(endpoint: str, fields: Json, param: str | None) -> None:
    is_chat = endpoint.startswith("chat")
    error = refusal(endpoint, {**(HELLO if is_chat else {"prompt": "hi"}), **fields})
    assert error["param"] == (param or ("messages" if is_chat else "prompt"))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [VOCAB_SIZE]}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": [[1], [10**12]]}, "prompt"),
        ({"prompt": [10**400]}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", ""]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": ["a", 5]}, "prompt.0"),
        ({"prompt": "\udfff"}, "prompt"),
        ({"prompt": ["a"] * 1025}, "prompt"),
        ({"prompt": ["a"] * 129, "n": 2}, "n"),
        ({"stop_token_ids": list(range(VOCAB_SIZE)), "min_tokens": 1}, "min_tokens"),
        ({"": 1}, ""),
        ({"prompt": "x" * 65}, "prompt"),
        ({"prompt": "x" * 60, "max_tokens": 5}, "prompt"),
        ({"logprobs": 6}, "logprobs"),
        ({"logprobs": True}, "logprobs"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"best_of": 0}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"messages": []}, "messages"),
    ],
)
def test_a_bad_completion_is_refused(fields: Json, param: str) -> None:
    assert refusal("completions", {"prompt": "hi", **fields})["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content"),
        ({"messages": [{"role": "assistant", "content": None}]}, "messages.0.content"),
        ({"messages": [{"role": "wizard", "content": "hi"}]}, "messages.0.role"),
        ({"messages": [{"role": "user", "content": "hi", "mood": 1}]}, "messages.0.mood"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type"),
        ({"messages": [{"role": "user", "content": "\ud83d"}]}, "messages"),
        ({"messages": [{"role": "user", "content": "x" * 60}]}, "messages"),
        ({"top_logprobs": 1_000_000, "logprobs": True}, "top_logprobs"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "max_tokens"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"functions": [{"name": "f"}]}, "functions"),
        ({"response_format": {"type": "nonsense"}}, "response_format.type"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "string"}}}},
            "response_format.json_schema.name",
        ),
        ({"audio": {"voice": "alloy"}}, "audio"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"store": True}, "store"),
        ({"prompt": "hi"}, "prompt"),
    ],
)
def test_a_bad_chat_is_refused(fields: Json, param: str) -> None:
    assert refusal("chat/completions", {**HELLO, **fields})["param"] == param


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"seed": ' + b"9" * 5000 + b"}"]
)
def test_a_body_that_is_no_object_is_a_400(body: bytes) -> None:
    refusal("completions", body)


def test_messages_of_errors_say_what_was_wrong_with_what() -> None:
    assert refusal("completions", {"prompt": "hi", "top_p": 2})["message"] == (
        "Invalid 'top_p': Input should be less than or equal to 1. Got 2."
    )
    unknown = refusal("chat/completions", {**HELLO, "best_off": 2})
    assert (unknown["message"], unknown["code"]) == ("Unknown parameter: 'best_off'.", "unknown_parameter")
    assert refusal("chat/completions", {})["message"] == "Missing required parameter: 'messages'."
    long = refusal("completions", {"prompt": "x" * 60, "max_tokens": 5})
    assert long["code"] == "context_length_exceeded"
    assert "64 tokens" in long["message"] and "65 tokens (60 in the prompt, 5 in the completion)" in long["message"]
    assert len(refusal("completions", {"prompt": "hi", "stop": [1] * 10_000})["message"]) < 300


def test_another_model_is_not_found() -> None:
    response = client().post("/v1/completions", json={"model": "gpt-9", "prompt": "hi"})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_other_errors_have_the_same_form() -> None:
    missing, fault, full = client().get("/nowhere"), client().get("/fault"), client().get("/full")
    assert missing.status_code == 404
    assert missing.json() == {
        "error": {"message": "Not Found", "type": "invalid_request_error", "param": None, "code": None}
    }
    assert (fault.status_code, fault.json()["error"]["type"]) == (500, "server_error")
    assert "secret" not in fault.text
    assert (full.status_code, full.headers["retry-after"], full.json()["error"]["code"]) == (503, "2", "overloaded")


def test_an_error_in_mid_stream_is_an_event() -> None:
    assert ApiError.internal("the worker died").event() == (
        b'data: {"error":{"message":"the worker died","type":"server_error","param":null,"code":null}}\n\n'
    )


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(sorted({*CompletionRequest.model_fields, *ChatCompletionRequest.model_fields, "tools", "x"}))


@settings(deadline=None)
@given(st.sampled_from(["chat/completions", "completions"]), st.dictionaries(names, json_values, max_size=3))
def test_whatever_a_field_holds_the_answer_is_a_result_or_a_400(endpoint: str, fields: Json) -> None:
    body = json.dumps({"prompt": "hi", **fields} if endpoint == "completions" else {**HELLO, **fields})
    response = client().post(f"/v1/{endpoint}", content=body, headers={"content-type": "application/json"})
    is_unknown_model = isinstance(fields.get("model"), str)
    assert response.status_code in ({400, 404} if is_unknown_model else {200, 400})


# --- prompts -----------------------------------------------------------------------------------


def test_a_prompt_is_a_text_ids_or_a_list_of_either() -> None:
    h, i = model().encode("hi").ids

    def prompts(prompt: object) -> list[list[int]]:
        return [choice.prompt.token_ids for choice in completion(prompt=prompt).choices]

    assert prompts("hi") == prompts([h, i]) == prompts(["hi"]) == prompts([[h, i]]) == [[h, i]]
    assert prompts(["hi", "i"]) == prompts([[h, i], [i]]) == [[h, i], [i]]
    assert prompts([VOCAB_SIZE - 1]) == [[VOCAB_SIZE - 1]]


def test_an_empty_text_is_served_where_the_tokenizer_adds_bos() -> None:
    assert completion(model(adds_bos=True), prompt="").choices[0].prompt.token_ids == [BOS]


def test_an_echo_of_a_text_is_the_text_and_of_ids_all_of_them() -> None:
    assert completion(model(adds_bos=True), prompt="hi</s>", echo=True).choices[0].prompt.text == "hi</s>"
    assert completion(prompt=[BOS, *model().encode("hi").ids], echo=True).choices[0].prompt.text == "<s>hi"


def test_a_chat_is_rendered_and_tokenised_without_a_second_bos() -> None:
    template = "{{ bos_token }}" + PLAIN_TEMPLATE
    prepared = chat(model(template, adds_bos=True))
    assert prepared.choices[0].prompt.text == "<s>[user]hi</s>[assistant]"
    assert prepared.choices[0].prompt.token_ids.count(BOS) == 1


def test_text_parts_are_joined_and_developers_are_systems_unless_the_template_knows_them() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "be brief"}, {"role": "user", "content": parts}]
    assert rendered(messages=messages) == "[system]be brief</s>[user]ab</s>[assistant]"
    assert rendered(model(PLAIN_TEMPLATE + "{# developer #}"), messages=messages).startswith("[developer]")


CALL = {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Köln"}'}}
SPELLED_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
@pytest.mark.parametrize(
    ("template", "shown"),
    [
        (TOOL_TEMPLATE, '(weather {"city": "Köln"})[tool]9 °C'),
        (PLAIN_TEMPLATE, SPELLED_CALL + "</s>[user]<tool_response>\n9 °C\n</tool_response></s>"),
    ],
)
def test_a_turn_of_tool_calls_without_content_is_kept(content: Json, template: str, shown: str) -> None:
    call = {"role": "assistant", "tool_calls": [CALL], **content}
    result = {"role": "tool", "tool_call_id": "c1", "content": "9 °C"}
    limits = Limits("toy", 1000, VOCAB_SIZE, 256)
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "?"}, call, result]})
    prompt = prepare_chat(body, model(template), limits, lambda: 7).choices[0].prompt.text
    assert f"[assistant]{shown}" in prompt
    assert "None" not in prompt and "null" not in prompt


def test_arguments_that_are_no_object_stay_as_the_model_wrote_them() -> None:
    broken = {**CALL, "function": {"name": "f", "arguments": '{"x": '}}
    messages = [{"role": "assistant", "tool_calls": [broken]}]
    assert rendered(model(TOOL_TEMPLATE), messages=messages) == '[assistant](f "{\\"x\\": ")'


def test_the_answers_of_this_server_can_be_sent_back() -> None:
    answer: Json = {
        "role": "assistant",
        "content": "ok",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "tool_calls": None,
    }
    assert rendered(messages=[{"role": "user", "content": "hi"}, answer]) == "[user]hi</s>[assistant]ok</s>[assistant]"


def test_a_final_message_is_continued_without_an_end_of_turn() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "OK!\n"}]
    assert rendered(messages=messages, continue_final_message=True) == "[user]hi</s>[assistant]OK!\n"
    assert rendered(messages=messages, add_generation_prompt=False).endswith("[assistant]OK!\n</s>")


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (None, [{"role": "user", "content": "hi"}], "no chat template"),
        (STRICT_TEMPLATE, [{"role": "system", "content": "hi"}], "start with the user"),
    ],
)
def test_what_the_template_refuses_is_a_400_in_its_words(
    template: str | None, messages: list[Json], reason: str
) -> None:
    with pytest.raises(ApiError, match=reason) as caught:
        chat(model(template), messages=messages)
    assert (caught.value.status, caught.value.param) == (400, "messages")


def test_template_variables_reach_the_template_whatever_their_names() -> None:
    assert rendered(model("{{ bos_token }}"), chat_template_kwargs={"bos_token": "<x>"}) == "<x>"
    assert rendered(model("{{ 'brief' if is_brief }}"), chat_template_kwargs={"is_brief": True}) == "brief"


# --- sampling parameters -----------------------------------------------------------------------


def test_what_is_left_open_is_openais_default() -> None:
    assert params(chat()) == SamplingParams(max_tokens=64 - 20, seed=7, stop_token_ids=(EOS,))
    assert params(completion()) == SamplingParams(max_tokens=16, seed=7, stop_token_ids=(EOS,))
    assert params(completion(prompt="x" * 60)).max_tokens == 4


def test_null_is_the_same_as_absent() -> None:
    nulls = dict.fromkeys(CompletionRequest.model_fields.keys() - {"prompt"})
    assert completion(**nulls) == completion()
    assert chat(**dict.fromkeys(ChatCompletionRequest.model_fields.keys() - {"messages"})) == chat()


def test_the_models_authors_may_set_defaults_and_the_client_overrides_them() -> None:
    advised = model(
        defaults=GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.1, repetition_penalty=1.1)
    )
    assert params(chat(advised)) == SamplingParams(
        max_tokens=44,
        seed=7,
        stop_token_ids=(EOS,),
        temperature=0.6,
        top_p=0.9,
        top_k=20,
        min_p=0.1,
        repetition_penalty=1.1,
    )
    overridden = params(chat(advised, temperature=0, top_p=1, top_k=-1, min_p=0, repetition_penalty=1.0))
    assert overridden == SamplingParams(max_tokens=44, seed=7, stop_token_ids=(EOS,), temperature=0.0)


def test_everything_a_client_says_arrives() -> None:
    fields: Json = {"temperature": 0.5, "top_p": 0.25, "top_k": 5, "min_p": 0.125, "seed": 3, "min_tokens": 2}
    fields |= {"presence_penalty": 0.5, "frequency_penalty": -0.5, "repetition_penalty": 2.0, "max_tokens": 9}
    prepared = chat(
        **fields, stop_token_ids=[4, 2, 4], logit_bias={"5": -1.5}, logprobs=True, top_logprobs=20, stop="x"
    )
    assert params(prepared) == SamplingParams(**fields, stop_token_ids=(2, 4, EOS), logit_bias={5: -1.5}, logprobs=20)
    assert prepared.choices[0].stop == ("x",)
    assert params(chat(max_completion_tokens=3)).max_tokens == 3
    assert params(chat(logprobs=True)).logprobs == 0
    assert params(chat(top_k=10**9)).top_k == VOCAB_SIZE


def test_top_p_of_zero_leaves_one_token() -> None:
    assert (params(chat(top_p=0)).top_p, params(chat(top_p=0)).top_k) == (1.0, 1)


def test_eos_ends_unless_it_is_ignored() -> None:
    ignoring = params(chat(ignore_eos=True, stop_token_ids=[4], min_tokens=2))
    assert (ignoring.stop_token_ids, ignoring.ignore_eos, ignoring.min_tokens) == ((4,), True, 2)


def test_scoring_a_prompt_asks_for_its_logprobs_and_no_token() -> None:
    scoring = params(completion(max_tokens=0, echo=True, logprobs=1))
    assert (scoring.max_tokens, scoring.logprobs, scoring.prompt_logprobs) == (0, 1, 1)
    assert params(completion(logprobs=1)).prompt_logprobs is None
    assert params(completion(echo=True)).prompt_logprobs is None


def test_choices_are_numbered_prompt_by_prompt_and_differ_in_their_seed() -> None:
    prepared = completion(prompt=["a", "b"], n=2, seed=-5, best_of=2)
    assert [choice.index for choice in prepared.choices] == [0, 1, 2, 3]
    first, second, third, fourth = prepared.choices
    assert first.prompt is second.prompt and third.prompt is fourth.prompt
    seeds = [choice.params.seed for choice in prepared.choices]
    assert seeds == [2**63 - 5, 0x1E3779B97F4A7C15 - 5, 2**63 - 5, 0x1E3779B97F4A7C15 - 5]
    drawn = {choice.params.seed for choice in completion(prompt=["a", "b"], n=128).choices}
    assert len(drawn) == 256 and all(seed is not None and 0 <= seed < 2**63 for seed in drawn)


def test_streams_and_formats_are_told_apart() -> None:
    plain, streamed = completion(), chat(stream=True, stream_options={"include_usage": True})
    assert (plain.format, plain.is_stream, plain.includes_usage) == (CompletionFormat, False, False)
    assert (streamed.format, streamed.is_stream, streamed.includes_usage) == (ChatFormat, True, True)
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}):
        assert not chat(stream=True, stream_options=options).includes_usage


def test_fields_without_any_effect_are_taken() -> None:
    fields: Json = {"user": "u", "safety_identifier": "s", "metadata": {"k": "v"}, "prompt_cache_key": "p"}
    assert chat(**fields, service_tier="auto", store=False, response_format={"type": "text"}, model="toy") == chat()
