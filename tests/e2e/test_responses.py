"""`/v1/responses` on real processes, mixed and disaggregated, through OpenAI's own client."""

from collections.abc import Iterator
from typing import Any, Literal

import pytest
from openai import BadRequestError, NotFoundError, OpenAI
from openai.types.responses import Response
from pydantic import BaseModel, ConfigDict

from .models import chat_model
from .server import Server, serving

MODES = {"P/D": ("--prefill", "1", "--decode", "1"), "mixed": ("--mixed", "1")}


@pytest.fixture(scope="module", params=MODES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("responses")
    with serving(chat_model(folder), folder / "log", "--served-model-name", "small", *MODES[request.param]) as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(client: OpenAI, asked: Any, **more: Any) -> Response:
    answer = client.responses.create(input=asked, temperature=0, max_output_tokens=40, **more)
    assert isinstance(answer, Response)
    return answer


def test_a_stream_and_a_whole_answer_are_the_same_response(client: OpenAI) -> None:
    whole = ask(client, "tell me more")
    with client.responses.stream(model="small", input="tell me more", temperature=0, max_output_tokens=40) as stream:
        pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
    assert (whole.status, whole.usage and whole.usage.output_tokens) == ("incomplete", 40)
    assert "".join(pieces) == whole.output_text != ""


def test_a_conversation_reads_the_same_to_the_model_kept_or_sent_in_full(client: OpenAI, server: Server) -> None:
    first = ask(client, "one", instructions="be brief")
    second = ask(client, "two", previous_response_id=first.id)
    kept = ask(client, "three", previous_response_id=second.id)
    full = ask(client, [user("one"), *first.output, user("two"), *second.output, user("three")], store=False)
    assert kept.output_text == full.output_text != ""
    assert kept.usage is not None and full.usage is not None
    assert kept.usage.input_tokens == full.usage.input_tokens > 100
    assert full.usage.input_tokens_details.cached_tokens > kept.usage.input_tokens - 32
    left, right = (ask(client, word, previous_response_id=second.id) for word in ("left", "right"))
    assert left.output_text != right.output_text
    server.wait_until_nothing_is_left(10)


def test_a_kept_response_can_be_read_listed_and_deleted(client: OpenAI) -> None:
    first = ask(client, "one")
    second = ask(client, "two", previous_response_id=first.id)
    assert client.responses.retrieve(second.id).to_dict() == second.to_dict()
    items = list(client.responses.input_items.list(second.id, order="asc", limit=2))
    assert [item.to_dict()["content"][0]["text"] for item in items] == ["one", first.output_text, "two"]  # type: ignore[index]
    client.responses.delete(second.id)
    with pytest.raises(NotFoundError):
        client.responses.retrieve(second.id)
    with pytest.raises(BadRequestError, match="not found"):
        ask(client, "three", previous_response_id=second.id)


class Verdict(BaseModel):
    """Short, whatever a model that talks nonsense makes of it."""

    model_config = ConfigDict(extra="forbid")

    colour: Literal["red", "green"]
    is_ripe: bool


def test_an_answer_is_parsed_as_the_type_that_was_asked_for(client: OpenAI) -> None:
    answer = client.responses.parse(model="small", input="judge", text_format=Verdict, temperature=1)
    assert answer.status == "completed"
    assert isinstance(answer.output_parsed, Verdict)
    with client.responses.stream(model="small", input="judge", text_format=Verdict, temperature=1) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Verdict)


TOOL: Any = {"type": "function", "name": "pick", "parameters": Verdict.model_json_schema()}


def test_a_call_that_was_demanded_is_made_and_its_result_sent_back(client: OpenAI) -> None:
    with client.responses.stream(
        model="small", input="judge", tools=[TOOL], tool_choice="required", parallel_tool_calls=False
    ) as stream:
        pieces = [event.delta for event in stream if event.type == "response.function_call_arguments.delta"]
        answer = stream.get_final_response()
    [call] = answer.output
    assert call.type == "function_call"
    assert (call.name, call.arguments, call.status) == ("pick", "".join(pieces), "completed")
    Verdict.model_validate_json(call.arguments)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "picked"}
    kept = ask(client, [result], previous_response_id=answer.id, tools=[TOOL])
    full = ask(client, [user("judge"), call, result], tools=[TOOL])
    assert kept.usage is not None and full.usage is not None
    assert (kept.output_text, kept.usage.input_tokens) == (full.output_text, full.usage.input_tokens)


def test_a_client_that_leaves_a_stream_leaves_nothing_behind(client: OpenAI, server: Server) -> None:
    with client.responses.create(model="small", input="go on", max_output_tokens=1000, stream=True) as stream:
        begun = next(iter(stream))
    server.wait_until_nothing_is_left(10)
    assert begun.type == "response.created"
    with pytest.raises(NotFoundError):
        client.responses.retrieve(begun.response.id)
