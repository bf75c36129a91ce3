"""What the `litellm` SDK makes of the server: a chat, a stream, a completion, a refusal."""

import json
import sys

import litellm

MESSAGES = [{"role": "user", "content": "What is the capital of France?"}]

if __name__ == "__main__":
    litellm.suppress_debug_info = True  # it would print advice among what was seen
    server = {"api_base": f"{sys.argv[1]}/v1", "api_key": "none", "num_retries": 0}
    answer = litellm.completion(model="openai/demo", messages=MESSAGES, temperature=0, **server)
    chunks = litellm.completion(model="openai/demo", messages=MESSAGES, temperature=0, stream=True, **server)
    completion = litellm.text_completion(
        model="text-completion-openai/demo", prompt="The capital of France is", max_tokens=2, temperature=0, **server
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
        "refusal": refusal,
    }
    json.dump(seen, sys.stdout)
