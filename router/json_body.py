"""From the bytes of a request's body to the model that describes it, in a thread where that takes long."""

import asyncio
import json
from email.message import Message
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from .openai_errors import ApiError, of_validation

LONG_BODY_BYTES = 8 << 10
"""Longer ones are worked on in a thread; for shorter ones the switch would cost more."""

Model = TypeVar("Model", bound=BaseModel)


async def json_body(http: Request, model: type[Model]) -> Model:
    """Raises `ApiError` 400."""
    data = await http.body()
    media_type = http.headers.get("content-type", "")
    if len(data) < LONG_BODY_BYTES:
        return parsed(data, media_type, model)
    return await asyncio.to_thread(parsed, data, media_type, model)


def parsed(data: bytes, media_type: str, model: type[Model]) -> Model:
    """Raises `ApiError` 400."""
    if not data:
        raise ApiError.invalid(None, "The body is missing.")
    if not _is_json(media_type):
        raise ApiError.invalid(None, "The body must be JSON, with the header 'content-type: application/json'.")
    try:
        return model.model_validate(json.loads(data))
    except ValidationError as error:
        raise of_validation(error.errors(include_url=False)) from None
    except json.JSONDecodeError as error:
        raise ApiError.invalid(None, f"The request body is no valid JSON: {error.msg}.") from None
    except ValueError:  # bytes that are no text, an integer of thousands of digits
        raise ApiError.invalid(None, "The request body is no valid JSON.") from None


def _is_json(media_type: str) -> bool:
    if media_type == "application/json":  # nearly always
        return True
    header = Message()
    header["content-type"] = media_type
    subtype = header.get_content_subtype()
    return header.get_content_maintype() == "application" and (subtype == "json" or subtype.endswith("+json"))
