"""Errors as OpenAI's clients expect them: ``{"error": {"message", "type", "param", "code"}}``.

https://platform.openai.com/docs/guides/error-codes
"""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from reprlib import Repr
from typing import Any, Self

import orjson
from fastapi.exceptions import RequestValidationError
from pydantic_core import PydanticCustomError
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RATE_LIMITED = "rate_limit_exceeded"

_shortened = Repr()
_shortened.maxstring = _shortened.maxother = 80


class ApiError(Exception):
    """An answer that is no result. ``param`` names the field at fault, ``retry_after`` is in seconds.

    ``headers`` go with it.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after = retry_after
        self.headers = dict(headers or {})
        if retry_after is not None:
            self.headers["retry-after"] = str(retry_after)

    @classmethod
    def invalid(cls, param: str | None, message: str, code: str | None = None) -> "ApiError":
        return cls(400, message, param=param, code=code)

    @classmethod
    def unknown_model(cls, model: str) -> "ApiError":
        return cls(404, f"The model {shown(model)} does not exist.", param="model", code="model_not_found")

    @classmethod
    def overloaded(cls, message: str, retry_after: int = 1) -> "ApiError":
        return cls(503, message, type=SERVER_ERROR, code="overloaded", retry_after=retry_after)

    @classmethod
    def unauthorized(cls, message: str) -> "ApiError":
        return cls(401, message, code="invalid_api_key", headers={"www-authenticate": "Bearer"})

    @classmethod
    def timed_out(cls, seconds: float) -> "ApiError":
        """The time that the client or this server allows is over; OpenAI's clients are told not to try again."""
        message = f"the request took longer than {seconds:g} s"
        return cls(504, message, type=SERVER_ERROR, code="timeout", headers={"x-should-retry": "false"})

    @classmethod
    def internal(cls, message: str) -> "ApiError":
        return cls(500, message, type=SERVER_ERROR)

    def bare(self) -> Self:
        """Without where it came from: tracebacks keep frames, and those the whole request."""
        self.__traceback__ = self.__context__ = self.__cause__ = None
        return self

    def body(self) -> bytes:
        texts = (self.message, self.type, self.param, self.code)
        message, kind, param, code = (text and encodable(text) for text in texts)
        return orjson.dumps({"error": {"message": message, "type": kind, "param": param, "code": code}})

    def event(self) -> bytes:
        """The last event of a stream that fails; no ``[DONE]`` follows."""
        return b"data: " + self.body() + b"\n\n"

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, "application/json")


def encodable(text: str) -> str:
    """Lone surrogates, which a client's JSON may smuggle in, become question marks."""
    return text.encode("utf-8", "replace").decode()


def shown(value: object) -> str:
    """A client's value as a message may quote it, however long it is."""
    return _shortened.repr(value)


def refusal(field: str, reason: str) -> PydanticCustomError:
    """For validators: ``field`` is at fault, of those that the raising one sees."""
    return PydanticCustomError("refused", "{reason}", {"field": field, "reason": reason})


Problem = Mapping[str, Any]
"""One of pydantic's ``errors()``."""


def of_validation(problems: Sequence[Problem]) -> ApiError:
    """pydantic's problems with one body, told by the first field that has any.

    For a field that may have several types pydantic reports what is wrong with it as each of them; the problem that
    lies deepest belongs to the type that was meant.
    """
    top = _path(problems[0])[:1]
    same_field = [problem for problem in problems if _path(problem)[:1] == top]
    worst = max(same_field, key=lambda problem: len(_path(problem)))
    param = ".".join(_path(worst)) or None
    match worst["type"]:
        case "unknown":
            name = ".".join(_path(worst))
            return ApiError.invalid(name, f"Unknown parameter: '{name}'.", "unknown_parameter")
        case "missing":
            return ApiError.invalid(param, f"Missing required parameter: '{param}'.")
        case "refused":
            return ApiError.invalid(param, f"{worst['msg']}.")
    reasons = dict.fromkeys(str(problem["msg"]) for problem in same_field if _path(problem) == _path(worst))
    return ApiError.invalid(
        param, f"Invalid '{param or 'body'}': {', or '.join(reasons)}. Got {shown(worst['input'])}."
    )


def _path(problem: Problem) -> list[str]:
    """``["messages", "0", "content"]``, without pydantic's names for the types of a union.

    A check of several fields together names the one at fault itself.
    """
    source, *rest = problem["loc"] or ("",)
    place = rest if source in ("body", "query") else problem["loc"]
    field = problem.get("ctx", {}).get("field")
    return [*_fields(place), *([] if field is None else [field])]


def _fields(place: Sequence[str | int]) -> list[str]:
    return [str(part) for part in place if isinstance(part, int) or (part.isidentifier() and part not in _TYPE_NAMES)]


_TYPE_NAMES = {"str", "int", "float", "bool", "none", "TextPart"}


_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")


async def _answer_api_error(request: Request, error: ApiError) -> Response:
    """The error stays in the request's state, for whoever tells of the request after its end."""
    request.state.error = error.bare()
    return error.response()


async def _answer_validation(request: Request, error: RequestValidationError) -> Response:
    return await _answer_api_error(request, of_validation(error.errors()))


async def _answer_http(request: Request, error: HTTPException) -> Response:
    kind = INVALID_REQUEST if error.status_code < 500 else SERVER_ERROR
    headers = {"allow": ", ".join(_methods_of(request))} if error.status_code == 405 else error.headers
    told = ApiError(error.status_code, str(error.detail), type=kind, headers=headers)
    return await _answer_api_error(request, told)


def _methods_of(request: Request) -> list[str]:
    """What any route does with the request's path; Starlette names the methods of the first route alone."""
    scopes = [{**request.scope, "method": method} for method in _METHODS]
    return [
        scope["method"]
        for scope in scopes
        if any(route.matches(scope)[0] is Match.FULL for route in request.app.routes)
    ]


async def _answer_fault(request: Request, error: Exception) -> Response:
    """The server logs the fault itself; the client is not told its inside.

    This answer is sent outside of all middleware, so that its id has to be put in here.
    """
    response = ApiError.internal("The server had an error while processing the request.").response()
    response.headers["x-request-id"] = request.state.request_id
    return response


Handler = Callable[[Request, Any], Coroutine[Any, Any, Response]]

exception_handlers: dict[int | type[Exception], Handler] = {
    ApiError: _answer_api_error,
    RequestValidationError: _answer_validation,
    HTTPException: _answer_http,
    Exception: _answer_fault,
}
"""For ``FastAPI(exception_handlers=…)``: every error in OpenAI's form, and 400 where FastAPI would say 422."""
