"""Sampling parameters of a request: what the client says, or else the model's authors, with all ids checked."""

from collections.abc import Iterable
from typing import TypeVar

from ..core.request import SamplingParams
from .openai_api import CompletionFields
from .openai_errors import ApiError, shown
from .text import TextModel

SEED_BITS = 63
_STRIDE = 0x9E3779B97F4A7C15
"""2^64 over the golden ratio: its multiples, cut to fewer bits, lie far from each other."""

Number = TypeVar("Number", int, float)


def sampling_params(body: CompletionFields, text: TextModel, vocab_size: int) -> SamplingParams:
    """All but ``max_tokens``, ``seed`` and logprobs, which differ by prompt, choice and endpoint.

    ``top_p`` 0 is what ever smaller shares lead to: the likeliest token alone. Raises `ApiError` for ids outside the
    vocabulary, and for a floor that no token may stand below.
    """
    defaults = text.defaults
    stop_ids = set(body.stop_token_ids or ())
    check_ids("stop_token_ids", stop_ids, vocab_size)
    ignore_eos = bool(body.ignore_eos)
    eos_ids = {token_id for token_id in text.eos_ids if 0 <= token_id < vocab_size}  # a checkpoint may name others
    ends = stop_ids if ignore_eos else stop_ids | eos_ids
    if body.min_tokens and len(ends) >= vocab_size:
        raise ApiError.invalid("min_tokens", "Invalid 'min_tokens': every token of the vocabulary is a stop token.")
    top_p = _given(body.top_p, defaults.top_p)
    top_k = max(0, min(_given(body.top_k, defaults.top_k), vocab_size))
    return SamplingParams(
        min_tokens=body.min_tokens or 0,
        temperature=_given(body.temperature, defaults.temperature),
        top_p=top_p or 1.0,
        top_k=top_k if top_p else 1,
        min_p=_given(body.min_p, defaults.min_p),
        stop_token_ids=tuple(sorted(ends)),
        ignore_eos=ignore_eos,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        repetition_penalty=_given(body.repetition_penalty, defaults.repetition_penalty),
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
    )


def choice_seed(seed: int, k: int) -> int:
    """The seed of the ``k``-th of several choices, 63 bits; that of the first is the client's own."""
    return (seed + k * _STRIDE) % (1 << SEED_BITS)


def check_ids(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    """Raises `ApiError` for an id outside the vocabulary."""
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ApiError.invalid(
                field, f"Invalid '{field}': token id {token_id} lies outside the vocabulary of {vocab_size} tokens."
            )


def _given(value: Number | None, default: Number) -> Number:
    return default if value is None else value


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    by_id = {_token_id(key): value for key, value in bias.items()}
    check_ids("logit_bias", by_id, vocab_size)
    return by_id


def _token_id(key: str) -> int:
    """Negative numbers are ids too, though of no vocabulary."""
    digits = key.removeprefix("-")
    if not (digits.isascii() and digits.isdecimal() and len(digits) <= 10):
        raise ApiError.invalid("logit_bias", f"Invalid 'logit_bias': {shown(key)} is no token id.")
    return int(key)
