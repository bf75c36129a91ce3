"""One request's events on their way to its client: merged, batched, ended, and given up when the client leaves."""

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import pytest
from starlette.types import Message

from crossdock.core.kv_layout import KvLayout
from crossdock.core.messages import (
    Incarnation,
    Peer,
    PoolBooks,
    PromptLogprobs,
    Role,
    TokenDelta,
    WorkerCard,
    WorkerLoad,
)
from crossdock.core.request import Request, RequestId, TokenLogprobs
from crossdock.core.sequence import FinishReason
from crossdock.router.dispatcher import Dispatcher
from crossdock.router.fleet import Pair, Worker
from crossdock.router.ledger import Attempt, Entry, Failure
from crossdock.router.metrics import EndReason
from crossdock.router.openai_api import CompletionRequest
from crossdock.router.openai_errors import ApiError
from crossdock.router.placement import NoCapacity
from crossdock.router.prepare import Limits, prepare_completion
from crossdock.router.streams import ClientGone, Reply, Stream
from crossdock.router.text import TextModel

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
CARD = WorkerCard(
    role=Role.MIXED,
    model="m",
    layout=LAYOUT,
    num_blocks=8,
    max_model_len=99,
    max_num_seqs=64,
    vocab_size=257,
    num_layer_groups=1,
)
LOAD = WorkerLoad(books=PoolBooks(free=8, cached=0, leased=0, quarantined=0))
WORKER = Worker(Peer("tcp://w:1", Incarnation("w")), CARD, 0.0, LOAD)


@dataclass
class FakeDispatcher:
    """Opens what it is given, unless it is full, and keeps what was released."""

    refusal: NoCapacity | None = None
    entries: list[Entry] = field(default_factory=list)
    released: list[tuple[int, EndReason]] = field(default_factory=list)

    def open(self, entries: list[Entry]) -> NoCapacity | None:
        if self.refusal is None:
            self.entries = entries
            for entry in entries:
                entry.attempts.append(Attempt(RequestId("a"), Pair(WORKER, WORKER)))
        return self.refusal

    def release(self, entry: Entry, reason: EndReason) -> None:
        self.released.append((entry.choice, reason))


class Exchange:
    """A stream and its reply, with the dispatcher's side in the test's hand."""

    def __init__(self, text: TextModel, **body: object) -> None:
        self.text = text
        self.dispatcher = FakeDispatcher()
        self.stream = Stream(cast(Dispatcher, self.dispatcher))
        fields = {"model": "toy", "prompt": "hi", "max_tokens": 20, **body}
        request = CompletionRequest.model_validate(fields)
        prepared = prepare_completion(request, text, Limits("toy", 400, 257, 128), lambda: 1)
        form = prepared.format(prepared, "1", 0, "fp")
        self.reply = Reply(self.stream, prepared, text, form)
        self.requests = [
            Request(request_id=RequestId(f"r-{n}"), prompt=choice.prompt.packed, params=choice.params)
            for n, choice in enumerate(prepared.choices)
        ]

    def open(self) -> None:
        self.stream.open(self.requests, may_restart=False, arrived_at=0.0)

    def say(self, words: str, choice: int = 0, start: int = 0, finish: FinishReason | None = None) -> None:
        ids = self.text.encode(words).ids
        for n, token_id in enumerate(ids):
            last = finish if n == len(ids) - 1 else None
            delta = TokenDelta(request_id=RequestId("r"), index=start + n, token_id=token_id, finish=last)
            self.stream.emit(self.dispatcher.entries[choice], delta)

    async def events(self) -> list[str]:
        """What the next write carries, event by event."""
        data = await asyncio.wait_for(self.reply.next_bytes(), 1)
        return [event.removeprefix("data: ") for event in data.decode().split("\n\n") if event]


def texts(events: list[str]) -> list[tuple[int, str, str | None]]:
    choices = [json.loads(event)["choices"][0] for event in events if event != "[DONE]"]
    return [(choice["index"], choice["text"], choice["finish_reason"]) for choice in choices]


async def test_all_that_is_ready_travels_in_one_write(text: TextModel) -> None:
    exchange = Exchange(text, stream=True)
    exchange.open()
    exchange.say("abc")
    assert texts(await exchange.events()) == [(0, "a", None), (0, "b", None), (0, "c", None)]
    exchange.say("d", start=3, finish=FinishReason.LENGTH)
    events = await exchange.events()
    assert texts(events) == [(0, "d", "length")]
    assert events[-1] == "[DONE]"
    assert await exchange.events() == []


async def test_choices_are_merged_and_the_stream_ends_with_the_last_of_them(text: TextModel) -> None:
    exchange = Exchange(text, stream=True, n=2)
    exchange.open()
    exchange.say("a", choice=1)
    exchange.say("xy", choice=0, finish=FinishReason.LENGTH)
    assert texts(await exchange.events()) == [(1, "a", None), (0, "x", None), (0, "y", "length")]
    exchange.say("b", choice=1, start=1, finish=FinishReason.LENGTH)
    assert [event == "[DONE]" for event in await exchange.events()] == [False, True]


async def test_a_body_has_every_choice_in_order(text: TextModel) -> None:
    exchange = Exchange(text, n=3)
    exchange.open()
    for choice, words in ((2, "third"), (0, "first"), (1, "second")):
        exchange.say(words, choice, finish=FinishReason.LENGTH)
    body = json.loads(await exchange.reply.body())
    said = [(choice["index"], choice["text"]) for choice in body["choices"]]
    assert said == [(0, "first"), (1, "second"), (2, "third")]
    assert body["usage"]["completion_tokens"] == 16


async def test_a_stop_string_releases_its_choice_at_once_and_later_tokens_are_not_shown(text: TextModel) -> None:
    exchange = Exchange(text, stream=True, stop="STOP")
    exchange.open()
    exchange.say("okSTOPmore")
    events = await exchange.events()
    assert "".join(words for _, words, _ in texts(events)) == "ok"
    assert texts(events)[-1][2] == "stop"
    assert exchange.dispatcher.released == [(0, EndReason.STOP)]


async def test_a_stop_that_the_worker_saw_itself_needs_no_release(text: TextModel) -> None:
    exchange = Exchange(text, stream=True)
    exchange.open()
    exchange.say("ok", finish=FinishReason.STOP)
    await exchange.events()
    assert exchange.dispatcher.released == []


async def test_a_restarted_choice_forgets_what_it_had(text: TextModel) -> None:
    exchange = Exchange(text)
    exchange.open()
    exchange.say("half of an ans")
    exchange.stream.restart(exchange.dispatcher.entries[0])
    exchange.say("whole", finish=FinishReason.LENGTH)
    body = json.loads(await exchange.reply.body())
    assert body["choices"][0]["text"] == "whole"
    assert body["usage"]["completion_tokens"] == 5


@pytest.mark.parametrize("is_retried", [True, False])
async def test_a_worker_that_dies_after_the_stop_string_came_changes_nothing(text: TextModel, is_retried: bool) -> None:
    exchange = Exchange(text, stop="STOP")
    exchange.open()
    exchange.say("okSTOP")
    if is_retried:
        exchange.stream.restart(exchange.dispatcher.entries[0])
    else:
        exchange.stream.fail(exchange.dispatcher.entries[0], Failure("worker died", is_retryable=True))
    body = json.loads(await exchange.reply.body())
    assert (body["choices"][0]["text"], body["choices"][0]["finish_reason"]) == ("ok", "stop")
    assert exchange.dispatcher.released == [(0, EndReason.STOP)]


async def test_log_probabilities_of_the_prompt_come_with_the_echo(text: TextModel) -> None:
    exchange = Exchange(text, echo=True, logprobs=1, max_tokens=0)
    exchange.open()
    part = PromptLogprobs(request_id=RequestId("r"), start=1, logprobs=[TokenLogprobs(-1.5, [3], [-0.5])])
    exchange.stream.emit_prompt(exchange.dispatcher.entries[0], part)
    exchange.stream.emit_prompt(exchange.dispatcher.entries[0], part)
    last = TokenDelta(request_id=RequestId("r"), index=0, finish=FinishReason.LENGTH)
    exchange.stream.emit(exchange.dispatcher.entries[0], last)
    body = json.loads(await exchange.reply.body())
    assert body["choices"][0]["text"] == "hi"
    assert body["choices"][0]["logprobs"]["token_logprobs"] == [None, -1.5]
    assert body["usage"]["completion_tokens"] == 0


async def test_tokens_before_a_failure_are_delivered_before_it(text: TextModel) -> None:
    exchange = Exchange(text, stream=True)
    exchange.open()
    exchange.say("ab")
    exchange.stream.fail(exchange.dispatcher.entries[0], Failure("worker died", is_retryable=True))
    assert texts(await exchange.events()) == [(0, "a", None), (0, "b", None)]
    with pytest.raises(ApiError) as raised:
        await exchange.events()
    assert (raised.value.status, raised.value.message) == (503, "worker died")


@pytest.mark.parametrize(("is_retryable", "status"), [(True, 503), (False, 400)])
async def test_a_failed_choice_fails_the_whole_body(text: TextModel, is_retryable: bool, status: int) -> None:
    exchange = Exchange(text, n=2)
    exchange.open()
    exchange.say("fine", finish=FinishReason.LENGTH)
    exchange.stream.fail(exchange.dispatcher.entries[1], Failure("no", is_retryable))
    with pytest.raises(ApiError) as raised:
        await exchange.reply.body()
    assert raised.value.status == status


async def test_a_refusal_is_a_503_that_says_when_to_come_back(text: TextModel) -> None:
    exchange = Exchange(text)
    exchange.dispatcher.refusal = NoCapacity("no pair of workers is ready")
    with pytest.raises(ApiError) as raised:
        exchange.open()
    assert (raised.value.status, raised.value.retry_after) == (503, 1)
    exchange.stream.close()
    assert exchange.dispatcher.released == []


def arrives(messages: list[Message]) -> Callable[[], "asyncio.Future[Message]"]:
    """An ASGI ``receive`` that yields these and then nothing."""

    async def receive() -> Message:
        if messages:
            return messages.pop(0)
        return await asyncio.Event().wait() and {}

    return cast(Callable[[], "asyncio.Future[Message]"], receive)


async def test_a_client_that_leaves_while_nothing_comes_is_noticed(text: TextModel) -> None:
    exchange = Exchange(text, stream=True, n=2)
    exchange.open()
    exchange.stream.watch(arrives([{"type": "http.request"}, {"type": "http.disconnect"}]))
    with pytest.raises(ClientGone):
        await exchange.events()
    exchange.stream.close()
    assert exchange.dispatcher.released == [(0, EndReason.ABORT), (1, EndReason.ABORT)]


async def test_closing_ends_the_watch(text: TextModel) -> None:
    exchange = Exchange(text, stream=True)
    exchange.open()
    num_tasks = len(asyncio.all_tasks())
    exchange.stream.watch(arrives([]))
    await asyncio.sleep(0)
    exchange.stream.close()
    await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == num_tasks
