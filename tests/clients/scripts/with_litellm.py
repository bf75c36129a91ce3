"""What the `litellm` SDK makes of the server: a chat, a stream, a completion, a schema, a demanded call, a refusal."""

import json
import sys
from typing import Literal

import litellm
from pydantic import BaseModel

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]

CITY = {"type": "object", "properties": {"city": {"enum": ["Paris", "Rome"]}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY}}


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


if __name__ == "__main__":
    litellm.suppress_debug_info = True  # it would print advice among what was seen
    server = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none", "num_retries": 0}
    answer = litellm.completion(model="openai/demo", messages=MESSAGES, temperature=0, **server)
    chunks = litellm.completion(model="openai/demo", messages=MESSAGES, temperature=0, stream=True, **server)
    completion = litellm.text_completion(
        model="text-completion-openai/demo", prompt="The capital of France is", max_tokens=2, temperature=0, **server
    )
    made = litellm.completion(model="openai/demo", messages=MESSAGES, temperature=0, response_format=City, **server)
    called = litellm.completion(
        model="openai/demo",
        messages=[{"role": "user", "content": "How is the weather in Rome?"}],
        temperature=0,
        tools=[WEATHER],
        tool_choice="required",
        parallel_tool_calls=False,
        **server,
    )
    try:
        litellm.completion(model="openai/other", messages=MESSAGES, **server)
        refusal = None
    except litellm.NotFoundError as error:
        refusal = error.status_code
    seen = {
        "content": answer.choices[0].message.content,
        "usage": [answer.usage.completion_tokens, answer.usage.total_tokens - answer.usage.prompt_tokens],
        "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
        "completion": completion.choices[0].text,
        "schema": json.loads(made.choices[0].message.content),
        "calls": [[c.function.name, c.function.arguments] for c in called.choices[0].message.tool_calls],
        "refusal": refusal,
    }
    json.dump(seen, sys.stdout)
