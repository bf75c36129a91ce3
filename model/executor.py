"""Runs steps on the device and tells when: what the loop knows of a device, and what all executors share.

Steps run in launch order. A launched step announces every layer group as soon as its KV is written, so that it can be
pushed while the next group is computed.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..core.request import Fork, Pooling
from ..core.sequence import Chunk, ChunkResult
from .sampler import SamplingRow

NO_NUMBERS = ChunkResult(None, failure="the model's output is not a number", is_retryable=True)
"""Of a chunk whose logits mean nothing."""


class Launched(Protocol):
    """A step on its way: the value that goes round the loop."""

    @property
    def chunks(self) -> Seq[Chunk]: ...

    @property
    def num_groups_done(self) -> int:
        """Layer groups that have their KV written."""

    @property
    def is_done(self) -> bool: ...

    def results(self) -> list[ChunkResult]:
        """Blocks until the step has run; one result a chunk, in the order of ``chunks``."""


class Executor(Protocol):
    """One model on one device with one pool."""

    @property
    def num_layer_groups(self) -> int: ...

    def launch(self, chunks: Seq[Chunk], previous: Launched | None) -> Launched:
        """Start a step; it begins when the one before has ended, whose sampled ids it may take.

        ``previous`` is a step of this executor whose results were not asked for yet, if there is one.
        """

    def close(self) -> None:
        """Wait for the steps in flight and let the device go."""


@dataclass(frozen=True, slots=True)
class WantedRows:
    """The rows of a step whose output is wanted, counted in the order of the chunks.

    ``of_chunk[i]`` says where those of chunk ``i`` stand among ``rows``; its last one is sampled if the chunk samples.
    """

    rows: list[int]
    of_chunk: tuple[range, ...]


def wanted_rows(chunks: Seq[Chunk]) -> WantedRows:
    """The last row of chunks that sample, all rows of those whose prompts are scored or pooled."""
    rows: list[int] = []
    of_chunk = []
    end = 0
    for chunk in chunks:
        first = len(rows)
        end += chunk.num_tokens
        if wants_all_rows(chunk):
            rows += range(end - chunk.num_tokens, end)
        elif chunk.samples:
            rows.append(end - 1)
        of_chunk.append(range(first, len(rows)))
    return WantedRows(rows, tuple(of_chunk))


def scores_prompt(chunk: Chunk) -> bool:
    """Whether log-probabilities of prompt tokens are wanted from this chunk."""
    return is_in_prompt(chunk) and chunk.sequence.request.params.prompt_logprobs is not None


def pools(chunk: Chunk) -> bool:
    """Whether the chunk has a share in a vector that is asked for."""
    pooling = chunk.sequence.request.pooling
    return pooling is Pooling.MEAN or (pooling is Pooling.LAST and chunk.end == chunk.sequence.num_prompt)


def wants_all_rows(chunk: Chunk) -> bool:
    return is_in_prompt(chunk) and (scores_prompt(chunk) or pools(chunk))


def is_in_prompt(chunk: Chunk) -> bool:
    """Whether it computes tokens of the prompt: others have nothing to be scored or pooled, and no forks."""
    return chunk.start < chunk.sequence.num_prompt


def pooled_share(chunk: Chunk, normed: Tensor) -> Tensor:
    """``normed  [chunk.num_tokens, hidden_size]``, all rows of a chunk that `pools` -> ``[hidden_size]`` float64."""
    counted = normed if chunk.sequence.request.pooling is Pooling.MEAN else normed[-1:]
    return counted.double().sum(0)


def known_ids(chunk: Chunk) -> Seq[int]:
    """The chunk's ids as far as the host knows them; a zero holds the place of the pending one."""
    ids = chunk.sequence.token_ids[chunk.start : chunk.end]
    return [*ids, 0] if chunk.takes_pending else ids


def next_prompt_ids(chunk: Chunk) -> Seq[int]:
    """The prompt tokens that follow each of the chunk's positions, as far as there are any."""
    sequence = chunk.sequence
    return sequence.token_ids[chunk.start + 1 : min(chunk.end + 1, sequence.num_prompt)]


def sampling_row(chunk: Chunk) -> SamplingRow:
    sequence = chunk.sequence
    return SamplingRow(sequence.request.params, sequence.token_ids, sequence.num_prompt, chunk.output_index)


def forks_of(chunk: Chunk) -> tuple[Fork, ...]:
    """The forks whose first tokens are drawn from the logits of this chunk, the last of a prompt, beside its own."""
    return chunk.sequence.request.forks if chunk.samples and chunk.output_index == 0 else ()


@dataclass(frozen=True, slots=True)
class BlockCopies:
    """Blocks to be copied, each to one other, before a step computes anything."""

    sources: list[int]
    destinations: list[int]


def block_copies(chunks: Seq[Chunk], block_size: int) -> BlockCopies | None:
    copying = [chunk for chunk in chunks if chunk.copy_from is not None]
    if not copying:
        return None
    sources = [chunk.copy_from for chunk in copying if chunk.copy_from is not None]
    return BlockCopies(sources, [chunk.blocks[chunk.start // block_size] for chunk in copying])
