"""The demo model on a prefill and a decode worker, as OpenAI's own client library sees it."""

import asyncio
from collections.abc import AsyncIterator, Iterator

import pytest
from openai import APIStatusError, AsyncOpenAI, BadRequestError, NotFoundError, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from openai.types.completion_choice import Logprobs

from crossdock.deploy.model_source import resolve
from crossdock.router.text import TextModel, load_text

from .server import Server, serving

FRANCE: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]
ANSWER = "The capital of France is Paris."
NUM_ANSWER_TOKENS = 8
"""Seven of text and the one that ends the turn."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serving("demo", tmp_path_factory.mktemp("logs") / "log") as server:
        yield server


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture
async def async_client(server: Server) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        yield client


@pytest.fixture(scope="module")
def text() -> TextModel:
    return load_text(resolve("demo").path)


# --- chats -----------------------------------------------------------------------------------------


def test_the_capital_of_france_is_paris(client: OpenAI) -> None:
    answer = client.chat.completions.create(model="demo", messages=FRANCE, temperature=0)
    [choice] = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", ANSWER, "stop")
    assert (answer.object, answer.model) == ("chat.completion", "demo")
    assert (answer.id[:9], (answer._request_id or "")[:4]) == ("chatcmpl-", "req_")
    assert answer.usage is not None
    assert (answer.usage.completion_tokens, answer.usage.total_tokens) == (8, answer.usage.prompt_tokens + 8)


@pytest.mark.parametrize("includes_usage", [False, True])
def test_a_stream_says_the_same(client: OpenAI, includes_usage: bool) -> None:
    stream = client.chat.completions.create(
        model="demo",
        messages=FRANCE,
        temperature=0,
        max_completion_tokens=50,
        stream=True,
        stream_options={"include_usage": includes_usage},
    )
    chunks = list(stream)
    with_choice = [chunk for chunk in chunks if chunk.choices]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in with_choice) == ANSWER
    assert with_choice[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].finish_reason for chunk in with_choice][-2:] == [None, "stop"]
    assert len(chunks) == len(with_choice) + includes_usage
    usages = [chunk.usage.completion_tokens for chunk in chunks if chunk.usage]
    assert usages == [NUM_ANSWER_TOKENS] * includes_usage


def test_the_streaming_helper_puts_the_answer_together(client: OpenAI) -> None:
    with client.chat.completions.stream(model="demo", messages=FRANCE, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        final = stream.get_final_completion()
    assert "".join(deltas) == final.choices[0].message.content == ANSWER


def test_logprobs_are_those_of_the_tokens_shown(client: OpenAI) -> None:
    asking = {"model": "demo", "messages": FRANCE, "temperature": 0, "logprobs": True, "top_logprobs": 3}
    whole = client.chat.completions.create(**asking)  # type: ignore[call-overload]
    content = whole.choices[0].logprobs.content
    assert b"".join(bytes(entry.bytes) for entry in content[:-1]).decode() == ANSWER
    assert len(content) == whole.usage.completion_tokens == NUM_ANSWER_TOKENS
    for entry in content:
        assert entry.top_logprobs[0].token == entry.token
        ranked = [top.logprob for top in entry.top_logprobs]
        assert ranked == sorted(ranked, reverse=True)
        assert -3 < ranked[0] == entry.logprob <= 0
    chunks = client.chat.completions.create(**asking, stream=True)  # type: ignore[call-overload]
    streamed = [entry for c in chunks if c.choices[0].logprobs for entry in c.choices[0].logprobs.content]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_a_conversation_goes_on(client: OpenAI) -> None:
    first = client.chat.completions.create(model="demo", messages=FRANCE, temperature=0)
    message = first.choices[0].message
    more: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": "You are brief."},
        *FRANCE,
        message.to_dict(),  # type: ignore[list-item]  # as it came, with all its fields
        {"role": "user", "content": [{"type": "text", "text": "And of Italy?"}]},
    ]
    second = client.chat.completions.create(model="demo", messages=more, temperature=0, max_completion_tokens=12)
    assert "Rome" in (second.choices[0].message.content or "")


def test_a_turn_seen_before_is_not_computed_again(client: OpenAI) -> None:
    long = "Repeat after me: " + "the rain in Spain stays mainly in the plain; " * 20
    messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": long}]

    def cached_share() -> tuple[int, int]:
        usage = client.chat.completions.create(model="demo", messages=messages, max_completion_tokens=2).usage
        assert usage is not None and usage.prompt_tokens_details is not None
        return usage.prompt_tokens_details.cached_tokens or 0, usage.prompt_tokens

    num_cached, num_prompt = cached_share()
    assert num_cached <= 16, "no more than how every chat begins"
    assert cached_share() == ((num_prompt - 1) // 16 * 16, num_prompt)


# --- sampling --------------------------------------------------------------------------------------


def test_n_choices_with_a_seed_are_the_same_again(client: OpenAI) -> None:
    def said(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model="demo",
            messages=[{"role": "user", "content": "Name a colour."}],
            n=3,
            seed=seed,
            temperature=1.5,
            max_completion_tokens=12,
            extra_body={"top_k": 50, "min_p": 0.01},
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        return [choice.message.content for choice in answer.choices]

    first = said(1)
    assert len(set(first)) == 3
    assert said(1) == first
    assert said(2) != first


def test_a_stop_string_over_token_borders_is_not_shown(client: OpenAI) -> None:
    for stop, said in (
        (["ce is"], "The capital of Fran"),
        ("l of F", "The capita"),
        (["nowhere", "Paris"], "The capital of France is "),
    ):
        answer = client.chat.completions.create(model="demo", messages=FRANCE, temperature=0, stop=stop)
        assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (said, "stop")
        stream = client.chat.completions.create(model="demo", messages=FRANCE, temperature=0, stop=stop, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == said


def _logprobs(logprobs: Logprobs | None) -> Logprobs:
    assert logprobs is not None
    return logprobs


# --- completions -----------------------------------------------------------------------------------


def test_completions_of_several_prompts(client: OpenAI) -> None:
    prompts = ["The capital of France is", "The capital of Italy is"]
    answer = client.completions.create(model="demo", prompt=prompts, temperature=0, max_tokens=1, logprobs=2)
    assert [choice.text for choice in answer.choices] == [" Paris", " Rome"]
    assert [len(tops) for choice in answer.choices for tops in _logprobs(choice.logprobs).top_logprobs or ()] == [2, 2]
    chunks = client.completions.create(model="demo", prompt=prompts, temperature=0, max_tokens=1, stream=True)
    assert sorted((chunk.choices[0].index, chunk.choices[0].text) for chunk in chunks) == [(0, " Paris"), (1, " Rome")]


@pytest.mark.parametrize(
    "prompt",
    ["삼겹살 삼겹살 삼겹살 삼겹살", "a naïve “q”, a naïve “q”, a naïve “q”", "a    b\n\n  x\na    b\n\n  x\na "],
)
def test_signs_and_blanks_arrive_as_the_tokenizer_decodes_them(client: OpenAI, text: TextModel, prompt: str) -> None:
    ids = text.encode(prompt).ids
    stream = client.completions.create(
        model="demo", prompt=prompt, temperature=0, max_tokens=40, stream=True, logprobs=0
    )
    choices = [chunk.choices[0] for chunk in stream]
    deltas = [choice.text for choice in choices]
    tokens = [token for choice in choices if choice.logprobs for token in choice.logprobs.tokens or ()]
    id_of = {text.token_text(token_id): token_id for token_id in range(text.tokenizer.get_vocab_size())}
    output = [id_of[token] for token in tokens]
    assert prompt + "".join(deltas) == text.tokenizer.decode([*ids, *output])
    assert not any("\ufffd" in delta for delta in deltas[:-1]), "only the limit may cut a character"


# --- errors and models -----------------------------------------------------------------------------


def test_errors_are_the_client_library_s_own(client: OpenAI) -> None:
    with pytest.raises(BadRequestError) as bad:
        client.chat.completions.create(model="demo", messages=FRANCE, temperature=3)
    assert (bad.value.param, bad.value.type, bad.value.status_code) == ("temperature", "invalid_request_error", 400)
    with pytest.raises(BadRequestError) as streamed:
        client.chat.completions.create(model="demo", messages=[], stream=True)
    assert streamed.value.param == "messages"
    with pytest.raises(BadRequestError) as long:
        client.completions.create(model="demo", prompt="word " * 9000, max_tokens=1)
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(NotFoundError) as unknown:
        client.chat.completions.create(model="gpt-9", messages=FRANCE)
    assert (unknown.value.param, unknown.value.code) == ("model", "model_not_found")
    with pytest.raises(NotFoundError):
        client.models.retrieve("gpt-9")
    with pytest.raises(APIStatusError) as embeddings:
        client.embeddings.create(model="demo", input="hi")
    assert embeddings.value.status_code == 400


def test_the_model_is_listed(client: OpenAI) -> None:
    [listed] = client.models.list()
    assert (listed.id, listed.object, listed.owned_by) == ("demo", "model", "crossdock")
    assert client.models.retrieve("demo") == listed


# --- many at once ----------------------------------------------------------------------------------


async def test_streams_and_answers_at_once_do_not_mix(async_client: AsyncOpenAI) -> None:
    async def whole(country: str) -> str:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"What is the capital of {country}?"}]
        answer = await async_client.chat.completions.create(
            model="demo", messages=messages, temperature=0, max_completion_tokens=12
        )
        return answer.choices[0].message.content or ""

    async def streamed(country: str) -> str:
        messages: list[ChatCompletionMessageParam] = [{"role": "user", "content": f"What is the capital of {country}?"}]
        stream = await async_client.chat.completions.create(
            model="demo", messages=messages, temperature=0, max_completion_tokens=12, stream=True
        )
        return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

    countries = ["France", "Italy", "Spain", "Japan"]
    alone = [await whole(country) for country in countries]
    assert alone[0] == ANSWER
    together = await asyncio.gather(*map(whole, countries), *map(streamed, countries))
    assert together == alone * 2


async def test_a_stream_may_be_left(async_client: AsyncOpenAI, server: Server) -> None:
    stream = await async_client.completions.create(
        model="demo", prompt="Once upon a time", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
    )
    async for _ in stream:
        break
    await stream.close()
    await asyncio.to_thread(server.wait_until_nothing_is_left, 10)
