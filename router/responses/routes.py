"""``/v1/responses`` and what is kept of it."""

import asyncio
import time
from functools import partial
from http import HTTPStatus
from typing import TYPE_CHECKING, Annotated, Literal

import orjson
from fastapi import APIRouter, Query
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import ConfigDict, Field

from ..access.caller import Caller
from ..openai_api import Body
from ..openai_errors import ApiError, shown
from ..openapi import WORK_ERRORS, answers, get, post
from ..wire_format import Json
from .answers import DeletedResponse, ItemList, ResponseAnswer, ResponseEvent
from .bodies import ResponseRequest
from .prepare import Keeper, prepare_response
from .store import Turn, turns_to

if TYPE_CHECKING:
    from ..app import Router

EVENTS = (ResponseEvent,)
KEPT_ERRORS = (HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND)


class Parameters(Body):
    """Of a URL, where numbers are texts."""

    model_config = ConfigDict(strict=False)


class RetrieveQuery(Parameters):
    stream: bool | None = None


class ItemsQuery(Parameters):
    """``after`` is the item before the first that is listed; ``desc`` is from the newest to the oldest."""

    after: str | None = None
    limit: Annotated[int, Field(ge=1, le=100)] = 20
    order: Literal["asc", "desc"] = "desc"


def response_routes(router: "Router") -> APIRouter:
    routes = APIRouter()
    kept = KeptResponses(router)
    creation_routes(routes, router, kept)
    retrieval_routes(routes, kept)
    return routes


class KeptResponses:
    """The store, as the keys that ask see it."""

    def __init__(self, router: "Router") -> None:
        self._store = router.responses

    def find(self, http: HttpRequest, response_id: str) -> Turn:
        """Raises `ApiError` 404."""
        turn = self._store.get(_tenant(http), response_id, time.monotonic())
        if turn is None:
            raise ApiError(404, f"Response with id {shown(response_id)} not found.", param="response_id")
        return turn

    def drop(self, turn: Turn) -> None:
        self._store.drop(turn)

    def keeper(self, http: HttpRequest, body: ResponseRequest) -> Keeper:
        """Raises `ApiError` where the request names a response that is not here."""
        if body.store and not self._store.keeps_any:
            raise ApiError.invalid("store", "Invalid 'store': this server keeps no responses.")
        tenant = _tenant(http)
        previous: Turn | None = None
        if body.previous_response_id is not None:
            previous = self._store.get(tenant, body.previous_response_id, time.monotonic())
            if previous is None:
                raise ApiError.invalid(
                    "previous_response_id",
                    f"Previous response with id {shown(body.previous_response_id)} not found.",
                    "previous_response_not_found",
                )
        return Keeper(self._store, tenant, previous, body.store is not False, time.monotonic)


def _tenant(http: HttpRequest) -> str:
    """The key: it never sees the responses of another one, even where they share prefixes of the KV cache."""
    caller: Caller = http.state.caller
    return caller.name


def creation_routes(routes: APIRouter, router: "Router", kept: KeptResponses) -> None:
    @post(
        routes,
        "/v1/responses",
        answers(ResponseAnswer, *WORK_ERRORS, event=ResponseEvent),
        example={"input": "Why is the sky blue?", "max_output_tokens": 32},
    )
    async def create_response(body: ResponseRequest, http: HttpRequest) -> Response:
        """Answer a conversation, given whole or as what follows `previous_response_id`.

        With `stream` as server-sent events, of which the last is `response.completed`, `.incomplete` or `.failed`.
        """
        keeper = kept.keeper(http, body)
        num_bytes = sum(turn.num_bytes for turn in turns_to(keeper.previous))
        return await router.answer(http, partial(prepare_response, body, keeper), num_bytes, body.has_grammar)

    @routes.post(
        "/v1/responses/{response_id}/cancel",
        response_model=None,
        response_class=Response,
        responses=answers(ResponseAnswer, *KEPT_ERRORS),
    )
    async def cancel_response(response_id: str, http: HttpRequest) -> Response:
        """Always refused: only responses made in the background can be cancelled, and none are."""
        kept.find(http, response_id)
        raise ApiError.invalid("response_id", "Only responses created with 'background' true can be cancelled.")


def retrieval_routes(routes: APIRouter, kept: KeptResponses) -> None:
    @get(routes, "/v1/responses/{response_id}", answers(ResponseAnswer, *KEPT_ERRORS))
    async def response(response_id: str, query: Annotated[RetrieveQuery, Query()], http: HttpRequest) -> Response:
        """A response that is still kept."""
        if query.stream:
            raise ApiError.invalid("stream", "'stream' is only supported when a response is created")
        return _json(kept.find(http, response_id).body)

    @routes.delete(
        "/v1/responses/{response_id}",
        response_model=None,
        response_class=Response,
        responses=answers(DeletedResponse, HTTPStatus.NOT_FOUND),
    )
    async def delete_response(response_id: str, http: HttpRequest) -> Response:
        """It cannot be asked for or continued any more; what has continued it already goes on."""
        kept.drop(kept.find(http, response_id))
        return _json(orjson.dumps({"id": response_id, "object": "response", "deleted": True}))

    @get(routes, "/v1/responses/{response_id}/input_items", answers(ItemList, *KEPT_ERRORS))
    async def input_items(response_id: str, query: Annotated[ItemsQuery, Query()], http: HttpRequest) -> Response:
        """The items that a response was the answer to, those of the conversation before it included."""
        turn = kept.find(http, response_id)
        return _json(await asyncio.to_thread(item_list, turn, query))


def item_list(turn: Turn, query: ItemsQuery) -> bytes:
    """One page of it as JSON. Raises `ApiError` where ``after`` is no item of it."""
    items: list[Json] = []
    for each in turns_to(turn):
        items += orjson.loads(each.input_items)
        items += [] if each is turn else orjson.loads(each.body)["output"]
    if query.order == "desc":
        items.reverse()
    start = 0
    if query.after is not None:
        ids = [item["id"] for item in items]
        if query.after not in ids:
            raise ApiError.invalid("after", f"Invalid 'after': there is no item {shown(query.after)}.")
        start = ids.index(query.after) + 1
    page = items[start : start + query.limit]
    ends = {"first_id": page[0]["id"], "last_id": page[-1]["id"]} if page else {"first_id": None, "last_id": None}
    return orjson.dumps({"object": "list", "data": page, **ends, "has_more": start + len(page) < len(items)})


def _json(content: bytes) -> Response:
    return Response(content, media_type="application/json")
