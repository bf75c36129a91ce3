"""The same door for offline batches: prompts and `SamplingParams` become choices as the bodies of requests do.

What the server refuses with a 4xx is a ``ValueError`` here, in the same words.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated

from msgspec.structs import asdict, replace
from pydantic import Field, ValidationError

from ..core.request import MAX_LOGPROBS, SamplingParams
from .chat_template import ChatMessage, ToolOffer
from .embedding import EmbeddingModel
from .embedding_api import embedding_choices, embedding_model
from .openai_api import ChatCompletionRequest, CompletionFields, NonNegative
from .openai_errors import ApiError, of_validation
from .output import Choice, PreparedPrompt
from .prepare import Limits, check_room, choices_of, fitted
from .prompts import chat_prompt, ids_prompt, text_prompt
from .sampling import sampling_params
from .text import TextModel

NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]


class BatchFields(CompletionFields):
    """What `SamplingParams` say, with the limits that the server has; ``None`` is the model's default."""

    max_tokens: NonNegative | None = None
    logprobs: NumLogprobs | None = None
    prompt_logprobs: NumLogprobs | None = None
    grammar: str = ""


def batch_prompt(prompt: str | Sequence[int], text: TextModel, vocab_size: int) -> PreparedPrompt:
    """A text or ids. Raises ``ValueError`` for ids outside the vocabulary and for lone surrogates."""
    with _refusals_as_value_errors():
        if not isinstance(prompt, str):
            return ids_prompt([int(token_id) for token_id in prompt], text, vocab_size)
        prompt.encode()
        return text_prompt(prompt, text)


def batch_chat(messages: Sequence[ChatMessage], text: TextModel, tools: Sequence[ToolOffer] = ()) -> PreparedPrompt:
    """A conversation to be answered. Raises ``ValueError``, also where the template refuses it."""
    with _refusals_as_value_errors():
        body = ChatCompletionRequest.model_validate({"messages": list(messages), "tools": list(tools)})
        return chat_prompt(body, text)


def batch_choices(
    prompts: Sequence[PreparedPrompt],
    params: SamplingParams | None,
    text: TextModel,
    limits: Limits,
    draw_seed: Callable[[], int],
) -> list[list[Choice]]:
    """The ``n`` choices of each prompt; without ``max_tokens`` an output may fill the model. Raises ``ValueError``."""
    with _refusals_as_value_errors():
        fields = BatchFields() if params is None else BatchFields.model_validate(_said(params))
        wanted = replace(
            sampling_params(fields, text, limits.vocab_size),
            max_tokens=fields.max_tokens,
            logprobs=fields.logprobs,
            prompt_logprobs=fields.prompt_logprobs,
            grammar=fields.grammar and text.grammars.admit(fields.grammar, "grammar"),
        )
        fits = [fitted(wanted, prompt, limits.max_model_len, limits, "prompt") for prompt in prompts]
        for prompt in prompts:
            check_room("n", fields.num_generated, prompt, limits)
        return [choices_of(fields, prompt, fit, draw_seed) for prompt, fit in zip(prompts, fits, strict=True)]


def batch_embeddings(
    prompts: Sequence[PreparedPrompt], num_dimensions: int | None, text: TextModel, limits: Limits
) -> tuple[EmbeddingModel, tuple[Choice, ...]]:
    """How the model embeds, and a choice a prompt. Raises ``ValueError``, also where the model does not embed."""
    with _refusals_as_value_errors():
        model = embedding_model(text, limits.model_name)
        return model, embedding_choices(prompts, model, num_dimensions, limits)


def _said(params: SamplingParams) -> dict[str, object]:
    """As a body has it: lists for tuples, and the keys of an object are strings."""
    said = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(params).items()}
    return {**said, "logit_bias": {str(token_id): bias for token_id, bias in params.logit_bias.items()}}


@contextmanager
def _refusals_as_value_errors() -> Iterator[None]:
    try:
        yield
    except ValidationError as error:
        raise ValueError(of_validation(error.errors()).message) from None
    except ApiError as error:
        raise ValueError(error.message) from None
