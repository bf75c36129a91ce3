"""What `langchain-openai` makes of the server: an answer, a stream, a batch."""

import json
import sys

from langchain_openai import ChatOpenAI

QUESTION = "What is the capital of France?"

if __name__ == "__main__":
    model = ChatOpenAI(base_url=f"{sys.argv[1]}/v1", api_key="none", model="demo", temperature=0, max_retries=0)
    answer = model.invoke(QUESTION)
    seen = {
        "content": answer.content,
        "finish_reason": answer.response_metadata["finish_reason"],
        "output_tokens": answer.usage_metadata["output_tokens"],
        "streamed": "".join(chunk.content for chunk in model.stream(QUESTION)),
        "batched": [each.content for each in model.batch([QUESTION, QUESTION])],
    }
    json.dump(seen, sys.stdout)
