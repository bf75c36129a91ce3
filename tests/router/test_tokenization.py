"""``/tokenize`` and ``/detokenize``: what a completion would be given, and back."""

from typing import TYPE_CHECKING

import httpx
import pytest

from crossdock.core.messages import Role

if TYPE_CHECKING:
    from crossdock.tests.router.conftest import Cluster

MESSAGES = [{"role": "user", "content": "hé"}]
RENDERED = "user: hé\n"


async def test_a_prompt_in_tokens_and_back(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(Role.MIXED)
    ids = cluster.text.encode("a é").ids
    found = await client.post("/tokenize", json={"model": "toy", "prompt": "a é", "return_token_strs": True})
    token_strs = ["a", "Ġ", "Ã", "©"]
    assert found.json() == {"count": 4, "max_model_len": 400, "tokens": ids, "token_strs": token_strs}
    back = await client.post("/detokenize", json={"tokens": ids})
    assert back.json() == {"prompt": "a é"}


async def test_messages_are_tokenised_as_the_chat_endpoint_counts_them(
    cluster: "Cluster", client: httpx.AsyncClient
) -> None:
    await cluster.add(Role.MIXED)
    found = (await client.post("/tokenize", json={"messages": MESSAGES})).json()
    assert cluster.text.decode(found["tokens"]) == RENDERED
    assert "token_strs" not in found
    answered = (await client.post("/v1/chat/completions", json={"messages": MESSAGES})).json()
    assert found["count"] == len(found["tokens"]) == answered["usage"]["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "prompt"),
        ("/tokenize", {"prompt": "x", "add_generation_prompt": True}, "add_generation_prompt"),
        (
            "/tokenize",
            {"messages": MESSAGES, "add_generation_prompt": True, "continue_final_message": True},
            "continue_final_message",
        ),
        ("/tokenize", {"messages": MESSAGES, "chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "stream": True}, "stream"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [257]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens.0"),
    ],
)
async def test_what_makes_no_sense_is_refused_by_name(
    cluster: "Cluster", client: httpx.AsyncClient, path: str, body: dict[str, object], param: str
) -> None:
    await cluster.add(Role.MIXED)
    refused = await client.post(path, json=body)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


async def test_a_lone_surrogate_is_refused(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(Role.MIXED)
    headers = {"content-type": "application/json"}
    refused = await client.post("/tokenize", content=b'{"prompt": "\\ud800"}', headers=headers)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "prompt")


async def test_an_unknown_model_and_a_fleet_without_workers(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    for path, body in (("/tokenize", {"prompt": "x"}), ("/detokenize", {"tokens": [1]})):
        assert (await client.post(path, json=body)).status_code == 503
        assert (await client.post(path, json={"model": "other", **body})).status_code == 404


async def test_no_tokens_are_no_text(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(Role.MIXED)
    assert (await client.post("/detokenize", json={"tokens": []})).json() == {"prompt": ""}
    assert (await client.post("/tokenize", json={"prompt": ""})).json()["count"] == 0
