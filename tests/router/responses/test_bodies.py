"""What a request for a response may say."""

import json
from typing import TYPE_CHECKING, Any

import httpx
import pytest

from crossdock.core.messages import Role

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import Cluster

Json = dict[str, Any]


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 3}, "input"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "background_options": {}}, "background_options"),
        ({"input": "x", "conversation": "conv_1"}, "conversation"),
        ({"input": "x", "context_management": [{"type": "compaction"}]}, "context_management"),
        ({"input": "x", "prompt": {"id": "pmpt_1"}}, "prompt"),
        ({"input": "x", "moderation": {"model": "m"}}, "moderation"),
        ({"input": "x", "max_tool_calls": 1}, "max_tool_calls"),
        ({"input": "x", "access_programs": {}}, "access_programs"),
        ({"input": "x", "image": {}}, "image"),
        ({"input": "x", "prompt_cache_options": {}}, "prompt_cache_options"),
        ({"input": "x", "prompt_cache_retention": "24h"}, "prompt_cache_retention"),
        ({"input": "x", "include": ["reasoning.encrypted_content"]}, "include"),
        ({"input": "x", "top_logprobs": 2}, "top_logprobs"),
        ({"input": "x", "top_logprobs": 21, "include": ["message.output_text.logprobs"]}, "top_logprobs"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "max_output_tokens": 1000}, "input"),
        ({"input": "x", "truncation": "middle"}, "truncation"),
        ({"input": "x", "text": {"verbosity": "low"}}, "text.verbosity"),
        ({"input": "x", "text": {"format": {"type": "xml"}}}, "text.format.type"),
        ({"input": "x", "text": {"format": {"type": "json_schema", "name": "a"}}}, "text.format.schema"),
        ({"input": "x", "reasoning": {"summary": "auto"}}, "reasoning.summary"),
        ({"input": "x", "reasoning": {"mode": "pro"}}, "reasoning.mode"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, "tools.0.type"),
        ({"input": "x", "tools": [{"type": "function"}]}, "tools.0.name"),
        ({"input": "x", "tools": [{"type": "function", "name": "f", "async": True}]}, "tools.0.async"),
        ({"input": "x", "tool_choice": {"type": "file_search"}}, "tool_choice.type"),
        ({"input": "x", "stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"input": "x", "stream": True, "stream_options": {"include_obfuscation": True}}, None),
        ({"input": "x", "metadata": {"k" * 65: "v"}}, None),
        ({"input": "x", "metadata": {"k": "v" * 513}}, "metadata.k"),
        ({"input": "x", "metadata": {str(n): "v" for n in range(17)}}, "metadata"),
        ({"input": "x", "service_tier": "flex"}, "service_tier"),
        ({"input": "x", "temperature": 3}, "temperature"),
        ({"input": "x", "foo": 1}, "foo"),
        ({"input": "\ud800"}, "input"),
    ],
    ids=lambda value: None if value is None or isinstance(value, str) else json.dumps(value)[:60],
)
async def test_what_cannot_be_done_is_refused_by_name(
    cluster: "Cluster", client: httpx.AsyncClient, body: Json, param: str | None
) -> None:
    (worker,) = await cluster.add(Role.MIXED)
    answer = await client.post("/v1/responses", content=json.dumps(body), headers={"content-type": "application/json"})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert param is None or error["param"] == param
    assert worker.num_tasks == 0


async def test_the_wrong_model_is_not_found(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(Role.MIXED)
    answer = await client.post("/v1/responses", json={"model": "other", "input": "x"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")


async def test_what_asks_for_nothing_is_taken(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(Role.MIXED)
    body = {
        "input": "x",
        "background": False,
        "conversation": None,
        "text": {"format": {"type": "text"}, "verbosity": "medium"},
        "reasoning": {"effort": None, "summary": None, "context": "auto"},
        "tools": [],
        "tool_choice": "auto",
        "parallel_tool_calls": False,
        "include": [],
        "truncation": "disabled",
        "service_tier": "auto",
        "prompt_cache_key": "k",
        "safety_identifier": "s",
        "top_logprobs": 0,
    }
    answer = await client.post("/v1/responses", json=body)
    assert answer.status_code == 200, answer.text
    made = answer.json()
    assert (made["prompt_cache_key"], made["safety_identifier"], made["service_tier"]) == ("k", "s", "default")
