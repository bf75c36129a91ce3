"""Clients that people use, unchanged, against the demo model on two workers, and a small one on one."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from crossdock.router.text import load_text

from ..e2e.server import Server
from .conftest import RunClient, RunTool

ANSWER = "The capital of France is Paris."
CITY = {"name": "Paris", "is_capital": True}
NUM_ANSWER_TOKENS = 8
"""Seven of text and the one that ends the turn."""


def test_openai(run_client: RunClient, server: Server) -> None:
    assert run_client("with_openai", server) == {
        "models": ["demo"],
        "chat": {
            "content": ANSWER,
            "finish_reason": "stop",
            "logprob_tokens": ["The", " capital", " of", " France", " is", " Paris", ".", "<|im_end|>"],
            "num_top_logprobs": [2],
            "streamed": ANSWER,
            "usages": [NUM_ANSWER_TOKENS],
        },
        "completions": {
            "greedy": [[0, " Paris.\n"], [1, " Paris.\n"], [2, " Paris.\n"]],
            "usage": [5, 9],
            "is_seed_kept": True,
        },
        "structured": {
            "parsed": CITY,
            "calls": [{"city": "Rome"}],
            "finish_reason": "tool_calls",
        },
        "refusals": {"other model": "model_not_found", "unknown field": "temprature"},
    }


def test_langchain(run_client: RunClient, server: Server) -> None:
    assert run_client("with_langchain", server) == {
        "content": ANSWER,
        "finish_reason": "stop",
        "output_tokens": NUM_ANSWER_TOKENS,
        "streamed": ANSWER,
        "batched": [ANSWER, ANSWER],
        "structured": CITY,
        "agent": [
            ["human", "ai", "tool", "ai"],
            [["weather", {"city": "Rome"}]],
            "It is sunny in Rome.",
            True,
        ],
    }


def test_litellm(run_client: RunClient, server: Server) -> None:
    assert run_client("with_litellm", server) == {
        "content": ANSWER,
        "usage": [NUM_ANSWER_TOKENS, NUM_ANSWER_TOKENS],
        "streamed": ANSWER,
        "completion": " Paris.",
        "schema": CITY,
        "calls": [["weather", '{"city": "Rome"}']],
        "refusal": 404,
    }


def test_pydantic_ai(run_client: RunClient, server: Server) -> None:
    assert run_client("with_pydantic_ai", server) == {
        "output": ANSWER,
        "output_tokens": NUM_ANSWER_TOKENS,
        "by_schema": CITY,
        "by_call": CITY,
    }


def test_clients_of_the_responses_api(run_client: RunClient, server: Server) -> None:
    assert run_client("with_responses", server) == {
        "langchain": {
            "text": ANSWER,
            "output_tokens": NUM_ANSWER_TOKENS,
            "streamed": ANSWER,
            "is_same_conversation": True,
        },
        "litellm": {"text": ANSWER, "streamed": ANSWER, "last": "response.completed"},
        "pydantic_ai": {"output": ANSWER, "again": True},
    }


ITEMS = (("as the", " day"), ("as the", " nights, and so on"), ("a", "b"), ("she said:", " always cats!"))


def test_lm_eval_measures_the_log_likelihoods_of_transformers(
    run_client: RunClient, small_server: Server, small_model: Path
) -> None:
    measured = run_client("with_lm_eval", small_server, str(small_model), stdin=json.dumps(ITEMS))
    assert isinstance(measured, list)
    expected = _log_likelihoods(small_model)
    assert [is_greedy for _, is_greedy in measured] == [is_greedy for _, is_greedy in expected]
    assert [score for score, _ in measured] == pytest.approx([score for score, _ in expected], abs=1e-3)


def _log_likelihoods(model: Path) -> list[tuple[float, bool]]:
    """Of each item's continuation, and whether every token of it is the likeliest."""
    tokenizer = load_text(model).tokenizer
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    found = []
    for texts in ITEMS:
        context, continuation = (tokenizer.encode(text, add_special_tokens=False).ids for text in texts)
        with torch.inference_mode():
            logits = network(torch.tensor([context + continuation])).logits[0, len(context) - 1 : -1]
        own = logits.log_softmax(-1).gather(-1, torch.tensor(continuation)[:, None])
        found.append((float(own.sum()), logits.argmax(-1).tolist() == continuation))
    return found


def test_aiperf_counts_no_error_and_every_token(
    run_tool: RunTool, small_server: Server, small_model: Path, tmp_path: Path
) -> None:
    # Sampled at temperature 1: without it an answer may end before it began, which aiperf counts as an error.
    goes_on = ("--extra-inputs", "ignore_eos:true")
    load = ("--request-count", "12", "--concurrency", "4", "--isl", "20", "--osl", "6", "--streaming", *goes_on)
    quiet = ("--ui", "none", "--no-gpu-telemetry", "--no-server-metrics", "--output-artifact-dir", str(tmp_path))
    target = (
        "--model",
        "small",
        "--url",
        small_server.url,
        "--endpoint-type",
        "chat",
        "--use-server-token-count",
    )
    run_tool("aiperf", "profile", *target, "--tokenizer", str(small_model), *load, *quiet)
    report = json.loads((tmp_path / "profile_export_aiperf.json").read_text())
    wanted = ("completed_request_count", "request_error_rate", "total_usage_completion_tokens", "total_osl")
    assert [report[name]["avg"] for name in wanted] == [12, 0, 72, 72]
    assert report["error_summary"] == []
