"""Faults of other servers' APIs, asked over HTTP of a mixed worker and of a prefill and a decode worker."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from .answers import Answer, Json, ask, chunks, path_for, refusal
from .models import chat_model, ids_by_text
from .reference import greedy
from .server import Server, serving

MODES = {"mixed": ("--mixed", "1"), "1P1D": ()}
VOCAB_SIZE = 323
END_ID = 322
HELLO: Json = {"messages": [{"role": "user", "content": "say hello"}]}
BOTH_ENDPOINTS: list[Json] = [{"prompt": "say hello"}, HELLO]
GREEDY: Json = {"prompt": "say hello", "temperature": 0, "max_tokens": 24, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return chat_model(tmp_path_factory.mktemp("chat"))


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def network(model: Path) -> PreTrainedModel:
    network = AutoModelForCausalLM.from_pretrained(model)
    network.generation_config.eos_token_id = None
    return network


@pytest.fixture(scope="module")
def id_of(model: Path) -> dict[str, int]:
    return ids_by_text(model)


@pytest.fixture(scope="module", params=MODES)
def server(request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("logs") / "server.log"
    with serving(model, log, "--served-model-name", "toy", *MODES[request.param]) as server:
        yield server


# --- usage (A1) ------------------------------------------------------------------------------------

NOT_ASKED: list[Json] = [{}, {"stream_options": None}, {"stream_options": {}}]


@pytest.mark.parametrize("body", BOTH_ENDPOINTS, ids=path_for)
@pytest.mark.parametrize("options", [*NOT_ASKED, {"stream_options": {"include_usage": False}}], ids=str)
def test_usage_is_streamed_to_nobody_who_did_not_ask(server: Server, body: Json, options: Json) -> None:
    with server.client.stream("POST", path_for(body), json={**body, "max_tokens": 4, "stream": True, **options}) as got:
        assert all(chunk.get("usage") is None and len(chunk["choices"]) == 1 for chunk in chunks(got))


@pytest.mark.parametrize("body", BOTH_ENDPOINTS, ids=path_for)
def test_usage_is_the_last_chunk_for_those_who_ask(server: Server, body: Json) -> None:
    asking: Json = {**body, "max_tokens": 4, "ignore_eos": True, "stream_options": {"include_usage": True}}
    with server.client.stream("POST", path_for(body), json={**asking, "stream": True}) as got:
        *before, last = chunks(got)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in before)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)
    for stream in (False, None):
        assert refusal(server, {**asking, "stream": stream})["param"] == "stream_options"


# --- scoring a prompt (A3) -------------------------------------------------------------------------


def logprobs_by_transformers(network: PreTrainedModel, ids: list[int]) -> list[object]:
    """What a scored text must show: nothing for the first token, and the others within a hundredth."""
    with torch.inference_mode():
        logits = network(torch.tensor([ids])).logits[0, :-1]
    logprobs = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    return [None, *(pytest.approx(logprob, abs=1e-2) for logprob in logprobs)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", ["Your answer: Yes", "naïve 🙂 “q”", "x" * 700], ids=["words", "signs", "long"])
def test_a_prompt_is_scored_as_transformers_scores_it(
    server: Server, tokenizer: PreTrainedTokenizerBase, network: PreTrainedModel, prompt: str, stream: bool
) -> None:
    ids = tokenizer(prompt).input_ids
    right = logprobs_by_transformers(network, ids)
    for _ in range(2):  # the second time all blocks are cached
        answer = ask(server, prompt=prompt, max_tokens=0, echo=True, logprobs=1, stream=stream)
        assert (answer.text, answer.only.finish_reason) == (prompt, "length")
        assert (answer.num_prompt, answer.num_output) == (len(ids), 0)
        assert len(answer.only.tokens) == len(ids)
        assert answer.only.token_logprobs == right


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_is_scored_on_into_the_answer(
    server: Server,
    tokenizer: PreTrainedTokenizerBase,
    network: PreTrainedModel,
    id_of: dict[str, int],
    stream: bool,
) -> None:
    plain = ask(server, **{**GREEDY, "max_tokens": 5}, logprobs=0)
    answer = ask(server, **{**GREEDY, "max_tokens": 5}, echo=True, logprobs=5, stream=stream)
    ids = [*tokenizer("say hello").input_ids, *(id_of[token] for token in plain.only.tokens)]
    assert answer.text == "say hello" + plain.text
    assert [id_of[token] for token in answer.only.tokens] == ids
    assert answer.only.token_logprobs == logprobs_by_transformers(network, ids)
    assert (answer.num_prompt, answer.num_output) == (len(ids) - 5, 5)


@pytest.mark.parametrize("stream", [False, True])
def test_no_token_and_no_echo_is_an_empty_answer(server: Server, stream: bool) -> None:
    for logprobs in (None, 1):
        answer = ask(server, **{**GREEDY, "max_tokens": 0}, logprobs=logprobs, stream=stream)
        assert (answer.text, answer.only.tokens, answer.only.finish_reason) == ("", [], "length")
        echo = ask(server, **{**GREEDY, "max_tokens": 0}, echo=True, stream=stream)
        assert (echo.text, echo.only.tokens, echo.only.finish_reason) == ("say hello", [], "length")


def test_every_prompt_and_choice_is_scored(server: Server) -> None:
    prompts = ["one", "another", "one"]
    scoring: Json = {"max_tokens": 1, "echo": True, "logprobs": 0, "temperature": 0, "ignore_eos": True}
    alone = [ask(server, **scoring, prompt=prompt).only for prompt in prompts]
    together = ask(server, **scoring, prompt=prompts, n=2)
    for choice, single in zip(together.choices, [choice for choice in alone for _ in range(2)], strict=True):
        assert (choice.text, choice.tokens) == (single.text, single.tokens)
        assert choice.token_logprobs[1:] == pytest.approx(single.token_logprobs[1:], abs=1e-3)


def test_the_prompt_of_a_chat_is_scored_by_token_id(
    server: Server, tokenizer: PreTrainedTokenizerBase, network: PreTrainedModel
) -> None:
    messages = [{"role": "user", "content": "naïve 🙂"}]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    ids = tokenizer(rendered, add_special_tokens=False).input_ids
    body = {"messages": messages, "max_tokens": 1, "prompt_logprobs": 2}
    scores = server.client.post("/v1/chat/completions", json=body).json()["prompt_logprobs"]
    own = [position and position[str(token_id)]["logprob"] for position, token_id in zip(scores, ids, strict=True)]
    assert own == logprobs_by_transformers(network, ids)
    for position in scores[1:]:
        ranks = {token["rank"]: token["logprob"] for token in position.values()}
        assert ranks[1] >= ranks[2] >= max((p for rank, p in ranks.items() if rank is None), default=-99)


# --- a limit of one token (D1) ---------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_a_limit_is_kept_to_the_token(
    server: Server, tokenizer: PreTrainedTokenizerBase, network: PreTrainedModel, id_of: dict[str, int], stream: bool
) -> None:
    right = list(greedy(network, tokenizer("say hello").input_ids, 24).tokens)
    for limit in (1, 2, 3, 24):
        answer = ask(server, **{**GREEDY, "max_tokens": limit}, logprobs=0, stream=stream)
        assert [id_of[token] for token in answer.only.tokens] == right[:limit]
        assert (answer.num_output, answer.only.finish_reason) == (limit, "length")


def test_one_token_ships_nothing(server: Server) -> None:
    server.wait_until_nothing_is_left(10)
    before = server.scrape()
    for stream in (False, True):
        assert ask(server, prompt="p" * 100, max_tokens=1, ignore_eos=True, stream=stream).num_output == 1
    server.wait_until_nothing_is_left(10)
    after = server.scrape()
    assert after.worker("output_tokens_total") == before.worker("output_tokens_total"), "none is the decode part's"
    assert after.worker("bytes_pushed_total") == before.worker("bytes_pushed_total")


def test_a_first_token_that_ends_the_answer_is_all_of_it(server: Server) -> None:
    whole = ask(server, **GREEDY).text
    server.wait_until_nothing_is_left(10)
    attached = server.scrape().worker("blocks_pushed_total")
    for stream in (False, True):
        ended = ask(server, prompt="say hello", logit_bias={str(END_ID): 100}, stream=stream)
        assert (ended.text, ended.num_output, ended.only.finish_reason) == ("", 1, "stop")
    server.wait_until_nothing_is_left(10)
    assert server.scrape().worker("blocks_pushed_total") == attached
    for stream in (False, True):  # the router sees this one, a little later
        stopped = ask(server, **GREEDY, stop=[whole[0]], stream=stream)
        assert (stopped.text, stopped.num_output, stopped.only.finish_reason) == ("", 1, "stop")
    server.wait_until_nothing_is_left(10)


# --- prompts of chats (B5, X1, X5, X7) -------------------------------------------------------------

CALL = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"at": "x"}'}}
TURNS = [{"role": "user", "content": "look"}, {"role": "tool", "content": "2", "tool_call_id": "call_1"}]
SAID = {"role": "assistant", "tool_calls": [CALL]}


def of_ids(server: Server, ids: list[int]) -> Answer:
    return ask(server, prompt=ids, temperature=0, max_tokens=12, ignore_eos=True)


def of_chat(server: Server, **body: object) -> Answer:
    return ask(server, **body, temperature=0, max_tokens=12, ignore_eos=True)


def rendered(tokenizer: PreTrainedTokenizerBase, messages: list[Json], continues: bool = False) -> list[int]:
    """By Transformers: with an answer's turn opened, or the last one continued."""
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=not continues, continue_final_message=continues
    )
    return list(tokenizer(str(text), add_special_tokens=False).input_ids)


@pytest.mark.parametrize("content", ["hello", "", "naïve 🙂\n"], ids=["words", "nothing", "signs"])
def test_a_chat_has_the_one_bos_that_its_template_writes(
    server: Server, tokenizer: PreTrainedTokenizerBase, content: str
) -> None:
    messages = [{"role": "user", "content": content}]
    ids = rendered(tokenizer, messages)
    assert ids.count(tokenizer.bos_token_id) == 1
    answer = of_chat(server, messages=messages)
    assert (answer.num_prompt, answer.text) == (len(ids), of_ids(server, ids).text)


def test_raw_text_gets_the_one_bos_that_the_tokenizer_adds(server: Server, tokenizer: PreTrainedTokenizerBase) -> None:
    ids = tokenizer("say hello").input_ids
    assert ids.count(tokenizer.bos_token_id) == 1
    answer = of_chat(server, prompt="say hello")
    assert (answer.num_prompt, answer.text) == (len(ids), of_ids(server, ids).text)


def test_an_empty_text_is_bos_alone_and_nothing_at_all_is_refused(server: Server) -> None:
    assert ask(server, prompt="", max_tokens=1).num_prompt == 1
    empty: list[Json] = [{"prompt": []}, {"prompt": [[]]}, {"prompt": [[5], []]}, {"messages": []}]
    for body in empty:
        assert refusal(server, body)["param"] == next(iter(body))


@pytest.mark.parametrize("content", [{"content": None}, {}, {"content": ""}], ids=str)
def test_a_turn_of_calls_needs_no_content(server: Server, tokenizer: PreTrainedTokenizerBase, content: Json) -> None:
    arguments = {"function": {"name": "look", "arguments": {"at": "x"}}}
    right = rendered(
        tokenizer,
        [TURNS[0], {"role": "assistant", "content": "", "tool_calls": [arguments]}, TURNS[1]],
    )
    answer = of_chat(server, messages=[TURNS[0], {**SAID, **content}, TURNS[1]])
    assert (answer.num_prompt, answer.text) == (len(right), of_ids(server, right).text)


@pytest.mark.parametrize("content", ["OK!\n", "OK!  ", "OK!", "\n"], ids=repr)
@pytest.mark.parametrize("flags", [{}, {"add_generation_prompt": False}], ids=str)
def test_a_final_message_is_continued_where_it_ends(
    server: Server, tokenizer: PreTrainedTokenizerBase, content: str, flags: Json
) -> None:
    messages = [{"role": "user", "content": "fine?"}, {"role": "assistant", "content": content}]
    right = rendered(tokenizer, messages, continues=True)
    assert right.count(END_ID) == 1
    answer = of_chat(server, messages=messages, continue_final_message=True, **flags)
    assert (answer.num_prompt, answer.text) == (len(right), of_ids(server, right).text)


def test_a_turn_cannot_be_opened_and_continued_at_once(server: Server) -> None:
    error = refusal(server, {**HELLO, "continue_final_message": True, "add_generation_prompt": True})
    assert error["param"] == "continue_final_message"


# --- bad requests and their neighbours (A5, X22) ---------------------------------------------------

TEXT: Json = {"prompt": "hi"}
BAD: list[tuple[Json, str]] = [
    ({**TEXT, "logit_bias": {str(VOCAB_SIZE): 5}}, "logit_bias"),
    ({**TEXT, "logit_bias": {"-1": 5}}, "logit_bias"),
    ({**TEXT, "logit_bias": {"abc": 5}}, "logit_bias"),
    ({**HELLO, "logit_bias": {"1": 1e9}}, "logit_bias"),
    ({**TEXT, "stop_token_ids": [VOCAB_SIZE + 10]}, "stop_token_ids"),
    ({**HELLO, "stop_token_ids": [-1]}, "stop_token_ids"),
    ({**TEXT, "stop_token_ids": list(range(VOCAB_SIZE)), "min_tokens": 3}, "min_tokens"),
    ({"prompt": [VOCAB_SIZE]}, "prompt"),
    ({"prompt": [-1]}, "prompt"),
    ({"prompt": [[5], [2**31]]}, "prompt"),
    ({"prompt": [5] * 2048}, "prompt"),
    ({**TEXT, "max_tokens": 2**62}, "prompt"),
    ({**TEXT, "logprobs": 1_000_000}, "logprobs"),
    ({**HELLO, "logprobs": True, "top_logprobs": 1_000_000}, "top_logprobs"),
    ({**HELLO, "top_logprobs": 3}, "top_logprobs"),
    ({**TEXT, "n": 10**6}, "n"),
    ({"prompt": ["x"] * 1024, "n": 128}, "n"),
    ({**TEXT, "top_k": 2**70}, "top_k"),
    ({**TEXT, "temperature": 1e-400, "top_p": -1}, "top_p"),
    ({**TEXT, "min_tokens": 2**40}, "min_tokens"),
    ({**TEXT, "stream": True, "n": 0}, "n"),
    ({**HELLO, "stream": True, "temperature": -1}, "temperature"),
    ({**HELLO, "stream": True, "messages": [{"role": "user"}]}, "messages.0.content"),
]


def test_a_bad_request_hurts_nobody_but_its_sender(server: Server) -> None:
    short: Json = {**GREEDY, "max_tokens": 8}
    usual = ask(server, **short).text
    long: Json = {**GREEDY, "prompt": "a neighbour", "max_tokens": 900}
    undisturbed = ask(server, **long).text
    with ThreadPoolExecutor(1) as neighbour:
        stream = neighbour.submit(ask, server, **long, stream=True)
        for body, field in BAD:
            assert refusal(server, body)["param"] == field
            assert ask(server, **short).text == usual
        assert stream.result().text == undisturbed


# --- bodies that are none --------------------------------------------------------------------------

NO_BODY: list[tuple[bytes, str | None]] = [
    (b"", None),
    (b"{", None),
    (b"null", None),
    (b"[]", None),
    (b'"hi"', None),
    (b"\xff\xfe\x00", None),
    (b'{"prompt": "\xff"}', None),
    (b"[" * 100_000, None),
    (b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    (b'{"prompt": ' + b"[" * 900 + b"]" * 900 + b"}", None),
    (b'{"prompt": "hi", "metadata": ' + b'{"a":' * 900 + b"1" + b"}" * 900 + b"}", None),
    (b'{"prompt": ' + b"[" * 90 + b"]" * 90 + b"}", "prompt.0.0"),
    (b'{"prompt": "hi", "seed": ' + b"9" * 5000 + b"}", None),
    (b'{"prompt": "hi", "seed": ' + b"9" * 500 + b"}", "seed"),
    (b'{"prompt": "hi", "temperature": NaN}', "temperature"),
    (b'{"prompt": "hi", "temperature": 1e999}', "temperature"),
    (b'{"prompt": "\\ud83d"}', "prompt"),
    (b'{"prompt": "hi", "stop": ["\\udc00"]}', "stop"),
    (b'{"prompt": "hi", "\\ud800": 1}', "?"),
    (b'{"prompt": "hi", "": 1}', ""),
    (b'{"prompt": {"text": "hi"}}', "prompt"),
    (b'{"prompt": [1, "a"]}', "prompt.1"),
    (b'{"prompt": [1.5]}', "prompt.0"),
    (b'{"prompt": "hi", "max_tokens": "5"}', "max_tokens"),
    (b'{"prompt": "hi", "max_tokens": 5.0}', "max_tokens"),
    (b'{"prompt": "hi", "stream": 1}', "stream"),
    (b'{"prompt": "hi", "stop": [["a"]]}', "stop.0"),
    (b'{"prompt": "hi", "logit_bias": [1]}', "logit_bias"),
    (b'{"prompt": "hi", "metadata": {"a": 1}}', "metadata.a"),
    (b'{"prompt": "hi", "no_such_thing": 1}', "no_such_thing"),
]


@pytest.mark.parametrize(("body", "field"), NO_BODY, ids=[repr(body[:40]) for body, _ in NO_BODY])
def test_a_body_that_makes_no_sense_is_a_400_that_names_the_field(
    server: Server, body: bytes, field: str | None
) -> None:
    assert refusal(server, body)["param"] == field


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"])
def test_a_body_that_does_not_say_it_is_json_is_told_to(server: Server, kind: str | None) -> None:
    headers = {} if kind is None else {"content-type": kind}
    response = server.client.post("/v1/completions", content=b'{"prompt": "hi"}', headers=headers)
    assert response.status_code == 400
    assert "content-type: application/json" in response.json()["error"]["message"]


# --- the protocol ----------------------------------------------------------------------------------


def test_models_are_listed_and_found(server: Server) -> None:
    listed = server.client.get("/v1/models").json()
    [card] = listed["data"]
    assert (listed["object"], card["id"], card["object"], card["max_model_len"]) == ("list", "toy", "model", 2048)
    assert server.client.get("/v1/models/toy").json() == card
    missing = server.client.get("/v1/models/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
    for body in BOTH_ENDPOINTS:
        assert ask(server, **body, model="toy", max_tokens=1).num_output == 1
        assert refusal(server, {**body, "model": "other"}, status=404)["param"] == "model"
        assert refusal(server, {**body, "model": "other", "stream": True}, status=404)["code"] == "model_not_found"


def test_head_is_get_without_a_body_and_other_methods_are_told_what_is_allowed(server: Server) -> None:
    for path in ("/health", "/v1/models", "/v1/models/toy", "/metrics"):
        got, head = server.client.get(path), server.client.head(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers.get("content-type") == got.headers.get("content-type")
    assert server.client.head("/v1/models/other").status_code == 404
    for method, path, allowed in (
        ("OPTIONS", "/v1/completions", {"POST"}),
        ("GET", "/v1/chat/completions", {"POST"}),
        ("DELETE", "/v1/models/toy", {"GET", "HEAD"}),
    ):
        response = server.client.request(method, path)
        assert response.status_code == 405
        assert set(response.headers["allow"].replace(" ", "").split(",")) == allowed
        assert response.json()["error"]["type"] == "invalid_request_error"


def test_one_connection_serves_answers_refusals_and_streams(server: Server) -> None:
    limits = httpx.Limits(max_connections=1)
    with httpx.Client(base_url=server.url, limits=limits, timeout=30) as client:
        connections = set()
        for prompt, stream, status in (("hi", False, 200), ("hi", None, 200), ("hi", 5, 400), ("hi", True, 200)):
            response = client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 2, "stream": stream})
            assert response.status_code == status
            connections.add(response.extensions["network_stream"].get_extra_info("client_addr"))
        assert len(connections) == 1


def test_an_answer_has_one_id_and_carries_that_of_its_request(server: Server) -> None:
    whole = server.client.post("/v1/completions", json={"prompt": "hi"}, headers={"x-request-id": "mine"})
    assert whole.headers["x-request-id"] == "mine"
    with server.client.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True}) as got:
        [streamed_id] = {chunk["id"] for chunk in chunks(got)}
        assert streamed_id != whole.json()["id"]
        assert got.headers["x-request-id"].startswith("req_")
        assert got.headers["cache-control"] == "no-cache"
