"""The body and the answer of ``/v1/embeddings``: a vector of each input, from any worker that takes prompts.

https://platform.openai.com/docs/api-reference/embeddings
"""

import base64
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Literal

import orjson
from pydantic import Field

from ..core.request import SamplingParams
from .embedding import EmbeddingModel, NoEmbedding
from .openai_api import CacheSalt, CheckedBody, Priority, Prompt
from .openai_errors import ApiError
from .output import Choice, OutputAssembler, OutputDelta, PreparedPrompt
from .prepare import CONTEXT_EXCEEDED, DrawSeed, Limits, PreparedRequest, check_model
from .prompts import prompts_of
from .sampling import check_ids
from .text import TextModel
from .token_usage import token_usage
from .wire_format import WireFormat

PROMPT_ALONE = SamplingParams(max_tokens=0, seed=0)


class EmbeddingRequest(CheckedBody):
    """``POST /v1/embeddings``."""

    model: str | None = None
    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None
    user: str | None = None
    priority: Priority | None = None
    cache_salt: CacheSalt | None = None


class EmbeddingFormat(WireFormat):
    """One JSON body; there is no stream."""

    may_leave_loop = True

    def __init__(
        self, body: EmbeddingRequest, model: EmbeddingModel, prepared: PreparedRequest, unique: str, *_: object
    ) -> None:
        self.id = f"embd-{unique}"
        self._body = body
        self._model = model
        self._model_name = prepared.model_name

    def opening(self, index: int) -> bytes:
        return b""

    def chunk(self, index: int, delta: OutputDelta) -> bytes:
        return b""

    def ending(self, assemblers: Sequence[OutputAssembler]) -> bytes:
        return b""

    def body(self, assemblers: Sequence[OutputAssembler]) -> bytes:
        used = token_usage(assemblers)
        data = [
            {"object": "embedding", "index": assembler.choice.index, "embedding": self._vector(assembler.pooled)}
            for assembler in assemblers
        ]
        usage = {"prompt_tokens": used.num_prompt, "total_tokens": used.num_prompt}
        return orjson.dumps({"object": "list", "data": data, "model": self._model_name, "usage": usage})

    def _vector(self, pooled: bytes) -> str | list[float]:
        vector = self._model.finished(pooled, self._body.dimensions)
        if self._body.encoding_format == "base64":
            return base64.b64encode(vector.tobytes()).decode()
        return vector.tolist()


def prepare_embeddings(body: EmbeddingRequest, text: TextModel, limits: Limits, draw_seed: DrawSeed) -> PreparedRequest:
    """Raises `ApiError`, also where the model does not embed."""
    check_model(body.model, limits.model_name)
    model = embedding_model(text, limits.model_name)
    prompts = prompts_of(body.input, "input", text, limits.vocab_size)
    if len(prompts) > limits.max_choices:
        raise ApiError.invalid("input", f"Invalid 'input': {len(prompts)} inputs, the most is {limits.max_choices}.")
    choices = embedding_choices(prompts, model, body.dimensions, limits)
    return PreparedRequest(
        limits.model_name,
        choices,
        is_stream=False,
        includes_usage=False,
        format=partial(EmbeddingFormat, body, model),
        priority=body.priority,
        cache_salt=body.cache_salt,
    )


def embedding_choices(
    prompts: Sequence[PreparedPrompt], model: EmbeddingModel, num_dimensions: int | None, limits: Limits
) -> tuple[Choice, ...]:
    """One a prompt. Raises `ApiError` for prompts that do not fit and for a length that vectors do not have."""
    _check_dimensions(num_dimensions, model)
    for prompt in prompts:
        _check_input(prompt, limits)
    return tuple(Choice(i, prompt, PROMPT_ALONE, pooling=model.pooling) for i, prompt in enumerate(prompts))


def embedding_model(text: TextModel, model_name: str) -> EmbeddingModel:
    """Raises `ApiError` that says why the model does not embed."""
    if isinstance(text.embedding, NoEmbedding):
        raise ApiError.invalid("model", f"The model '{model_name}' makes no embeddings: {text.embedding.reason}.")
    return text.embedding


def _check_dimensions(wanted: int | None, model: EmbeddingModel) -> None:
    if wanted is None or wanted in model.dimensions:
        return
    if not model.dimensions:
        raise ApiError.invalid("dimensions", "'dimensions' is not supported: this model's vectors can't be cut.")
    known = model.dimensions
    allowed = f"1 to {known[-1]}" if isinstance(known, range) else ", ".join(map(str, known))
    raise ApiError.invalid("dimensions", f"Invalid 'dimensions': {wanted}. This model's vectors can have {allowed}.")


def _check_input(prompt: PreparedPrompt, limits: Limits) -> None:
    num_tokens = len(prompt.token_ids)
    if num_tokens == 0:
        raise ApiError.invalid("input", "Invalid 'input': it is empty, it has no tokens.")
    check_ids("input", prompt.token_ids, limits.vocab_size)
    if num_tokens > limits.max_model_len:
        raise ApiError.invalid(
            "input",
            f"This model's maximum context length is {limits.max_model_len} tokens. However, you requested "
            f"{num_tokens} tokens in the input.",
            CONTEXT_EXCEEDED,
        )
