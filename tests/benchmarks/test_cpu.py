"""The comparison's own arithmetic; what it starts is measured by running it."""

from pathlib import Path

import pytest
import typer
from tokenizers import Tokenizer, models, pre_tokenizers

from crossdock.benchmarks.cpu import Job, Prompt, Speed, as_table, draw_prompts, median, our_candidates
from crossdock.benchmarks.servers import Exports
from crossdock.benchmarks.workload import LoadRequest

LOOP = Speed("loop", output_tokens=100, seconds=5.0)
SERVED = Speed("served", 100, 1.0, ttft_seconds=0.25, tpot_seconds=0.01, ready_seconds=4.0)


def test_the_table_shows_each_candidates_ratio_to_the_first() -> None:
    head, loop, served = as_table([LOOP, SERVED]).splitlines()
    assert head.split() == ["tokens/s", "ratio", "TTFT", "ms", "TPOT", "ms", "ready", "s"]
    assert loop.split() == ["loop", "20.0", "1.00", "-", "-", "-"]
    assert served.split() == ["served", "100.0", "5.00", "250.0", "10.0", "4.0"]


def test_of_several_rounds_the_median_speed_is_shown() -> None:
    speeds = [Speed("x", 10, seconds) for seconds in (1.0, 9.0, 2.0)]
    assert median(speeds) == speeds[2]


def test_an_unknown_candidate_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match="'swift'"):
        our_candidates(["llm", "swift"], Job((), 1, "float32", 1), Exports(Path(), Path(), 0), Path())


def test_a_prompt_is_the_same_as_text_and_as_ids(tmp_path: Path) -> None:
    words = ["Ġriver", "Ġstone", "ĠParis", "Ġof", "Ġ123", "stone"]
    vocabulary = {"<unk>": 0} | {word: i for i, word in enumerate(words, start=1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    prompts = draw_prompts(tmp_path / "tokenizer.json", num_prompts=3, num_tokens=4)
    assert [len(prompt.token_ids) for prompt in prompts] == [4, 4, 4]
    assert {token for prompt in prompts for token in prompt.token_ids} == {1, 2}
    assert all(tuple(tokenizer.encode(prompt.text).ids) == prompt.token_ids for prompt in prompts)


def test_servers_are_sent_the_text() -> None:
    job = Job((Prompt(" a b", (1, 2)),), output_tokens=7, dtype="float32", num_threads=1)
    assert job.requests == (LoadRequest(" a b", 7),)
