"""``/v1/embeddings``."""

from functools import partial
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from .embedding_api import EmbeddingRequest, prepare_embeddings
from .openai_answers import EmbeddingList
from .openapi import WORK_ERRORS, answers, post

if TYPE_CHECKING:
    from .app import Router


def embedding_routes(router: "Router") -> APIRouter:
    routes = APIRouter()

    @post(
        routes,
        "/v1/embeddings",
        answers(EmbeddingList, *WORK_ERRORS),
        example={"input": ["a text", "another one"]},
    )
    async def embeddings(body: EmbeddingRequest, http: HttpRequest) -> Response:
        """A vector of each input, where the model's files, or the flag `--pooling`, say how it is made."""
        return await router.answer(http, partial(prepare_embeddings, body))

    return routes
