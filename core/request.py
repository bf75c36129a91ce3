"""What a client asks for, in tokens: the request as every worker sees it.

The router resolves everything textual or model-specific before a worker is involved: stop strings
stay with the router, the model's end-of-sequence ids are already part of ``stop_token_ids``, ``seed``
and ``max_tokens`` are always set. A worker therefore needs no tokenizer and no defaults.
"""

from array import array
from enum import StrEnum
from typing import NewType

import msgspec
from msgspec.structs import replace

RequestId = NewType("RequestId", str)
TransferId = NewType("TransferId", str)

MAX_LOGPROBS = 20
MOST_URGENT, LEAST_URGENT = -(2**31), 2**31 - 1
"""Priorities: a lower number goes first."""


class Pooling(StrEnum):
    """How the hidden states of a prompt become one vector: the last position's, or the mean of all."""

    LAST = "last"
    MEAN = "mean"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How tokens are drawn and when to stop; the same type offline, in the router and on the wire.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 switch the filter off. ``max_tokens`` and
    ``seed`` may be ``None`` only before the router (or ``LLM``) has resolved them. ``logprobs`` is the
    number of alternatives reported beside each sampled token (0: the sampled one alone). ``grammar`` is what the output
    must conform to, as `core.grammar` reads it; empty for none.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: dict[int, float] = {}
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str = ""

    @property
    def is_greedy(self) -> bool:
        """Below 1e-4 the softmax is its limit, the argmax, and the division would only lose digits."""
        return self.temperature < 1e-4

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1


def pack_ids(token_ids: list[int]) -> bytes:
    """Token ids as little-endian u32, the form in which they travel and are hashed."""
    ids = array("I", token_ids)
    assert ids.itemsize == 4
    return ids.tobytes()


def unpack_ids(packed: bytes) -> "array[int]":
    """The inverse of `pack_ids`, four bytes an id here too; raises ``ValueError`` when the length is no multiple."""
    return array("I", packed)


class Fork(msgspec.Struct, frozen=True):
    """A further choice over the prompt of a request: what sets it apart."""

    request_id: RequestId
    seed: int
    trace: str = ""


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """One sequence to generate, and its forks: more over the same prompt, which is computed and shipped once for all.

    ``salt`` separates tenants in the prefix cache (core/block_hash.py); a lower ``priority`` goes first; ``trace`` is
    the W3C ``traceparent`` of this attempt where its request is traced, else empty. With ``pooling`` a vector of the
    prompt is wanted and ``max_tokens`` is 0.
    """

    request_id: RequestId
    prompt: bytes
    params: SamplingParams
    salt: bytes = b""
    priority: int = 0
    trace: str = ""
    pooling: Pooling | None = None
    forks: tuple[Fork, ...] = ()

    @property
    def choices(self) -> "tuple[Request, ...]":
        """The requests without forks that this one stands for: itself, then one a fork."""
        if not self.forks:
            return (self,)
        return (replace(self, forks=()), *(self._choice(fork) for fork in self.forks))

    def _choice(self, fork: Fork) -> "Request":
        params = replace(self.params, seed=fork.seed)
        return replace(self, request_id=fork.request_id, params=params, trace=fork.trace, forks=())

    def num_copies(self, block_size: int) -> int:
        """Blocks that the forks need when they leave the prompt: a partial last block is nobody's to share."""
        return len(self.forks) if self.num_prompt_tokens % block_size else 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt) // 4

    @property
    def max_tokens(self) -> int:
        assert self.params.max_tokens is not None, "the router resolves max_tokens before a worker sees it"
        return self.params.max_tokens

    @property
    def max_total_tokens(self) -> int:
        """Prompt and output together never pass this."""
        return self.num_prompt_tokens + self.max_tokens


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities, from the model's own distribution, at one position.

    ``token_logprob`` is that of the token which stands there; ``top`` the best alternatives as
    parallel lists, most likely first.
    """

    token_logprob: float
    top_ids: list[int] = []
    top_logprobs: list[float] = []
