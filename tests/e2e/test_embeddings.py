"""Vectors over HTTP, in both modes, through OpenAI's client: those of Transformers."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from openai import BadRequestError, OpenAI
from transformers import AutoModel

from crossdock.router.text import load_text

from .models import embedding_model
from .server import Server, serving

TEXTS = ["hello", "naïve 🙂", "a longer text, " * 8, "x"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_model(tmp_path_factory.mktemp("embedding") / "model", "mean")


@pytest.fixture(scope="module", params=[(), ("--mixed", "1")], ids=["1P1D", "mixed"])
def server(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("logs") / "log"
    with serving(model, log, "--chunk-tokens", "32", "--served-model-name", "vectors", *request.param) as server:
        yield server


def test_vectors_are_those_of_transformers_and_nothing_is_shipped(server: Server, model: Path) -> None:
    text, network = load_text(model), AutoModel.from_pretrained(model, dtype=torch.float32)
    with torch.inference_mode():
        means = [network(torch.tensor([text.encode(t).ids])).last_hidden_state[0].mean(0) for t in TEXTS]
    expected = torch.stack([mean / mean.norm() for mean in means])
    with OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        whole = client.embeddings.create(model="vectors", input=TEXTS)
        plain = client.embeddings.create(model="vectors", input=TEXTS[0], encoding_format="float")
        cut = client.embeddings.create(model="vectors", input=TEXTS[0], dimensions=16)
        with pytest.raises(BadRequestError, match="Invalid 'dimensions': 5"):
            client.embeddings.create(model="vectors", input=TEXTS[0], dimensions=5)
    found = torch.tensor([entry.embedding for entry in whole.data])
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(torch.tensor(plain.data[0].embedding), expected[0], atol=2e-5, rtol=1e-4)
    half = means[0][:16] / means[0][:16].norm()
    torch.testing.assert_close(torch.tensor(cut.data[0].embedding), half, atol=2e-5, rtol=1e-4)
    assert whole.usage.prompt_tokens == sum(len(text.encode(t).ids) for t in TEXTS)
    assert server.settled().worker("transfers_total") == 0
