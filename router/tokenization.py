"""``/tokenize`` and ``/detokenize``: a prompt in tokens by the same way that a completion takes, and back.

Both are vLLM's: https://docs.vllm.ai/en/latest/serving/openai_compatible_server.html
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import orjson
from fastapi import APIRouter
from fastapi import Request as HttpRequest
from fastapi.responses import Response
from pydantic import Field, JsonValue

from .openai_answers import Detokenized, Tokenized
from .openai_api import ChatCompletionRequest, CheckedBody, Message, TokenIds
from .openai_errors import ApiError
from .openapi import WORK_ERRORS, answers, post
from .prepare import check_model
from .prompts import chat_prompt
from .sampling import check_ids
from .text import TextModel

if TYPE_CHECKING:
    from .app import Router


class TokenizeRequest(CheckedBody):
    """``POST /tokenize``: a ``prompt`` or ``messages``.

    ``add_special_tokens`` is true where nothing else is said for a prompt and false for messages, whose template
    writes the special tokens itself. The fields after it are those of a chat.
    """

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None


class DetokenizeRequest(CheckedBody):
    """``POST /detokenize``."""

    model: str | None = None
    tokens: TokenIds


def prompt_ids(body: TokenizeRequest, text: TextModel) -> list[int]:
    """Raises `ApiError` for fields that do not go together, and where the chat template refuses the messages."""
    if (body.prompt is None) == (body.messages is None):
        raise ApiError.invalid("prompt", "One of 'prompt' and 'messages' is needed, and not both.")
    if body.prompt is not None:
        _check_is_no_chat(body)
        return (text.encode if body.add_special_tokens is not False else text.encode_chat)(body.prompt).ids
    if body.add_generation_prompt and body.continue_final_message:
        raise ApiError.invalid(
            "continue_final_message", "'continue_final_message' and 'add_generation_prompt' exclude each other."
        )
    chat = ChatCompletionRequest.model_construct(
        messages=body.messages,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    prompt = chat_prompt(chat, text)
    return text.encode(prompt.text).ids if body.add_special_tokens else prompt.token_ids


def _check_is_no_chat(body: TokenizeRequest) -> None:
    for field in ("add_generation_prompt", "continue_final_message", "chat_template_kwargs"):
        if getattr(body, field) is not None:
            raise ApiError.invalid(field, f"'{field}' is only allowed with 'messages'.")


def token_strs(token_ids: Sequence[int], text: TextModel) -> list[str | None]:
    """As the vocabulary spells them: ``Ġhello`` is a token that begins with a blank."""
    return [text.tokenizer.id_to_token(token_id) for token_id in token_ids]


def tokenized(body: TokenizeRequest, text: TextModel, max_model_len: int) -> bytes:
    """The answer as JSON; raises `ApiError`."""
    ids = prompt_ids(body, text)
    strings = {"token_strs": token_strs(ids, text)} if body.return_token_strs else {}
    return orjson.dumps({"count": len(ids), "max_model_len": max_model_len, "tokens": ids, **strings})


def tokenization_routes(router: "Router") -> APIRouter:
    routes = APIRouter()

    @post(
        routes,
        "/tokenize",
        answers(Tokenized, *WORK_ERRORS),
        example={"prompt": "The capital of France is", "return_token_strs": True},
    )
    async def tokenize(body: TokenizeRequest, http: HttpRequest) -> Response:
        """The tokens of a text, or of messages in the model's chat template, as a completion would see them."""
        check_model(body.model, router.model_name)
        answer = await asyncio.to_thread(tokenized, body, router.text, router.limits().max_model_len)
        return Response(answer, media_type="application/json")

    @post(
        routes,
        "/detokenize",
        answers(Detokenized, *WORK_ERRORS),
        example={"tokens": [0, 1, 2]},
    )
    async def detokenize(body: DetokenizeRequest, http: HttpRequest) -> Response:
        """The text of tokens, special ones included."""
        check_model(body.model, router.model_name)
        check_ids("tokens", body.tokens, router.limits().vocab_size)
        prompt = await asyncio.to_thread(router.text.decode, body.tokens, skips_special=False)
        return Response(orjson.dumps({"prompt": prompt}), media_type="application/json")

    return routes
