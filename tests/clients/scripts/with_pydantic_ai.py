"""What `pydantic-ai` makes of the server: an agent without tools."""

import json
import sys

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

if __name__ == "__main__":
    model = OpenAIChatModel("demo", provider=OpenAIProvider(base_url=f"{sys.argv[1]}/v1", api_key="none"))
    result = Agent(model, model_settings={"temperature": 0}).run_sync("What is the capital of France?")
    json.dump({"output": result.output, "output_tokens": result.usage.output_tokens}, sys.stdout)
