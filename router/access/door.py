"""The door in front of an application: the middleware of this package, in the one order that is right."""

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from ...core.config import DoorConfig
from .access import Access
from .account import Limit
from .admission import Admission
from .body import BodyLimits
from .request_id import HEADER, RequestIds

RATE_LIMITS = tuple(
    f"x-ratelimit-{what}-{limit}"
    for limit in (Limit.REQUESTS, Limit.TOKENS)
    for what in ("limit", "remaining", "reset")
)


def stand_before(app: FastAPI, access: Access, config: DoorConfig) -> None:
    """What comes later here is further out: a preflight needs no key, and an id is on every answer."""
    app.add_middleware(
        BodyLimits,
        max_bytes=config.max_body_bytes,
        max_nesting=config.max_nesting,
        max_seconds=config.body_timeout_seconds,
    )
    app.add_middleware(Admission, access=access)
    if config.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=config.cors_origins,
            allow_methods=("GET", "HEAD", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=(HEADER, "retry-after", *RATE_LIMITS),
        )
    app.add_middleware(RequestIds)
