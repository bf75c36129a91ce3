"""What `openai` makes of the server: chat, completions, streams, logprobs, choices, a call, a schema, errors."""

import json
import sys
from typing import Literal

from openai import BadRequestError, NotFoundError, OpenAI, pydantic_function_tool
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

FRANCE: list[ChatCompletionMessageParam] = [{"role": "user", "content": "What is the capital of France?"}]


def chat(client: OpenAI) -> dict[str, object]:
    whole = client.chat.completions.create(model="demo", messages=FRANCE, temperature=0, logprobs=True, top_logprobs=2)
    stream = client.chat.completions.create(
        model="demo", messages=FRANCE, temperature=0, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    [choice] = whole.choices
    assert choice.logprobs is not None
    return {
        "content": choice.message.content,
        "finish_reason": choice.finish_reason,
        "logprob_tokens": [entry.token for entry in choice.logprobs.content or []],
        "num_top_logprobs": sorted({len(entry.top_logprobs) for entry in choice.logprobs.content or []}),
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices),
        "usages": [chunk.usage.completion_tokens for chunk in chunks if chunk.usage],
    }


def completions(client: OpenAI) -> dict[str, object]:
    asking = {"model": "demo", "prompt": "The capital of France is", "max_tokens": 3}
    greedy = client.completions.create(**asking, temperature=0, n=3)  # type: ignore[call-overload]
    drawn = [client.completions.create(**asking, n=2, seed=5) for _ in range(2)]  # type: ignore[call-overload]
    return {
        "greedy": [(choice.index, choice.text) for choice in greedy.choices],
        "usage": [greedy.usage.prompt_tokens, greedy.usage.completion_tokens],
        "is_seed_kept": [c.text for c in drawn[0].choices] == [c.text for c in drawn[1].choices],
    }


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


class Weather(BaseModel):
    city: Literal["Paris", "Rome"]


def structured(client: OpenAI) -> dict[str, object]:
    made = client.chat.completions.parse(model="demo", messages=FRANCE, temperature=0, response_format=City)
    called = client.chat.completions.parse(
        model="demo",
        messages=[{"role": "user", "content": "How is the weather in Rome?"}],
        temperature=0,
        tools=[pydantic_function_tool(Weather)],
        tool_choice="required",
        parallel_tool_calls=False,
    )
    return {
        "parsed": made.choices[0].message.parsed,
        "calls": [call.function.parsed_arguments for call in called.choices[0].message.tool_calls or []],
        "finish_reason": called.choices[0].finish_reason,
    }


def refusals(client: OpenAI) -> dict[str, object]:
    seen: dict[str, object] = {}
    try:
        client.chat.completions.create(model="other", messages=FRANCE)
    except NotFoundError as error:
        seen["other model"] = error.code
    try:
        client.chat.completions.create(model="demo", messages=FRANCE, extra_body={"temprature": 0})
    except BadRequestError as error:
        seen["unknown field"] = error.param
    return seen


if __name__ == "__main__":
    with OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", max_retries=0, timeout=60) as client:
        seen = {
            "models": [model.id for model in client.models.list()],
            "chat": chat(client),
            "completions": completions(client),
            "structured": structured(client),
            "refusals": refusals(client),
        }
    json.dump(seen, sys.stdout, default=BaseModel.model_dump)
