"""``/status.json``: what the status page shows. Numbers only; nothing of any request's content."""

import time
from dataclasses import astuple
from typing import TYPE_CHECKING, Annotated

import msgspec
import orjson
from fastapi import APIRouter, Query
from fastapi.responses import Response

from ..core.messages import PROTOCOL_VERSION, Link, Role
from ..core.version import VERSION
from .fleet import Fleet, Refusal, Worker
from .history import FIELDS
from .openai_answers import Answer
from .openapi import answers, get
from .operation_routes import unreadiness

if TYPE_CHECKING:
    from .app import Router


class Requests(Answer):
    """At this moment, and since the start: by reason of the end, refused for want of capacity, started again."""

    running: int
    waiting: int
    ended: dict[str, int]
    refused: int
    retries: int


class TriedStatus(Answer):
    """What the probe found of one transport; ``error`` is empty where it works."""

    name: str
    bytes_per_second: float
    latency_seconds: float
    error: str
    detail: str


class LinkStatus(Answer):
    """The outcome of probing one decode worker; ``error`` is empty where it works."""

    to: str
    transport: str
    bytes_per_second: float
    latency_seconds: float
    error: str
    tried: list[TriedStatus]


class RefusalStatus(Answer):
    """A worker that could not join, and how long ago it last tried."""

    name: str
    reason: str
    seconds_ago: float


class WorkerStatus(Answer):
    """As its last heartbeat told."""

    name: str
    role: str
    is_accepting: bool
    seconds_since_heard: float
    blocks: dict[str, int]
    """By state; together they are its pool."""
    running: int
    waiting: int
    arriving: int
    kept_for_decode: int
    queued_prompt_tokens: int
    preemptions: int
    resident_bytes: int
    transports: list[str]
    links: list[LinkStatus]


class HistoryStatus(Answer):
    """``points`` are numbered up to ``next``, exclusively; each has a value a field, the first its age in seconds."""

    next: int
    fields: list[str]
    points: list[list[float | None]]


class Status(Answer):
    version: str
    protocol: int
    """Of the messages between router and workers; all must speak the same."""
    model: str
    max_model_len: int
    block_size: int
    has_chat_template: bool
    uptime_seconds: float
    is_ready: bool
    reasons: list[str]
    requests: Requests
    workers: list[WorkerStatus]
    refused: list[RefusalStatus]
    history: HistoryStatus


def status_routes(router: "Router") -> APIRouter:
    routes = APIRouter()

    @get(routes, "/status.json", answers(Status))
    async def status(after: Annotated[int, Query(ge=0)] = 0) -> Response:
        """Workers, requests in flight and the last minutes; of these the points from number `after` on."""
        return Response(orjson.dumps(_status(router, after, time.monotonic())), media_type="application/json")

    return routes


def _status(router: "Router", after: int, now: float) -> dict[str, object]:
    fleet, reasons, card = router.dispatcher.fleet, unreadiness(router), router.dispatcher.fleet.card
    return {
        "version": VERSION,
        "protocol": PROTOCOL_VERSION,
        "model": router.model_name,
        "max_model_len": fleet.max_model_len(),
        "block_size": card.layout.block_size if card is not None else 0,
        "has_chat_template": router.text.template is not None,
        "uptime_seconds": time.time() - router.started_at,
        "is_ready": not reasons,
        "reasons": reasons,
        "requests": _requests(router),
        "workers": [_worker(worker, fleet, now) for worker in sorted(fleet, key=_place)],
        "refused": [_refusal(refusal, now) for refusal in fleet.refusals],
        "history": _history(router, after, now),
    }


def _requests(router: "Router") -> dict[str, object]:
    ledger, counts = router.dispatcher.ledger, router.metrics.counts
    num_running = ledger.num_running
    return {
        "running": num_running,
        "waiting": len(ledger) - num_running,
        "ended": {reason.value: count for reason, count in counts.ended.items()},
        "refused": counts.refusals,
        "retries": counts.retries,
    }


def _place(worker: Worker) -> tuple[int, str]:
    """Prefill workers come first."""
    return (list(Role).index(worker.card.role), worker.name)


def _worker(worker: Worker, fleet: Fleet, now: float) -> dict[str, object]:
    load = worker.load
    return {
        "name": worker.name,
        "role": worker.card.role,
        "is_accepting": load.is_accepting,
        "seconds_since_heard": now - worker.heard_at,
        "blocks": msgspec.structs.asdict(load.books),
        "running": load.num_running,
        "waiting": load.num_waiting,
        "arriving": load.num_arriving,
        "kept_for_decode": load.num_kept_for_decode,
        "queued_prompt_tokens": load.num_queued_prompt_tokens,
        "preemptions": load.total_preemptions,
        "resident_bytes": load.resident_bytes,
        "transports": [transport.name for transport in worker.card.transports],
        "links": [_link(link, fleet) for link in worker.links.values()],
    }


def _link(link: Link, fleet: Fleet) -> dict[str, object]:
    to = next((worker.name for worker in fleet if worker.incarnation == link.to), link.to)
    return {
        "to": to,
        "transport": link.transport,
        "bytes_per_second": link.bytes_per_second,
        "latency_seconds": link.latency_seconds,
        "error": link.error,
        "tried": [msgspec.structs.asdict(tried) for tried in link.tried],
    }


def _refusal(refusal: Refusal, now: float) -> dict[str, object]:
    return {"name": refusal.name, "reason": refusal.reason, "seconds_ago": now - refusal.at}


def _history(router: "Router", after: int, now: float) -> dict[str, object]:
    history = router.metrics.history
    points = [[now - at, *values] for at, *values in map(astuple, history.since(after))]
    return {"next": history.num_points, "fields": ["age_seconds", *FIELDS[1:]], "points": points}
