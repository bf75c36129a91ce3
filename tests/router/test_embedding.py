"""Which models embed, and how, as their files say."""

import json
from array import array
from pathlib import Path

import pytest

from crossdock.core.request import Pooling
from crossdock.router.embedding import EmbeddingModel, NoEmbedding, read_embedding

TRANSFORMER = {"path": "", "type": "sentence_transformers.models.Transformer"}
POOLING = {"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}
NORMALIZE = {"path": "2_Normalize", "type": "sentence_transformers.models.Normalize"}
DENSE = {"path": "2_Dense", "type": "sentence_transformers.models.Dense"}
LAST: dict[str, object] = {"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}


def files(folder: Path, modules: list[dict[str, str]], pooling: dict[str, object], **config: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"hidden_size": 8, **config}))
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return folder


def test_qwen3_embedding_takes_the_last_token_and_makes_it_one_long(tmp_path: Path) -> None:
    assert read_embedding(files(tmp_path, [TRANSFORMER, POOLING, NORMALIZE], LAST)) == EmbeddingModel(Pooling.LAST)


@pytest.mark.parametrize("pooling", [{"pooling_mode_mean_tokens": True}, {"pooling_mode": "mean"}])
def test_a_mean_may_keep_its_length(tmp_path: Path, pooling: dict[str, object]) -> None:
    found = read_embedding(files(tmp_path, [TRANSFORMER, POOLING], pooling))
    assert found == EmbeddingModel(Pooling.MEAN, normalizes=False)


@pytest.mark.parametrize(
    ("modules", "pooling", "config", "reason"),
    [
        ([TRANSFORMER, POOLING, DENSE], LAST, {}, "its modules.json wants Dense"),
        ([TRANSFORMER], LAST, {}, "its modules.json has 0 poolings"),
        ([TRANSFORMER, POOLING], LAST, {"is_causal": False}, "its attention is not causal"),
        (
            [TRANSFORMER, POOLING],
            {"pooling_mode_cls_token": True},
            {},
            "it pools by pooling_mode_cls_token, not by the last token or the mean",
        ),
        (
            [TRANSFORMER, POOLING],
            {**LAST, "pooling_mode_mean_tokens": True},
            {},
            "it pools by pooling_mode_mean_tokens and pooling_mode_lasttoken, not by the last token or the mean",
        ),
    ],
)
def test_what_is_not_done_is_told(
    tmp_path: Path, modules: list[dict[str, str]], pooling: dict[str, object], config: dict[str, object], reason: str
) -> None:
    assert read_embedding(files(tmp_path, modules, pooling, **config)) == NoEmbedding(reason)


def test_a_model_that_says_nothing_embeds_as_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    reason = "no modules.json says how it pools; start the server with --pooling last or mean"
    assert read_embedding(tmp_path) == NoEmbedding(reason)
    assert read_embedding(tmp_path, "mean") == EmbeddingModel(Pooling.MEAN)


def test_vectors_are_cut_only_where_the_model_was_made_for_it(tmp_path: Path) -> None:
    listed = files(tmp_path, [TRANSFORMER, POOLING], LAST, matryoshka_dimensions=[4, 2])
    assert read_embedding(listed, "last") == EmbeddingModel(Pooling.LAST, dimensions=[2, 4])
    (tmp_path / "config.json").write_text(json.dumps({"hidden_size": 8, "is_matryoshka": True}))
    assert read_embedding(listed, "last") == EmbeddingModel(Pooling.LAST, dimensions=range(1, 9))


def test_what_is_left_of_a_vector_is_made_one_long() -> None:
    pooled = array("f", [3, 4, 12]).tobytes()
    assert EmbeddingModel(Pooling.LAST).finished(pooled, 2).tolist() == pytest.approx([0.6, 0.8])
    assert EmbeddingModel(Pooling.LAST, normalizes=False).finished(pooled, None).tolist() == [3, 4, 12]
    assert EmbeddingModel(Pooling.LAST).finished(array("f", [0, 0]).tobytes(), None).tolist() == [0, 0]
