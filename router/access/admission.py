"""ASGI middleware: a request is let in, counted and given its deadline before any of its body is read."""

from starlette.types import ASGIApp, Receive, Scope, Send

from ..openai_errors import ApiError
from .access import Access
from .request_id import adding_headers


class Admission:
    """Puts the request's `Visit` (``visit``) and `Caller` (``caller``) into its state; refuses with 401 and 429."""

    def __init__(self, app: ASGIApp, access: Access) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            visit = self._access.visit(scope["method"], scope["path"], dict(scope["headers"]))
            if visit.is_limited:
                send = adding_headers(send, visit.headers)
            visit.enter()
        except ApiError as error:
            await error.response()(scope, receive, send)
            return
        scope.setdefault("state", {}).update(visit=visit, caller=visit.caller)
        try:
            await self._app(scope, receive, send)
        finally:
            visit.leave()
