"""Every answer carries ``x-request-id``: the client's own, or a new one."""

import re
import secrets
from collections.abc import Awaitable, Callable, Mapping

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ..openai_errors import ApiError

HEADER = "x-request-id"
_ACCEPTABLE = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")


class RequestIds:
    """ASGI middleware: puts ``request_id`` into the request's state and into the answer's headers.

    An id that could break a log or a header is refused with 400.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(HEADER.encode())
        is_acceptable = given is not None and _ACCEPTABLE.fullmatch(given) is not None
        request_id = given.decode() if given is not None and is_acceptable else f"req_{secrets.token_hex(16)}"
        scope.setdefault("state", {})["request_id"] = request_id
        sending = adding_headers(send, lambda: {HEADER: request_id})
        if given is None or is_acceptable:
            await self._app(scope, receive, sending)
        else:
            reason = "it must be 1 to 128 letters, digits or any of ._:/+=@-"
            await ApiError.invalid(HEADER, f"Invalid '{HEADER}': {reason}.").response()(scope, receive, sending)


def adding_headers(send: Send, headers: Callable[[], Mapping[str, str]]) -> Send:
    """Put ``headers``, asked for when the answer starts, into it; costs the messages after it next to nothing."""

    def send_with_headers(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            added = [(name.encode(), value.encode()) for name, value in headers().items()]
            message["headers"] = [*message.get("headers", ()), *added]
        return send(message)

    return send_with_headers
