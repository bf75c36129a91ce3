"""Tools in requests: what is taken, how models are told of them, and which spelling of calls they have."""

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from crossdock.core.config import ChatConfig
from crossdock.router.detokenizer import UnsupportedTokenizer
from crossdock.router.openai_api import ChatCompletionRequest
from crossdock.router.openai_errors import ApiError, of_validation
from crossdock.router.output import Choice
from crossdock.router.parsing.deltas import ParsedText, whole_calls
from crossdock.router.parsing.families import UnknownFamily
from crossdock.router.prepare import Limits, prepare_chat
from crossdock.router.text import TextModel, load_text
from crossdock.router.tokenizer import TokenizerParts

from .chat_templates import DEEPSEEK, LLAMA, MISTRAL, MISTRAL_ARGS, PLAIN, QWEN, QWEN_THINKING, UNREADABLE

Json = dict[str, Any]

AUTO = ChatConfig()
MARKERS = ["<|python_tag|>", "[TOOL_CALLS]", "[ARGS]"]
LIMITS = Limits("toy", max_model_len=4000, vocab_size=300, max_choices=16)


def tokenizer() -> Tokenizer:
    """Its tokens are the 256 bytes, an end, and some markers."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(BPE({letter: i for i, letter in enumerate(letters)}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token) for token in ["</s>", *MARKERS]])
    return made


@functools.cache
def model(template: str | None = QWEN, chat: ChatConfig = AUTO) -> TextModel:
    return TextModel.of(TokenizerParts(tokenizer(), {"eos_token": "</s>"}, frozenset({256}), template), chat=chat)


WEATHER: Json = {
    "name": "weather",
    "description": "How it is outside",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS: Json = {"tools": [{"type": "function", "function": WEATHER}, {"type": "function", "function": {"name": "now"}}]}
NOW: Json = {"name": "now", "parameters": {"type": "object", "properties": {}}}
HELLO: list[Json] = [{"role": "user", "content": "hi"}]
NAMED: Json = {"type": "function", "function": {"name": "now"}}


def choice(text: TextModel | None = None, **fields: Any) -> Choice:
    body = ChatCompletionRequest.model_validate({"messages": HELLO, **fields})
    return prepare_chat(body, text or model(), LIMITS, itertools.count(7).__next__).choices[0]


def prompt(text: TextModel | None = None, **fields: Any) -> str:
    return choice(text, **fields).prompt.text


def read(text: str, model: TextModel | None = None, **fields: Any) -> ParsedText:
    parser = choice(model, **fields).syntax.parser()
    return parser.feed(text) + parser.flush()


def called(parsed: ParsedText) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in whole_calls(parsed.calls)]


# --- what is taken --------------------------------------------------------------------------------


def tool(**function: Any) -> Json:
    return {"tools": [{"type": "function", "function": function}]}


ALLOWING_NONE = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}}
ALLOWED = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [NAMED]}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (tool(), "tools.0.function.name"),
        (tool(name="two words"), "tools.0.function.name"),
        (tool(name="x" * 65), "tools.0.function.name"),
        (tool(name=""), "tools.0.function.name"),
        (tool(name="f", parameters=[]), "tools.0.function.parameters"),
        (tool(name="f", parameters={"type": "string"}), "tools.0.function.parameters"),
        (tool(name="f", strict="yes"), "tools.0.function.strict"),
        (tool(name="f", wisdom=1), "tools.0.function.wisdom"),
        ({"tools": [{"type": "code_interpreter"}]}, "tools.0.type"),
        ({"tools": TOOLS["tools"] * 2}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": f"f{n}"}} for n in range(129)]}, "tools"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        ({"parallel_tool_calls": True}, "parallel_tool_calls"),
        ({**TOOLS, "tool_choice": "perhaps"}, "tool_choice"),
        ({**TOOLS, "tool_choice": {"type": "function", "function": {"name": "missing"}}}, "tool_choice"),
        (
            {**TOOLS, "tool_choice": {**ALLOWED, "allowed_tools": {"mode": "auto", "tools": []}}},
            "tool_choice.allowed_tools.tools",
        ),
        ({"functions": [WEATHER]}, "functions"),
        ({"function_call": "auto"}, "function_call"),
        ({**TOOLS, "tool_choice": {"type": "custom", "custom": {"name": "f"}}}, "tool_choice.type"),
        ({**TOOLS, "tool_choice": {"type": "function"}}, "tool_choice.function"),
        ({**TOOLS, "tool_choice": {**ALLOWED, "allowed_tools": {"mode": "no"}}}, "tool_choice.allowed_tools.mode"),
        ({"reasoning_effort": "much"}, "reasoning_effort"),
    ],
)
def test_bad_tools_are_refused_by_name(fields: Json, param: str) -> None:
    with pytest.raises(ValidationError) as caught:
        choice(**fields)
    error = of_validation(caught.value.errors())
    assert (error.status, error.param) == (400, param)


@pytest.mark.parametrize("fields", [{}, {"tools": []}, {"tools": None, "tool_choice": "none"}])
def test_a_chat_without_tools_is_plain(fields: Json) -> None:
    assert prompt(**fields) == "user:hi\nassistant:"
    text = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    assert read(text, **fields) == ParsedText(content=text)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"reasoning_effort": "low"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs"),
    ],
)
def test_what_the_template_does_not_know_is_refused_by_name(fields: Json, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        prompt(**fields)
    assert (caught.value.status, caught.value.param) == (400, param)


def test_a_template_gets_the_variables_it_knows() -> None:
    knowing = model("{{ reasoning_effort }}{{ mood }}")
    assert prompt(knowing, reasoning_effort="low", chat_template_kwargs={"mood": "!"}) == "low!"
    thinking = model(QWEN_THINKING)
    assert prompt(thinking, chat_template_kwargs={"enable_thinking": False}).endswith("<think>\n\n</think>\n\n")


# --- how a model is told --------------------------------------------------------------------------


def test_a_template_that_knows_tools_is_given_them_in_openais_form() -> None:
    offers = [json.dumps({"type": "function", "function": function}) for function in (WEATHER, NOW)]
    assert prompt(**TOOLS) == f"TOOLS {' '.join(offers)}\nuser:hi\nassistant:"
    assert prompt(**TOOLS, tool_choice="none") == "user:hi\nassistant:"


@pytest.mark.parametrize("template", [PLAIN, UNREADABLE])
def test_else_the_system_message_tells_of_them_in_the_spelling_that_is_read(template: str) -> None:
    told = prompt(model(template), **TOOLS)
    assert told.startswith("system:You can call functions.")
    assert '<tool_call>\n{"name": "<name of the function>", "arguments": <its arguments as a JSON object>}' in told
    assert all(f'"name":"{name}"' in told for name in ("weather", "now"))
    assert "TOOLS" not in told
    messages = [{"role": "system", "content": "Be brief."}, *HELLO]
    assert prompt(model(template), messages=messages, **TOOLS).startswith("system:Be brief.\n\nYou can call functions.")
    assert prompt(model(template), messages=[messages[0]]) == "system:Be brief.\nassistant:"


@pytest.mark.parametrize(
    "refusal", ["{% if messages[0].role == 'system' %}{{ raise_exception('no systems') }}{% endif %}", "{# dropped #}"]
)
def test_a_template_without_system_messages_has_the_user_tell_of_tools(refusal: str) -> None:
    users = "{% for m in messages if m.role == 'user' %}user:{{ m.content }}{% endfor %}"
    told = prompt(model(refusal + users), **TOOLS)
    assert told.startswith("user:hi\n\nYou can call functions.")
    assert told.count("user:") == 1


@pytest.mark.parametrize(
    ("written", "shown"),
    [
        ("'<' + call.function.arguments + '>'", '<{"city":  "Rome"}>'),
        ("call.function.arguments", '{"city":  "Rome"}'),
        ("call.function.arguments | tojson", '{"city": "Rome"}'),
        ("call.function.arguments.city", "Rome"),
        ("call.function.arguments is mapping", "True"),
        ("call.function.arguments is string", "False"),
    ],
)
def test_arguments_are_an_object_and_text(written: str, shown: str) -> None:
    template = f"{{% for call in messages[1].tool_calls or [] %}}{{{{ {written} }}}}{{% endfor %}}"
    call = {"function": {"name": "weather", "arguments": '{"city":  "Rome"}'}}
    assert prompt(model(template), messages=[*HELLO, {"role": "assistant", "tool_calls": [call]}]) == shown


CALLS = [
    {"id": f"call_{n}23456789", "type": "function", "function": {"name": "now", "arguments": "{}"}} for n in (1, 2)
]
RESULTS = [{"role": "tool", "tool_call_id": call["id"], "content": "noon"} for call in CALLS]


def test_a_template_without_a_place_for_calls_and_results_has_them_spelled() -> None:
    messages = [*HELLO, {"role": "assistant", "content": "Hm.", "tool_calls": CALLS}, *RESULTS]
    call = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    result = "<tool_response>\nnoon\n</tool_response>"
    told = f"user:hi\nassistant:Hm.\n{call}\n{call}\nuser:{result}\n{result}\nassistant:"
    assert prompt(model(PLAIN), messages=messages) == told


@pytest.mark.parametrize("content", [{"content": None}, {"content": ""}, {}])
def test_a_template_that_looks_for_missing_content_finds_it(content: Json) -> None:
    shown = "{{ m.content }}{% if m.content is none %}{{ m.tool_calls[0].id }}{% endif %}"
    template = f"{{% for m in messages %}}{shown}{{% endfor %}}"
    messages = [*HELLO, {"role": "assistant", "tool_calls": CALLS, **content}]
    assert prompt(model(template), messages=messages) == "hicall_123456789"


def test_ids_are_cut_for_a_template_that_wants_nine_characters() -> None:
    messages = [*HELLO, {"role": "assistant", "tool_calls": CALLS}, *RESULTS]
    assert '"id": "123456789"' in prompt(model(MISTRAL), messages=messages)


def test_a_template_from_a_file_wins(tmp_path: Path) -> None:
    file = tmp_path / "template.jinja"
    file.write_text("<{{ messages[0].content }}>")
    chat = ChatConfig(chat_template=str(file))
    assert prompt(model(QWEN, chat)) == "<hi>"
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    assert prompt(load_text(tmp_path, chat)) == "<hi>"
    with pytest.raises(UnsupportedTokenizer, match="cannot be read"):
        model(QWEN, ChatConfig(chat_template=str(tmp_path / "missing")))


# --- how its answers are read ----------------------------------------------------------------------

HERMES_CALL = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
LLAMA_CALL = '<|python_tag|>{"name": "now", "parameters": {}}'
MISTRAL_CALL = '[TOOL_CALLS] [{"name": "now", "arguments": {}}]'


@pytest.mark.parametrize(
    ("template", "answer", "shown"),
    [
        (QWEN, HERMES_CALL, []),
        (PLAIN, HERMES_CALL, []),
        (UNREADABLE, HERMES_CALL, []),
        (LLAMA, LLAMA_CALL, ["<|python_tag|>"]),
        (MISTRAL, MISTRAL_CALL, ["[TOOL_CALLS]", "[ARGS]"]),
        (MISTRAL_ARGS, "[TOOL_CALLS]now[ARGS]{}", ["[TOOL_CALLS]", "[ARGS]"]),
    ],
)
def test_the_chat_template_tells_whose_calls_they_are(template: str, answer: str, shown: list[str]) -> None:
    asked = choice(model(template), **TOOLS)
    parser = asked.syntax.parser()
    assert called(parser.feed(answer) + parser.flush()) == [("now", "{}")]
    assert asked.syntax.markers == {tokenizer().token_to_id(marker) for marker in shown}


def test_a_parser_can_be_chosen_by_name() -> None:
    chosen = model(PLAIN, ChatConfig(tool_parser="mistral"))
    assert called(read(MISTRAL_CALL, chosen, **TOOLS)) == [("now", "{}")]
    assert "[TOOL_CALLS] [" in prompt(chosen, **TOOLS)
    for chat in (ChatConfig(tool_parser="morse"), ChatConfig(reasoning_parser="morse")):
        with pytest.raises(UnknownFamily, match="no parser 'morse'; there are"):
            model(PLAIN, chat)


def test_only_functions_that_may_be_called_are_calls() -> None:
    assert called(read(HERMES_CALL, **TOOLS, tool_choice=ALLOWED)) == [("now", "{}")]
    weather = '<tool_call>{"name": "weather", "arguments": {}}</tool_call>'
    assert read(weather, **TOOLS, tool_choice=ALLOWED) == ParsedText(content=weather)
    assert "weather" in prompt(**TOOLS, tool_choice=ALLOWED)


def test_a_named_function_does_not_change_the_finish_reason() -> None:
    assert choice(**TOOLS).syntax.ends_in_calls
    assert not choice(**TOOLS, tool_choice=NAMED).syntax.ends_in_calls


THOUGHT = "Hm.\n</think>\n\nParis."


def test_reasoning_is_told_apart_for_models_that_think() -> None:
    assert read(f"<think>\n{THOUGHT}", model(QWEN_THINKING)) == ParsedText("Hm.", "Paris.")
    assert read(THOUGHT, model(DEEPSEEK)) == ParsedText("Hm.", "Paris.")
    assert read(THOUGHT, model(QWEN_THINKING)) == ParsedText(content=THOUGHT)
    assert read(f"<think>\n{THOUGHT}", model(QWEN)) == ParsedText(content=f"<think>\n{THOUGHT}")
    assert called(read(f"Hm.</think>{HERMES_CALL}", model(DEEPSEEK), **TOOLS)) == [("now", "{}")]


def test_reasoning_can_be_left_in_the_text_or_read_by_name() -> None:
    assert read(THOUGHT, model(DEEPSEEK, ChatConfig(reasoning_parser="none"))) == ParsedText(content=THOUGHT)
    chosen = model(QWEN, ChatConfig(reasoning_parser="think"))
    assert read(f"<think>{THOUGHT}", chosen) == ParsedText("Hm.", "Paris.")


def test_a_continued_message_may_be_in_the_middle_of_a_thought() -> None:
    thinking = model(QWEN_THINKING)
    begun = {"messages": [*HELLO, {"role": "assistant", "content": "<think>\nLet"}], "continue_final_message": True}
    assert read(" me see.</think>Paris.", thinking, **begun) == ParsedText("me see.", "Paris.")
    mark = [{"role": "user", "content": "what is <think>"}]
    assert read("A mark.", thinking, messages=mark) == ParsedText(content="A mark.")
