"""``/v1/chat/completions`` and ``/v1/completions``."""

from functools import partial
from typing import TYPE_CHECKING

from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from .openai_answers import ChatCompletion, ChatCompletionChunk, TextCompletion
from .openai_api import ChatCompletionRequest, CompletionRequest
from .openapi import WORK_ERRORS, answers, post
from .prepare import prepare_chat, prepare_completion

if TYPE_CHECKING:
    from .app import Router

EVENTS = (ChatCompletionChunk, TextCompletion)


def completion_routes(router: "Router") -> APIRouter:
    routes = APIRouter()

    @post(
        routes,
        "/v1/chat/completions",
        answers(ChatCompletion, *WORK_ERRORS, event=ChatCompletionChunk),
        example={"messages": [{"role": "user", "content": "Why is the sky blue?"}], "max_tokens": 32},
    )
    async def chat_completions(body: ChatCompletionRequest, http: HttpRequest) -> Response:
        """Answer a conversation, whole or, with `stream`, as server-sent events that end with `[DONE]`."""
        return await router.answer(http, partial(prepare_chat, body), compiles=body.has_grammar)

    @post(
        routes,
        "/v1/completions",
        answers(TextCompletion, *WORK_ERRORS, event=TextCompletion),
        example={"prompt": "The capital of France is", "max_tokens": 8, "temperature": 0},
    )
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        """Go on with a text or with token ids, whole or streamed."""
        return await router.answer(http, partial(prepare_completion, body), compiles=body.has_grammar)

    return routes
