"""A model that yields no numbers for one request: that one ends with an error, and nobody else notices."""

import shutil
from math import nan
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from .answers import Json, ask, ask_all
from .conftest import Serve

POISON = 300
"""Its embedding is NaN, and so is all that attends to it."""


@pytest.fixture
def broken_model(small_model: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "broken"
    shutil.copytree(small_model, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_request_without_numbers_fails_closed_beside_one_that_has_them(broken_model: Path, serve: Serve) -> None:
    server = serve(broken_model)
    sound: Json = {
        "prompt": list(range(20, 60)),
        "n": 2,
        "max_tokens": 40,
        "seed": 1,
        "logit_bias": {str(POISON): -100},
    }
    alone = ask(server, **sound)
    for fields in ({"temperature": 0}, {"temperature": 1.0, "n": 2}, {"temperature": 0, "stream": True}):
        poisoned: Json = {"prompt": [*range(30), POISON], "max_tokens": 4, **fields}
        response = server.client.post("/v1/completions", json=poisoned)
        assert (response.status_code, "not a number" in response.text) == (503, True)
    assert [choice.text for answer in ask_all(server, [sound] * 4) for choice in answer.choices] == [
        choice.text for choice in alone.choices
    ] * 4
    server.settled()
