"""What clients that speak the Responses API make of it: LangChain, LiteLLM and Pydantic AI."""

import json
import sys

import litellm
from langchain_openai import ChatOpenAI
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

QUESTION = "What is the capital of France?"
MORE = "Name it again."


def with_langchain(url: str) -> dict[str, object]:
    model = ChatOpenAI(base_url=url, api_key="none", model="demo", temperature=0, max_retries=0, use_responses_api=True)
    answer = model.invoke(QUESTION)
    again = model.invoke([("user", QUESTION), answer, ("user", MORE)])
    kept = model.invoke([("user", MORE)], previous_response_id=answer.response_metadata["id"])
    return {
        "text": answer.text,
        "output_tokens": answer.usage_metadata["output_tokens"],
        "streamed": "".join(chunk.text for chunk in model.stream(QUESTION)),
        "is_same_conversation": again.text == kept.text,
    }


def with_litellm(url: str) -> dict[str, object]:
    asked = {"model": "openai/demo", "api_base": url, "api_key": "none", "temperature": 0, "input": QUESTION}
    answer = litellm.responses(**asked)
    streamed = list(litellm.responses(**asked, stream=True))
    deltas = [event.delta for event in streamed if event.type == "response.output_text.delta"]
    return {"text": answer.output[0].content[0].text, "streamed": "".join(deltas), "last": streamed[-1].type}


def with_pydantic_ai(url: str) -> dict[str, object]:
    model = OpenAIResponsesModel("demo", provider=OpenAIProvider(base_url=url, api_key="none"))
    agent = Agent(model, model_settings={"temperature": 0})
    answer = agent.run_sync(QUESTION)
    again = agent.run_sync(MORE, message_history=answer.all_messages())
    return {"output": answer.output, "again": len(again.output) > 0}


CLIENTS = {"langchain": with_langchain, "litellm": with_litellm, "pydantic_ai": with_pydantic_ai}

if __name__ == "__main__":
    url = f"{sys.argv[1]}/v1"
    seen = {name: ask(url) for name, ask in CLIENTS.items()}
    json.dump(seen, sys.stdout)
