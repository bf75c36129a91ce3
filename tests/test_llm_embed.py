"""Vectors offline: those of Transformers, the same whatever else runs and however prompts are cut."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import AutoModel

from crossdock import LLM, EngineConfig

from .e2e.models import embedding_model

SHARED = "a text that begins like another one, for a good while, "
TEXTS = ["hello", "naïve 🙂", SHARED + "and ends", SHARED + "and goes on", "x"]
Vectors = list[tuple[float, ...]]


@pytest.fixture(scope="module", params=["lasttoken", "mean"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedding_model(tmp_path_factory.mktemp("model") / request.param, request.param, request.param == "mean")


def made_by(model: Path, texts: Sequence[str] = TEXTS, chunk_tokens: int = 512) -> Vectors:
    """All of them in one batch."""
    llm = LLM(str(model), EngineConfig(num_threads=1, num_blocks=40, chunk_tokens=chunk_tokens))
    return [output.vector for output in llm.embed(texts, show_progress=False)]


def reference(model: Path) -> Vectors:
    """What sentence-transformers do: the last hidden state, pooled, of length 1 if the model says so."""
    network = AutoModel.from_pretrained(model, dtype=torch.float32)
    is_mean = model.name == "mean"
    llm = LLM(str(model), EngineConfig(num_threads=1, num_blocks=40))
    found = []
    for output in llm.embed(TEXTS, show_progress=False):
        with torch.inference_mode():
            states = network(torch.tensor([output.prompt_token_ids])).last_hidden_state[0]
        vector = states.mean(0) if is_mean else states[-1]
        found.append(tuple((vector / vector.norm() if is_mean else vector).tolist()))
    return found


def assert_same(found: Vectors, expected: Vectors) -> None:
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), atol=2e-5, rtol=1e-4)


def test_vectors_are_those_of_transformers(model: Path) -> None:
    expected = reference(model)
    assert_same(made_by(model), expected)
    assert_same(made_by(model, chunk_tokens=16), expected)
    assert_same([made_by(model, [text])[0] for text in TEXTS[:2]], expected[:2])


def test_a_shared_prefix_is_reused_where_only_the_last_position_counts(model: Path) -> None:
    llm = LLM(str(model), EngineConfig(num_threads=1, num_blocks=40))
    first = llm.embed([SHARED + "and ends"], show_progress=False)[0]
    second = llm.embed([SHARED + "and goes on"], show_progress=False)[0]
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 0 if model.name == "mean" else 48)
    assert_same([second.vector], made_by(model, [SHARED + "and goes on"]))
    books = llm.books
    assert (books.leased, books.free + books.cached) == (0, 40)


def test_a_prompt_ends_as_the_tokenizer_says(model: Path) -> None:
    llm = LLM(str(model), EngineConfig(num_threads=1, num_blocks=40))
    by_text, by_ids = llm.embed(["hi"]), llm.embed([llm.embed("hi")[0].prompt_token_ids])
    assert by_text[0].prompt_token_ids[-1] == 258
    assert by_text[0].vector == by_ids[0].vector


def test_what_the_server_would_refuse_is_a_value_error(model: Path) -> None:
    llm = LLM(str(model), EngineConfig(num_threads=1, num_blocks=40))
    assert len(llm.embed("hi", num_dimensions=16)[0].vector) == 16
    with pytest.raises(ValueError, match="Invalid 'dimensions': 17"):
        llm.embed("hi", num_dimensions=17)
    with pytest.raises(ValueError, match="it is empty"):
        llm.embed([[]])
