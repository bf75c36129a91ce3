"""``/v1/embeddings`` at the router. Every vector is 3, 4 and the number of the prompt's tokens."""

import base64
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import httpx
import pytest

from crossdock.core.messages import Role
from crossdock.router.embedding import NoEmbedding

if TYPE_CHECKING:
    from .conftest import Cluster

Json = dict[str, object]


async def vectors(client: httpx.AsyncClient, **body: object) -> list[object]:
    answer = await client.post("/v1/embeddings", json=body)
    assert answer.status_code == 200, answer.text
    data = answer.json()["data"]
    assert [entry["index"] for entry in data] == list(range(len(data)))
    return [entry["embedding"] for entry in data]


@pytest.mark.parametrize(
    ("given", "sizes"),
    [("abc", [3]), (["abc", "é"], [3, 2]), ([65, 66], [2]), ([[65], [65, 66, 67]], [1, 3]), (["a", "a"], [1, 1])],
)
async def test_every_input_gets_its_vector(
    cluster: "Cluster", client: httpx.AsyncClient, given: object, sizes: Sequence[int]
) -> None:
    await cluster.add(Role.MIXED)
    assert await vectors(client, input=given) == [[3, 4, size] for size in sizes]
    assert cluster.is_empty()


async def test_the_answer_is_openai_s(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(Role.MIXED)
    answer = await client.post("/v1/embeddings", json={"model": "toy", "input": ["abc", "de"], "user": "somebody"})
    assert answer.json() == {
        "object": "list",
        "data": [
            {"object": "embedding", "index": 0, "embedding": [3, 4, 3]},
            {"object": "embedding", "index": 1, "embedding": [3, 4, 2]},
        ],
        "model": "toy",
        "usage": {"prompt_tokens": 5, "total_tokens": 5},
    }


async def test_base64_holds_the_same_numbers(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(Role.MIXED)
    [encoded] = await vectors(client, input="abc", encoding_format="base64", dimensions=2)
    assert isinstance(encoded, str)
    assert array("f", base64.b64decode(encoded)).tolist() == [3, 4]


async def test_a_decode_worker_has_no_part_in_it(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    prefill, decode = await cluster.add(Role.PREFILL, Role.DECODE)
    assert await vectors(client, input=["a", "b"]) == [[3, 4, 1]] * 2
    assert (prefill.num_tasks, decode.num_tasks, decode.num_sent) == (2, 0, 0)


async def test_another_worker_takes_over_from_one_that_dies(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    workers = await cluster.add(Role.MIXED, Role.MIXED)
    for worker in workers[:1]:
        worker.behaviour.dies_after = 0
    assert await vectors(client, input=["a", "b"]) == [[3, 4, 1]] * 2


@pytest.mark.parametrize(
    ("body", "field", "message"),
    [
        ({"input": ""}, "input", "Invalid 'input': it is empty, it has no tokens."),
        ({"input": []}, "input", "Invalid 'input': it is empty, it has no tokens."),
        ({"input": ["a", ""]}, "input", "Invalid 'input': it is empty, it has no tokens."),
        ({"input": [257]}, "input", "Invalid 'input': token id 257 lies outside the vocabulary of 257 tokens."),
        ({"input": [-1]}, "input", "Invalid 'input': token id -1 lies outside the vocabulary of 257 tokens."),
        ({"input": ["a"] * 65}, "input", "Invalid 'input': 65 inputs, the most is 64."),
        ({"input": ["a"] * 1025}, "input", "Invalid 'input': there are 1025, the most is 1024."),
        ({"input": "a", "dimensions": 3}, "dimensions", "Invalid 'dimensions': 3. This model's vectors can have 2."),
        ({"input": "a", "inputs": 1}, "inputs", "Unknown parameter: 'inputs'."),
        ({}, "input", "Missing required parameter: 'input'."),
        (
            {"input": "a" * 401},
            "input",
            "This model's maximum context length is 400 tokens. However, you requested 401 tokens in the input.",
        ),
    ],
)
async def test_what_cannot_be_served_is_refused_by_name(
    cluster: "Cluster", client: httpx.AsyncClient, body: Json, field: str, message: str
) -> None:
    [worker] = await cluster.add(Role.MIXED)
    answer = await client.post("/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["message"]) == (400, field, message)
    assert worker.num_tasks == 0


async def test_a_model_without_embeddings_says_why(cluster: "Cluster", client: httpx.AsyncClient) -> None:
    await cluster.add(Role.MIXED)
    cluster.router.text = replace(cluster.text, embedding=NoEmbedding("it pools by nothing known"))
    error = (await client.post("/v1/embeddings", json={"input": "a"})).json()["error"]
    assert error["param"] == "model"
    assert error["message"] == "The model 'toy' makes no embeddings: it pools by nothing known."
