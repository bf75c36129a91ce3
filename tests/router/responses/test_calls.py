"""Function calls and reasoning as items, over a whole router whose workers are played, through the real client."""

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from openai import AsyncOpenAI
from openai.types.responses import Response

from crossdock.core.config import ChatConfig
from crossdock.core.messages import Role
from crossdock.core.request import Request, unpack_ids
from crossdock.router.chat_syntax import chat_syntax
from crossdock.router.chat_template import ChatTemplate
from crossdock.router.parsing.families import thoughts_named
from crossdock.router.text import TextModel

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import Cluster

Json = dict[str, Any]
TEMPLATE = (
    "{# <tool_call> #}{% for tool in tools or [] %}<{{ tool.function.name }}>{% endfor %}"
    "{% for m in messages %}[{{ m.role }}]{{ m.reasoning_content }}|{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments.city }}){% endfor %}"
    "{% endfor %}"
)
WEATHER: Json = {
    "type": "function",
    "name": "weather",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    "strict": False,
}
THOUGHT = "<think>\nTwo cities.\n</think>\n\n"


def called(city: str) -> str:
    return f'<tool_call>\n{{"name": "weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>'


@pytest.fixture(scope="module")
def text(text: TextModel) -> TextModel:
    """The toy model as one that thinks and calls functions."""
    template = ChatTemplate(TEMPLATE, {})
    syntax = replace(chat_syntax(ChatConfig(), template, ()), thoughts=thoughts_named("think"))
    return replace(text, template=template, syntax=syntax)


def outline(response: Response) -> list[object]:
    """The items without their ids."""
    made: list[object] = []
    for item in response.output:
        match item.type:
            case "message":
                made.append([part.to_dict()["text"] for part in item.content])
            case "reasoning":
                made.append(("thought", [part.text for part in item.content or ()]))
            case "function_call":
                assert item.call_id.startswith("call_")
                made.append((item.name, item.arguments))
    return made


async def ask(openai: AsyncOpenAI, asked: Any, **more: Any) -> Response:
    answer = await openai.responses.create(model="toy", input=asked, **more)
    assert isinstance(answer, Response)
    return answer


KOELN, ROME = ("weather", '{"city": "Köln"}'), ("weather", '{"city": "Rome"}')
SAID = {
    "calls": (called("Köln") + "\n" + called("Rome"), [KOELN, ROME]),
    "thought and text": (f"{THOUGHT}Sunny.", [("thought", ["Two cities."]), ["Sunny."]]),
    "all": (f"{THOUGHT}I look.\n{called('Rome')}", [("thought", ["Two cities."]), ["I look."], ROME]),
}


@pytest.mark.parametrize(("said", "items"), SAID.values(), ids=SAID.keys())
async def test_a_stream_and_a_whole_answer_have_the_same_items(
    cluster: "Cluster", openai: AsyncOpenAI, said: str, items: list[object]
) -> None:
    await cluster.add(Role.PREFILL, Role.DECODE)
    cluster.says = said
    whole = await ask(openai, "how is it?", tools=[WEATHER])
    assert whole.status == "completed"
    assert outline(whole) == items
    async with openai.responses.stream(model="toy", input="how is it?", tools=[WEATHER]) as stream:  # type: ignore[list-item]
        done = [event.item.to_dict() async for event in stream if event.type == "response.output_item.done"]
        final = await stream.get_final_response()
    assert outline(final) == items
    kept = await openai.responses.retrieve(final.id)
    assert [item.to_dict() for item in kept.output] == done


async def test_usage_counts_the_tokens_of_reasoning(cluster: "Cluster", openai: AsyncOpenAI) -> None:
    await cluster.add(Role.MIXED)
    cluster.says = f"{THOUGHT}Sunny."
    usage = (await ask(openai, "how is it?")).usage
    assert usage is not None
    assert usage.output_tokens == len(cluster.says) + 1
    assert usage.output_tokens_details.reasoning_tokens == len("<think>\nTwo cities.")


async def test_results_of_calls_are_sent_back_by_id_alone_or_with_the_whole_conversation(
    cluster: "Cluster", openai: AsyncOpenAI
) -> None:
    await cluster.add(Role.PREFILL, Role.DECODE)
    cluster.says = f"{THOUGHT}{called('Rome')}"
    first = await ask(openai, "how is it?", tools=[WEATHER])
    call_id = next(item.call_id for item in first.output if item.type == "function_call")
    result = {"type": "function_call_output", "call_id": call_id, "output": "sunny"}
    prompts: set[str] = set()

    def script(request: Request) -> list[int]:
        prompts.add(cluster.text.decode(unpack_ids(request.prompt).tolist()))
        return cluster.script(request)

    for worker in cluster.workers:
        worker.behaviour.script = script
    cluster.says = "It is sunny."
    kept = await ask(openai, [result], previous_response_id=first.id, tools=[WEATHER])
    sent = await ask(openai, [{"role": "user", "content": "how is it?"}, *first.output, result], tools=[WEATHER])
    assert outline(kept) == outline(sent) == [["It is sunny."]]
    assert prompts == {"<weather>[user]|how is it?[assistant]Two cities.|(weather Rome)[tool]|sunny"}


async def test_a_call_that_was_cut_is_incomplete(cluster: "Cluster", openai: AsyncOpenAI) -> None:
    await cluster.add(Role.MIXED)
    cluster.says = called("Rome")
    response = await ask(openai, "how is it?", tools=[WEATHER], max_output_tokens=60, stream=False)
    (item,) = response.output
    assert item.type == "function_call"
    assert (response.status, item.status, item.name) == ("incomplete", "incomplete", "weather")
    assert '{"city": "Rome"}'.startswith(item.arguments)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=["required", "named"])
async def test_a_call_that_is_demanded_is_held_to_the_grammar_that_a_chat_has(
    cluster: "Cluster", client: httpx.AsyncClient, choice: Json | str
) -> None:
    (worker,) = await cluster.add(Role.MIXED)
    grammars: list[str] = []

    def script(request: Request) -> list[int]:
        grammars.append(request.params.grammar)
        return cluster.script(request)

    worker.behaviour.script = script
    cluster.says = called("Rome")
    asked: Json = {"input": "hi", "tools": [WEATHER], "tool_choice": choice}
    answer = (await client.post("/v1/responses", json=asked)).json()
    assert (answer["status"], [item["type"] for item in answer["output"]]) == ("completed", ["function_call"])
    function = {key: value for key, value in WEATHER.items() if key != "type"}
    chosen = {"type": "function", "function": {"name": "weather"}} if isinstance(choice, dict) else choice
    chat: Json = {"tools": [{"type": "function", "function": function}], "tool_choice": chosen}
    await client.post("/v1/chat/completions", json={**chat, "messages": [{"role": "user", "content": "hi"}]})
    assert grammars[0] == grammars[1] != ""


async def test_the_tools_of_a_request_are_told_back(cluster: "Cluster", openai: AsyncOpenAI) -> None:
    await cluster.add(Role.MIXED)
    chosen: Json = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "weather"}]}
    response = await ask(openai, "hi", tools=[WEATHER], tool_choice=chosen, parallel_tool_calls=False)
    told = response.to_dict()
    assert told["tools"] == [{**WEATHER, "description": None}]
    assert (told["tool_choice"], told["parallel_tool_calls"]) == (chosen, False)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"tools": [{**WEATHER, "name": "a b"}]}, "tools.0.name"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice"),
        ({"reasoning": {"effort": "huge"}}, "reasoning.effort"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_chats_refuse_is_refused_in_the_words_of_responses(
    cluster: "Cluster", client: httpx.AsyncClient, asked: Json, param: str
) -> None:
    await cluster.add(Role.MIXED)
    answer = await client.post("/v1/responses", json={"input": "hi", **asked})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param
    assert "messages" not in error["message"] and ".function." not in error["message"]
