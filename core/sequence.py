"""One request while a worker works on it: its tokens, its blocks and how far its KV has come.

What is made for each sequence of each step is a struct, which takes a tenth of the time of a frozen dataclass, and none
that the collector of cycles looks at, since nothing in it leads back to it. What runs for each is short for its sake
too: a step of 256 has a millisecond for all that the host does.
"""

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import StrEnum

import msgspec

from .request import Request, TokenLogprobs, unpack_ids


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"


@dataclass(slots=True, eq=False, weakref_slot=True)
class Sequence:
    """Mutable state of one request on one worker, changed by the part that owns it and no one else.

    Three counts say how far its KV has come, because the loop runs a step ahead of the device:
    ``num_computed <= num_scheduled <= num_tokens``. ``num_scheduled`` tokens have their KV written
    once all launched steps have run; ``num_computed`` have it now. ``num_pending`` (0 to 2) is the number of
    tokens that launched steps sample and the host does not know yet; they are counted in ``num_tokens``.

    ``may_share_tail`` says that forks of one prompt may hold the same block where this one writes next, ``copy_from``
    that the block to be written next is to become a copy of that one first (see `BlockTables`).
    ``max_num_tokens`` is where ``max_tokens`` ends it.
    """

    request: Request
    token_ids: "array[int]"
    num_prompt: int
    blocks: list[int] = field(default_factory=list)
    block_hashes: list[bytes] = field(default_factory=list)
    num_published: int = 0
    num_scheduled: int = 0
    num_computed: int = 0
    num_pending: int = 0
    num_in_flight: int = 0
    is_released: bool = False
    may_share_tail: bool = False
    copy_from: int | None = None
    max_num_tokens: int = field(init=False)

    def __post_init__(self) -> None:
        self.max_num_tokens = self.num_prompt + self.request.max_tokens

    @classmethod
    def of(cls, request: Request) -> "Sequence":
        token_ids = unpack_ids(request.prompt)
        return cls(request, token_ids, len(token_ids))

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, the one being sampled included."""
        return len(self.token_ids) + self.num_pending

    @property
    def num_output(self) -> int:
        return self.num_tokens - self.num_prompt

    @property
    def output_ids(self) -> list[int]:
        return self.token_ids[self.num_prompt :].tolist()

    @property
    def num_unscheduled(self) -> int:
        """Tokens whose KV no launched step computes yet; 1 for a sequence that decodes."""
        return len(self.token_ids) + self.num_pending - self.num_scheduled

    @property
    def is_at_limit(self) -> bool:
        """No further token may be sampled: the next step would pass ``max_tokens``."""
        return len(self.token_ids) + self.num_pending >= self.max_num_tokens

    def append(self, token_id: int) -> FinishReason | None:
        """Add a token; the reason if it ends the request."""
        self.token_ids.append(token_id)
        if len(self.token_ids) < self.max_num_tokens and token_id not in self.request.params.stop_token_ids:
            return None  # nearly always
        return ending(self.request, token_id, len(self.token_ids) - self.num_prompt)


def ending(request: Request, token_id: int, num_output: int) -> FinishReason | None:
    """The reason if this token, the last of ``num_output``, ends the request.

    A stop token below ``min_tokens`` was barred by the sampler; a stop wins over the length when one token brings both.
    """
    if token_id in request.params.stop_token_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if num_output >= request.max_tokens else None


class Chunk(msgspec.Struct, frozen=True, eq=False, gc=False):
    """What one step does for one sequence: compute the KV of ``num_tokens`` tokens from ``start`` on.

    ``samples`` is true when the chunk reaches the last token, so that the step yields the next one.
    When the last token of the chunk was sampled by the step before and is not on the host yet,
    ``takes_pending`` is true and the executor takes it from that step on the device.
    ``blocks`` are those of positions ``0 .. start + num_tokens``, and perhaps more: the very list that the sequence had
    when the step was planned. It may have grown since, but a sequence gets another list before an entry changes. The
    block that holds ``start`` becomes a copy of ``copy_from``, if there is one, before all that the step computes.
    """

    sequence: Sequence
    start: int
    num_tokens: int
    samples: bool
    takes_pending: bool
    blocks: Seq[int]
    copy_from: int | None = None

    @property
    def end(self) -> int:
        return self.start + self.num_tokens

    @property
    def output_index(self) -> int:
        """Index in the output of the token that this chunk samples; seeds its random draw."""
        return self.end - self.sequence.num_prompt


class Draw(msgspec.Struct, frozen=True, gc=False):
    """A token and, if asked for, its log-probabilities; ``is_complete`` as in `ChunkResult`."""

    token_id: int
    logprobs: TokenLogprobs | None = None
    is_complete: bool = False


class ChunkResult(msgspec.Struct, frozen=True, gc=False):
    """What a finished step yielded for one chunk.

    ``token_id`` is ``None`` if the chunk samples nothing. ``prompt_logprobs[i]`` belongs to position
    ``chunk.start + i + 1`` and is filled only for requests that asked for it. ``is_complete`` says that the grammar of
    the request lets nothing follow the token, ``failure`` why there is none and the request can't go on here, nor
    anywhere unless ``is_retryable``. ``forks`` are the first tokens of the request's forks, from the end of its prompt.
    ``pooled`` is the chunk's share of a vector (core/pooling.py).
    """

    token_id: int | None
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    is_complete: bool = False
    failure: str = ""
    is_retryable: bool = False
    forks: tuple[Draw, ...] = ()
    pooled: bytes = b""


def take_chunk(sequence: Sequence, num_tokens: int) -> Chunk:
    """Mark ``num_tokens`` further tokens of the sequence as scheduled; its blocks must hold them."""
    start = sequence.num_scheduled
    end = start + num_tokens
    num_known = len(sequence.token_ids)
    num_all = num_known + sequence.num_pending
    assert start < end <= num_all, "a chunk covers tokens that exist and are not computed"
    samples = end == num_all < sequence.max_num_tokens
    sequence.num_scheduled = end
    sequence.num_in_flight += 1
    sequence.num_pending += samples
    copy_from, sequence.copy_from = sequence.copy_from, None
    return Chunk(sequence, start, num_tokens, samples, end > num_known, sequence.blocks, copy_from)


def take_next(sequence: Sequence, block_size: int) -> Chunk | None:
    """`take_chunk` of the one token that a sequence which decodes has left; ``None`` unless nothing else is to be done.

    That is a block to be found, a copy to be made, the end.
    """
    num_known, start = len(sequence.token_ids), sequence.num_scheduled
    end = num_known + sequence.num_pending
    is_simple = start + 1 == end <= len(sequence.blocks) * block_size and not sequence.may_share_tail
    if not is_simple or end >= sequence.max_num_tokens or sequence.copy_from is not None:
        return None
    sequence.num_scheduled = end
    sequence.num_in_flight += 1
    sequence.num_pending += 1
    return Chunk(sequence, start, 1, True, end > num_known, sequence.blocks)


def settle(chunk: Chunk, result: ChunkResult) -> FinishReason | None:
    """The inverse of `take_chunk` once the step has run: what was scheduled is computed, what was pending known."""
    sequence = chunk.sequence
    sequence.num_computed = chunk.start + chunk.num_tokens
    if result.token_id is None:
        return None
    sequence.num_pending -= 1
    finish = sequence.append(result.token_id)
    return FinishReason.STOP if result.is_complete else finish
