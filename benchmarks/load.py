"""Open-loop load client for any OpenAI-compatible endpoint.

Requests are sent when they arrive, however slow the server is, and their latencies count from there: a server
that falls behind is seen to do so. With ``max_concurrency`` the loop is closed instead: a request arrives when
one before it has ended.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field

import httptools
import msgspec
import orjson
import uvloop

from .report import LoadReport, Outcome, Targets, summarise
from .sse_client import HttpRequest, exchange
from .stream_meter import StreamMeter
from .workload import LoadRequest

clock = time.perf_counter


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where requests go. ``url`` is that of the server, with or without ``/v1``."""

    url: str
    model: str
    api_key: str = ""
    is_chat: bool = False
    """Send prompts, which must be text then, to the chat endpoint, else to completions."""
    extra: dict[str, object] = field(default_factory=dict)
    """Further fields of every request's body."""

    def http_request(self, request: LoadRequest) -> HttpRequest:
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": request.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.is_chat:
            path = "chat/completions"
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            path = "completions"
            body["prompt"] = request.prompt
        return HttpRequest("POST", api_url(self.url, path), orjson.dumps(body | self.extra), self.api_key)


@dataclass(frozen=True, slots=True)
class LoadSpec:
    """One run: whom to ask, what and when, and what would have been good enough."""

    endpoint: Endpoint
    requests: tuple[LoadRequest, ...]
    max_concurrency: int | None = None
    timeout_seconds: float = 600.0
    """A request that takes longer has failed."""
    targets: Targets = field(default_factory=Targets)
    num_gpus: int = 1


class ModelCard(msgspec.Struct):
    id: str


class ModelList(msgspec.Struct):
    data: list[ModelCard]


def api_url(url: str, path: str) -> str:
    return f"{url.rstrip('/').removesuffix('/v1')}/v1/{path}"


def first_model(url: str, api_key: str = "") -> str:
    """The first model that the endpoint names; raises ``ConnectionError`` or another ``OSError`` if it names none."""
    body = bytearray()
    status = uvloop.run(exchange(HttpRequest("GET", api_url(url, "models"), api_key=api_key), body.extend))
    if status != 200:
        raise ConnectionError(f"HTTP {status} from {api_url(url, 'models')}")
    models = msgspec.json.decode(bytes(body), type=ModelList).data
    if not models:
        raise ConnectionError(f"{url} serves no model")
    return models[0].id


def ignore_outcome(outcome: Outcome) -> None:
    """For runs that nobody watches."""


def run_load(spec: LoadSpec, on_done: Callable[[Outcome], None] = ignore_outcome) -> LoadReport:
    """Send everything, wait for all answers, and sum up; ``on_done`` hears of each as it ends."""
    started_at = clock()
    outcomes = uvloop.run(run_requests(spec, on_done))
    return summarise(outcomes, clock() - started_at, spec.targets, spec.num_gpus)


async def run_requests(spec: LoadSpec, on_done: Callable[[Outcome], None]) -> list[Outcome]:
    """Outcomes in the order of the requests."""
    started_at = clock()
    gate = asyncio.Semaphore(spec.max_concurrency) if spec.max_concurrency else None

    async def at_its_time(request: LoadRequest) -> Outcome:
        scheduled_at = started_at + request.at_seconds
        await asyncio.sleep(scheduled_at - clock())
        async with gate or nullcontext():
            outcome = await measure(spec, request, clock() if gate else scheduled_at)
        on_done(outcome)
        return outcome

    return list(await asyncio.gather(*map(at_its_time, spec.requests)))


async def measure(spec: LoadSpec, request: LoadRequest, arrived_at: float) -> Outcome:
    """One request from its arrival to its last byte; every failure of server or network is an outcome."""
    meter = StreamMeter(arrived_at, clock)
    try:
        async with asyncio.timeout(spec.timeout_seconds):
            status = await exchange(spec.endpoint.http_request(request), meter.feed)
    except TimeoutError:
        return Outcome(error=f"no complete answer in {spec.timeout_seconds:g} s")
    except (OSError, httptools.HttpParserError) as error:
        return Outcome(error=f"{type(error).__name__}: {error}")
    return meter.outcome(status)
