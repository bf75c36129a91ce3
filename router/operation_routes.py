"""For whoever runs the server: ``/health``, ``/ready``, ``/version``, ``/metrics``."""

from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter
from fastapi.responses import Response
from prometheus_client import CONTENT_TYPE_LATEST

from ..core.messages import Role
from ..core.version import VERSION
from .openai_answers import Readiness, Version
from .openapi import Answers, answers, failures, get, plain

if TYPE_CHECKING:
    from .app import Router

_HEALTH: Answers = {
    **failures(),
    200: {"description": "It serves"},
    503: {"description": "It does not; `/ready` says why"},
}
_READY: Answers = {**answers(Readiness), 503: {"model": Readiness, "description": "Not able to serve, and why"}}


def operation_routes(router: "Router") -> APIRouter:
    routes = APIRouter()

    @get(routes, "/health", _HEALTH)
    async def health() -> Response:
        """200 while requests are taken; the body is empty."""
        return Response(status_code=200 if router.is_ready else 503)

    @get(routes, "/ready", _READY)
    async def ready() -> Response:
        """The same as `/health`, with the reasons."""
        reasons = unreadiness(router)
        workers = {role.value: sum(worker.card.role is role for worker in router.dispatcher.fleet) for role in Role}
        body = orjson.dumps({"is_ready": not reasons, "reasons": reasons, "workers": workers})
        return Response(body, 503 if reasons else 200, media_type="application/json")

    @get(routes, "/version", answers(Version))
    async def version() -> Response:
        """Of this server."""
        return Response(orjson.dumps({"version": VERSION}), media_type="application/json")

    @get(routes, "/metrics", plain("text/plain", "Prometheus' text format"))
    async def metrics() -> Response:
        """Numbers of the router and of all workers."""
        return Response(router.metrics.render(), media_type=CONTENT_TYPE_LATEST)

    return routes


def unreadiness(router: "Router") -> list[str]:
    """Why no request is taken now; empty when one would be."""
    reasons = ["the router is shutting down"] if router.is_draining else []
    fleet = router.dispatcher.fleet
    if fleet.pairs():
        return reasons
    accepting = [worker for worker in fleet if worker.load.is_accepting]
    missing = [
        f"no worker that {does} is here"
        for does, is_one in (
            ("prefills", any(worker.card.role.prefills for worker in accepting)),
            ("decodes", any(worker.card.role.decodes for worker in accepting)),
        )
        if not is_one
    ]
    return reasons + (missing or ["no prefill worker has a working transport to a decode worker yet"])
