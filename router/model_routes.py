"""``/v1/models``: there is one."""

from typing import TYPE_CHECKING

import orjson
from fastapi import APIRouter
from fastapi.responses import Response

from .openai_answers import ModelCard, ModelList
from .openai_errors import ApiError
from .openapi import KEY_ERRORS, answers, get

if TYPE_CHECKING:
    from .app import Router


def model_routes(router: "Router") -> APIRouter:
    routes = APIRouter()

    @get(routes, "/v1/models", answers(ModelList, *KEY_ERRORS))
    async def list_models() -> Response:
        """The one model that is served here."""
        listed = {"object": "list", "data": [_model_card(router)]}
        return Response(orjson.dumps(listed), media_type="application/json")

    @get(routes, "/v1/models/{model:path}", answers(ModelCard, *KEY_ERRORS, 404))
    async def retrieve_model(model: str) -> Response:
        """A model by its name, which may hold slashes."""
        if model != router.model_name:
            raise ApiError.unknown_model(model)
        return Response(orjson.dumps(_model_card(router)), media_type="application/json")

    return routes


def _model_card(router: "Router") -> dict[str, str | int]:
    return {
        "id": router.model_name,
        "object": "model",
        "created": router.started_at,
        "owned_by": "crossdock",
        "max_model_len": router.dispatcher.fleet.max_model_len(),
    }
