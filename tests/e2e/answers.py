"""Whole answers of a server under test, streamed or not, with all their choices."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx

from .server import Server

Json = dict[str, Any]


@dataclass(slots=True)
class ChoiceAnswer:
    """``deltas`` are the non-empty pieces of text as they came; logprob entries are there if asked for."""

    deltas: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    token_logprobs: list[float | None] = field(default_factory=list)
    finish_reason: str | None = None

    @property
    def text(self) -> str:
        return "".join(self.deltas)

    def take(self, choice: Json) -> None:
        """One choice of a body or a chunk, of either endpoint."""
        assert self.finish_reason is None, f"after the end came {choice}"
        said = choice.get("message") or choice.get("delta") or choice
        text = said.get("text") or said.get("content") or ""
        self.deltas += [text] if text else []
        logprobs = choice["logprobs"] or {}
        for entry in logprobs.get("content") or ():
            self.tokens.append(entry["token"])
            self.token_logprobs.append(entry["logprob"])
        self.tokens += logprobs.get("tokens") or ()
        self.token_logprobs += logprobs.get("token_logprobs") or ()
        self.finish_reason = choice["finish_reason"]


@dataclass(slots=True)
class Answer:
    choices: list[ChoiceAnswer]
    usage: Json | None = None

    @property
    def only(self) -> ChoiceAnswer:
        assert len(self.choices) == 1
        return self.choices[0]

    @property
    def text(self) -> str:
        return self.only.text

    @property
    def num_prompt(self) -> int:
        assert self.usage is not None
        return int(self.usage["prompt_tokens"])

    @property
    def cached_tokens(self) -> int:
        assert self.usage is not None
        return int(self.usage["prompt_tokens_details"]["cached_tokens"])

    @property
    def num_output(self) -> int:
        assert self.usage is not None
        return int(self.usage["completion_tokens"])


def path_for(body: Json) -> str:
    return "/v1/chat/completions" if "messages" in body else "/v1/completions"


def ask(server: Server, **body: Any) -> Answer:
    """A chat if there are messages, else a completion. Streams are asked for their usage unless the body says more."""
    if not body.get("stream"):
        response = server.client.post(path_for(body), json=body)
        assert response.status_code == 200, response.text
        return _collected([response.json()])
    body = {"stream_options": {"include_usage": True}, **body}
    with server.client.stream("POST", path_for(body), json=body) as response:
        return _collected(list(chunks(response)))


def ask_all(server: Server, bodies: Sequence[Json], num_at_once: int = 32) -> list[Answer]:
    """Answers in the order of the bodies."""
    with ThreadPoolExecutor(num_at_once) as clients:
        return list(clients.map(lambda body: ask(server, **body), bodies))


def chunks(response: httpx.Response) -> Iterator[Json]:
    """The events of a stream, which must end as it should."""
    if response.status_code != 200:
        raise AssertionError(response.read().decode())
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    lines = [line for line in response.iter_lines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines[-1] == "data: [DONE]", f"the stream ended with {lines[-1]}"
    for line in lines[:-1]:
        yield json.loads(line.removeprefix("data: "))


def _collected(bodies: Sequence[Json]) -> Answer:
    choices: dict[int, ChoiceAnswer] = {}
    assert len({body["id"] for body in bodies}) == 1
    for body in bodies:
        for choice in body["choices"]:
            choices.setdefault(choice["index"], ChoiceAnswer()).take(choice)
    assert sorted(choices) == list(range(len(choices)))
    assert all(choice.finish_reason in {"stop", "length"} for choice in choices.values())
    return Answer([choices[index] for index in range(len(choices))], bodies[-1].get("usage"))


def refusal(server: Server, body: Json | bytes, path: str = "/v1/completions", status: int = 400) -> Json:
    """The error object of a request that is refused before anything is streamed."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    path = path if isinstance(body, bytes) else path_for(body)
    response = server.client.post(path, content=content, headers={"content-type": "application/json"})
    assert (response.status_code, response.headers["content-type"]) == (status, "application/json"), response.text
    (error,) = response.json().values()
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    return dict(error)
