"""ASGI middleware: what a body may be before anything looks at what it says."""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..openai_errors import ApiError
from .visit import Visit

_SQUARE = bytes.maketrans(b"{}", b"[]")
_NO_MARKS = bytes(set(range(256)) - set(b'[]{}"'))

LONG_BODY_BYTES = 64 << 10
"""Longer ones are looked through in a thread, so that others are served meanwhile."""

PIECE_BYTES = 64 << 10


class ClientLeft(Exception):
    """The connection ended within the body."""


class BodyLimits:
    """Reads the whole body of a ``POST`` and refuses what is longer than ``max_bytes`` (413), nests deeper than
    ``max_nesting`` (400), or is not there within ``max_seconds`` or the time that the request has (408)."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_nesting: int, max_seconds: float) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_nesting = max_nesting
        self._max_seconds = max_seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        try:
            body = await self._read(receive, scope["state"]["visit"])
        except ApiError as error:
            await error.response()(scope, receive, send)
        except ClientLeft:
            return
        else:
            await self._app(scope, _replaying(body, receive), send)

    async def _read(self, receive: Receive, visit: Visit) -> bytes:
        left = allowed = self._max_seconds
        if visit.deadline is not None and visit.seconds_left is not None and visit.seconds_left < left:
            left, allowed = visit.seconds_left, visit.deadline.seconds
        try:
            async with asyncio.timeout(left):
                body = await self._joined(receive)
        except TimeoutError:
            raise ApiError(408, f"the request's body did not come within {allowed:g} s") from None
        if await self._is_deep(body):
            raise ApiError.invalid(None, f"The request body nests deeper than {self._max_nesting} levels.")
        return body

    async def _is_deep(self, body: bytes) -> bool:
        if len(body) < LONG_BODY_BYTES:
            return nests_deeper(body, self._max_nesting)
        return await asyncio.to_thread(nests_deeper, body, self._max_nesting)

    async def _joined(self, receive: Receive) -> bytes:
        parts: list[bytes] = []
        num_bytes = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message.get("body", b""))
            num_bytes += len(parts[-1])
            if num_bytes > self._max_bytes:
                raise ApiError(413, f"the request body is longer than {self._max_bytes} bytes")
            if not message.get("more_body", False):
                return b"".join(parts)


def _replaying(body: bytes, receive: Receive) -> Receive:
    """The body once more, then whatever follows."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive_again() -> Message:
        return messages.pop() if messages else await receive()

    return receive_again


def nests_deeper(body: bytes, limit: int) -> bool:
    """Whether arrays and objects of a JSON text nest deeper than ``limit``; of a text that is none, whether a parser
    might get that deep. A few passes over the bytes, whatever they are."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    marks = body.replace(b"\\\\", b"").replace(b'\\"', b"").translate(_SQUARE, _NO_MARKS)
    brackets = _outside_of_strings(marks)
    for _ in range(limit):
        outer = brackets.replace(b"[]", b"")
        if len(outer) == len(brackets):
            break
        brackets = outer
    return b"[]" in brackets or brackets.count(b"[") > limit


def _outside_of_strings(marks: bytes) -> bytes:
    """Piece by piece, because millions of quotes would become millions of objects."""
    outside: list[bytes] = []
    is_inside = False
    for start in range(0, len(marks), PIECE_BYTES):
        parts = marks[start : start + PIECE_BYTES].split(b'"')
        outside.append(b"".join(parts[is_inside::2]))
        is_inside ^= len(parts) % 2 == 0
    return b"".join(outside)
