"""What `langchain-openai` makes of the server: an answer, a stream, a batch, a schema, an agent with a tool."""

import json
import sys
from typing import Literal

from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware
from langchain_core.messages import ToolMessage
from langchain_core.tools import StructuredTool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel

QUESTION = "What is the capital of France?"


class City(BaseModel):
    name: Literal["Paris", "Rome"]
    is_capital: bool


class CallFirst(AgentMiddleware):  # type: ignore[misc]  # it has no types here
    """One call is demanded, then an answer: by itself so small a model would do neither."""

    def wrap_model_call(self, request, handler):  # type: ignore[no-untyped-def]
        is_called = any(isinstance(message, ToolMessage) for message in request.messages)
        return handler(request.override(tool_choice="none" if is_called else "any"))


def weather(city: Literal["Paris", "Rome"]) -> str:
    """The weather of a city."""
    return f"It is sunny in {city}."


def turns_of_an_agent(model: ChatOpenAI) -> list[object]:
    agent = create_agent(model, [StructuredTool.from_function(weather)], middleware=[CallFirst()])
    question = {"role": "user", "content": "How is the weather in Rome?"}
    told = agent.invoke({"messages": [question]})["messages"]
    calls = [[call["name"], call["args"]] for call in told[1].tool_calls]
    return [[turn.type for turn in told], calls, told[2].content, bool(told[3].content)]


if __name__ == "__main__":
    server = {"base_url": f"{sys.argv[1]}/v1", "api_key": "none", "model": "demo", "max_retries": 0}
    model = ChatOpenAI(temperature=0, max_completion_tokens=40, model_kwargs={"parallel_tool_calls": False}, **server)
    plain = ChatOpenAI(temperature=0, **server)
    answer = plain.invoke(QUESTION)
    seen = {
        "content": answer.content,
        "finish_reason": answer.response_metadata["finish_reason"],
        "output_tokens": answer.usage_metadata["output_tokens"],
        "streamed": "".join(chunk.content for chunk in plain.stream(QUESTION)),
        "batched": [each.content for each in plain.batch([QUESTION, QUESTION])],
        "structured": plain.with_structured_output(City, method="json_schema").invoke(QUESTION).model_dump(),
        "agent": turns_of_an_agent(model),
    }
    json.dump(seen, sys.stdout)
