"""Several choices of one prompt: their way to the workers, ``best_of``, and what they share."""

import asyncio
import json
from dataclasses import replace

import pytest
from msgspec.structs import replace as with_fields

from crossdock.core.messages import Abort, PrefillTask, PromptLogprobs, TokenDelta
from crossdock.core.request import RequestId, TokenLogprobs
from crossdock.core.sequence import FinishReason
from crossdock.router.openai_api import ChatCompletionRequest, CompletionRequest
from crossdock.router.openai_errors import ApiError
from crossdock.router.output import OutputAssembler
from crossdock.router.prepare import Limits, PreparedRequest, prepare_chat, prepare_completion
from crossdock.router.text import TextModel

from ..parts import card
from .stage import D1, D2, P1, P2, Client, Stage, failure_of, legs, token
from .test_streams import Exchange

LIMITS = Limits("toy", max_model_len=400, vocab_size=257, max_choices=64, roomiest=(card(4),))
"""A pool of four blocks of 16 tokens, 64 requests at a time."""


def prepared(text: TextModel, **fields: object) -> PreparedRequest:
    return prepare_completion(CompletionRequest.model_validate(fields), text, LIMITS, lambda: 1)


def answered(text: TextModel, request: PreparedRequest, outputs: list[tuple[str, float]]) -> dict[str, object]:
    """The body when each choice says a text and every token of it has one logprob."""
    assemblers = [OutputAssembler(text, choice) for choice in request.choices]
    for assembler, (said, logprob) in zip(assemblers, outputs, strict=True):
        token_ids = text.encode(said).ids
        for index, token_id in enumerate(token_ids):
            finish = FinishReason.LENGTH if index == len(token_ids) - 1 else None
            assembler.feed(TokenDelta(RequestId("r"), index, token_id, finish, TokenLogprobs(logprob)))
    body: dict[str, object] = json.loads(request.format(request, "1", 0, "fp").body(assemblers))
    return body


def test_an_answer_of_millions_of_numbers_is_refused(text: TextModel) -> None:
    """Each choice repeats those of its prompt."""
    roomy = replace(LIMITS, max_choices=1024, roomiest=())
    fields = {"prompt": ["x" * 390] * 33, "max_tokens": 1, "prompt_logprobs": 20}
    body, bodies = (CompletionRequest.model_validate({**fields, "n": n}) for n in (3, 4))
    assert len(prepare_completion(body, text, roomy, lambda: 1).choices) == 99
    with pytest.raises(ApiError) as refused:
        prepare_completion(bodies, text, roomy, lambda: 1)
    message = f"{33 * 4 * 390 * 21} log-probabilities of prompt tokens are asked for, the most is {1 << 20}."
    assert (refused.value.status, refused.value.param, refused.value.message) == (400, "prompt_logprobs", message)


# --- the way to the workers ----------------------------------------------------------------------


def test_choices_are_forks_of_the_first_each_with_its_own_id_and_seed() -> None:
    stage = Stage()
    stage.join_two_pairs()
    entries = stage.open(Client(), num_choices=3)
    ((_, task),) = stage.mailbox.take(PrefillTask)
    assert [(choice.request_id, choice.params) for choice in task.request.choices] == [
        (entry.attempt.request_id, entry.request.params) for entry in entries
    ]
    assert [entry.is_fork for entry in entries] == [False, True, True]
    for entry in entries:
        stage.hear(legs(entry)[0], token(entry, 0))
    assert stage.metric("vllm:prompt_tokens_total") == 3


def test_more_choices_than_a_pair_holds_side_by_side_travel_in_several_tasks() -> None:
    stage = Stage()
    stage.join_two_pairs()
    entries = stage.open(Client(), num_choices=150)
    tasks = [task for _, task in stage.mailbox.take(PrefillTask)]
    assert [len(task.request.choices) for task in tasks] == [64, 64, 22]
    sent = [choice.request_id for task in tasks for choice in task.request.choices]
    assert sent == [entry.attempt.request_id for entry in entries]


def test_a_choice_that_fails_alone_starts_again_alone_while_the_others_go_on() -> None:
    stage, client = Stage(), Client()
    stage.join_two_pairs()
    first, second = stage.open(client, num_choices=2)
    prefill, _ = legs(first)
    stage.mailbox.sent.clear()
    stage.hear(prefill, failure_of(second, "no room", is_retryable=True))
    messages = [message for _, message in stage.mailbox.sent]
    alone = with_fields(second.request, request_id=RequestId("r-1.2"))
    assert messages[:2] == [Abort(request_id=RequestId("r-1.1"))] * 2
    assert [message.request for message in messages[2:] if isinstance(message, PrefillTask)] == [alone]
    stage.hear(prefill, token(first, 0))
    assert client.tokens == [50]


def test_when_a_worker_dies_each_choice_without_a_token_starts_again_alone() -> None:
    stage, client = Stage(), Client()
    stage.join_two_pairs()
    entries = stage.open(client, num_choices=3)
    prefill, _ = legs(entries[0])
    stage.hear(prefill, token(entries[1], 0))
    stage.mailbox.sent.clear()
    stage.pass_time(4, *{P1, P2, D1, D2} - {prefill}, running=1)
    tasks = [message for _, message in stage.mailbox.sent if isinstance(message, PrefillTask)]
    assert [(task.request.request_id, task.request.forks) for task in tasks] == [("r-0.2", ()), ("r-2.2", ())]
    assert [(entry.is_fork, entry.attempt.request_id) for entry in entries] == [
        (False, "r-0.2"),
        (True, "r-1.1"),
        (False, "r-2.2"),
    ]
    assert len(client.failures) == 1  # of the choice whose first token the client has


async def test_the_logprobs_of_a_prompt_are_told_once_and_shown_by_all_its_choices(text: TextModel) -> None:
    exchange = Exchange(text, n=2, echo=True, logprobs=0, max_tokens=1)
    exchange.open()
    entries = exchange.dispatcher.entries
    part = PromptLogprobs(request_id=RequestId("r"), start=1, logprobs=[TokenLogprobs(-0.5)])
    exchange.stream.emit_prompt(entries[1], part)
    for choice in (0, 1):
        exchange.say("x", choice, finish=FinishReason.LENGTH)
    body = json.loads(await asyncio.wait_for(exchange.reply.body(), 1))
    scores = [choice["logprobs"]["token_logprobs"] for choice in body["choices"]]
    assert scores == [[None, -0.5]] * 2


# --- best_of -------------------------------------------------------------------------------------


def test_of_each_prompt_the_choices_with_the_likeliest_tokens_come_best_first_and_all_tokens_are_counted(
    text: TextModel,
) -> None:
    request = prepared(text, prompt=["a", "b"], n=2, best_of=3)
    assert [choice.params.logprobs for choice in request.choices] == [0] * 6
    said = [("one", -3.0), ("two!", -1.0), ("three", -2.0), ("x", -0.5), ("yy", -9.0), ("zzzz", -0.25)]
    body = answered(text, request, said)
    shown = [(choice["index"], choice["text"], choice["logprobs"]) for choice in body["choices"]]  # type: ignore[attr-defined]
    assert shown == [(0, "two!", None), (1, "three", None), (2, "zzzz", None), (3, "x", None)]
    assert body["usage"]["completion_tokens"] == 3 + 4 + 5 + 1 + 2 + 4  # type: ignore[index]


def test_logprobs_are_shown_if_they_are_asked_for(text: TextModel) -> None:
    request = prepared(text, prompt="a", best_of=2, logprobs=0)
    body = answered(text, request, [("one", -3.0), ("two", -1.0)])
    (choice,) = body["choices"]  # type: ignore[misc]
    assert (choice["text"], choice["logprobs"]["token_logprobs"]) == ("two", [-1.0] * 3)  # type: ignore[has-type]


def test_best_of_equal_to_n_ranks_nothing_and_may_be_streamed(text: TextModel) -> None:
    request = prepared(text, prompt="a", n=2, best_of=2, stream=True)
    assert (request.num_best, [choice.params.logprobs for choice in request.choices]) == (None, [None, None])


# --- the door ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("field", "fields"), [("n", {"n": 4}), ("best_of", {"best_of": 4})])
def test_more_choices_than_any_pool_can_hold_are_refused(text: TextModel, field: str, fields: dict[str, int]) -> None:
    prompt = "x" * 20
    assert len(prepared(text, prompt=prompt, **{field: 3}).choices) == 3
    with pytest.raises(
        ApiError, match=r"^4 choices over 20 prompt tokens are asked for, the workers hold 3\.$"
    ) as refused:
        prepared(text, prompt=prompt, **fields)
    assert (refused.value.status, refused.value.param) == (400, field)


def test_a_chat_with_more_choices_than_any_pool_can_hold_is_refused(text: TextModel) -> None:
    body = ChatCompletionRequest.model_validate({"messages": [{"role": "user", "content": "x"}], "n": 60})
    with pytest.raises(ApiError, match="60 choices over") as refused:
        prepare_chat(body, text, LIMITS, lambda: 1)
    assert refused.value.param == "n"
