"""What `pydantic-ai` makes of the server: a text, and a model's fields by schema and by a demanded call."""

import json
import sys
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the capital of France?"


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


if __name__ == "__main__":
    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))
    settings = {"temperature": 0, "max_tokens": 60}
    result = Agent(model, model_settings=settings).run_sync(QUESTION)
    by_schema = Agent(model, output_type=NativeOutput(City), model_settings=settings).run_sync(QUESTION)
    by_call = Agent(model, output_type=City, model_settings=settings).run_sync(QUESTION)
    seen = {
        "output": result.output,
        "output_tokens": result.usage.output_tokens,
        "by_schema": by_schema.output.model_dump(),
        "by_call": by_call.output.model_dump(),
    }
    json.dump(seen, sys.stdout)
