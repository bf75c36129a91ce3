"""What ``/openapi.json`` says: every path, every field of every body, every status with the form of its answer.

Route files describe their routes with `answers`, `get` and `post`; `DescribedApp` puts it together. An endpoint that
can answer with a status says so, and the other way round.
"""

from collections.abc import Callable, Coroutine
from typing import Any, get_type_hints

from fastapi import APIRouter, FastAPI
from fastapi.openapi.utils import get_openapi
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import Response

from ..core.version import VERSION
from .json_body import json_body
from .openai_answers import ErrorAnswer

Answers = dict[int | str, dict[str, Any]]
Endpoint = Callable[..., Coroutine[Any, Any, Response]]
WorkEndpoint = Callable[[Any, Request], Coroutine[Any, Any, Response]]

ALWAYS = (400, 500)
"""Of every endpoint: a request id that nobody can use, a fault of ours."""
KEY_ERRORS = (401, 429)
"""Of every endpoint that a key may be needed for."""
WORK_ERRORS = (*KEY_ERRORS, 404, 408, 413, 503, 504)
"""Of every endpoint that reads a body and may give work to the model that the body names."""

_MEANINGS: dict[int, str] = {
    400: "The request is not valid; `param` names the field",
    401: "The API key is missing or unknown",
    404: "No such model or object",
    408: "The body did not come in the time that the request has",
    413: "The body is too long",
    429: "A limit of the API key is reached; `retry-after` says when to come again",
    500: "A fault of the server",
    503: "No capacity at the moment; `retry-after` says when to come again",
    504: "The time is over that the header `x-request-timeout` (seconds) or the server gives the request",
}

_DESCRIPTION = (
    "OpenAI's API, served by prefill and decode workers. Errors have one form everywhere; "
    "unknown fields are refused by name. Every answer carries `x-request-id`: the request's own, or a new one."
)


def answers(body: type[BaseModel], *errors: int, event: type[BaseModel] | None = None) -> Answers:
    """For ``responses=`` of a route: 200 with ``body``, or events of which each is an ``event``; then its errors."""
    content: dict[str, Any] = {}
    if event is not None:
        content["text/event-stream"] = {"itemSchema": _event_schema(event)}
    found: Answers = {200: {"model": body, "content": content, "description": "The answer"}}
    return found | failures(*errors)


def failures(*errors: int) -> Answers:
    """These, and those that every endpoint has."""
    return {status: {"model": ErrorAnswer, "description": _MEANINGS[status]} for status in sorted({*errors, *ALWAYS})}


def _event_schema(event: type[BaseModel]) -> dict[str, Any]:
    """A server-sent event whose data is JSON; the last of a stream that ends well is ``[DONE]``."""
    schema = {"$ref": f"#/components/schemas/{event.__name__}"}
    content = {"type": "string", "contentMediaType": "application/json", "contentSchema": schema}
    data = {"anyOf": [{"const": "[DONE]"}, content]}
    return {"type": "object", "properties": {"data": data}, "required": ["data"]}


def plain(media_type: str, description: str) -> Answers:
    """For ``responses=`` of a route that answers with a text."""
    found: Answers = {200: {"description": description, "content": {media_type: {"schema": {"type": "string"}}}}}
    return found | failures()


def get(routes: APIRouter, path: str, responses: Answers) -> Callable[[Endpoint], Endpoint]:
    """A decorator: the endpoint answers GET, and HEAD, which needs no description of its own."""

    def register(endpoint: Endpoint) -> Endpoint:
        # The first route serves, and tells other methods what is allowed; the second is there to be described.
        routes.api_route(path, methods=["GET", "HEAD"], response_model=None, include_in_schema=False)(endpoint)
        routes.get(path, response_model=None, response_class=Response, responses=responses)(endpoint)
        return endpoint

    return register


def post(
    routes: APIRouter, path: str, responses: Answers, example: dict[str, object]
) -> Callable[[WorkEndpoint], WorkEndpoint]:
    """A decorator: the endpoint, of a body and the request that it came in, answers POST.

    ``example`` is a body that works with any model, for the description.
    """
    extra = {"requestBody": {"content": {"application/json": {"example": example}}}}

    def register(endpoint: WorkEndpoint) -> WorkEndpoint:
        model = get_type_hints(endpoint)["body"]

        async def serve(http: Request) -> Response:
            return await endpoint(await json_body(http, model), http)

        # As above: the first serves, since FastAPI's own way with bodies holds up the event loop for a long one.
        routes.post(path, response_model=None, include_in_schema=False)(serve)
        routes.post(path, response_model=None, response_class=Response, responses=responses, openapi_extra=extra)(
            endpoint
        )
        return endpoint

    return register


def _operation_id(route: APIRoute) -> str:
    return route.name


class DescribedApp(FastAPI):
    """An app whose description is complete. ``events`` are the bodies that occur in event streams alone."""

    def __init__(self, events: tuple[type[BaseModel], ...], **settings: Any) -> None:
        super().__init__(
            title="Crossdock",
            version=VERSION,
            description=_DESCRIPTION,
            docs_url=None,
            redoc_url=None,
            generate_unique_id_function=_operation_id,
            **settings,
        )
        self._events = events

    def openapi(self) -> dict[str, Any]:
        """Made once. A validation error is a 400 here, not FastAPI's 422."""
        if self.openapi_schema is None:
            schema = get_openapi(
                title=self.title, version=self.version, description=self.description, routes=self.routes
            )
            schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            schema["security"] = [{}, {"key": []}]  # a server may ask for keys or not
            schemas = schema["components"]["schemas"]
            for path in schema["paths"].values():
                for operation in path.values():
                    operation["responses"].pop("422", None)
            for name in ("HTTPValidationError", "ValidationError"):
                schemas.pop(name, None)
            for event in self._events:
                definition = event.model_json_schema(ref_template="#/components/schemas/{model}")
                schemas |= definition.pop("$defs", {})
                schemas[event.__name__] = definition
            self.openapi_schema = schema
        return self.openapi_schema
