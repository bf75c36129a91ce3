"""What one step computes, as tensors: made once from the chunks, read by every layer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..core.kv_layout import KvLayout
from ..core.sequence import Chunk


@dataclass(frozen=True, slots=True)
class PromptSpan:
    """A chunk of several tokens: rows ``first_row`` on, positions ``start`` on. ``blocks [num_blocks]`` hold its KV."""

    first_row: int
    start: int
    num_tokens: int
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The one-token chunks: rows ``0 .. len(lengths)``, longest context first.

    ``lengths`` counts the tokens that a row attends to, itself included. ``block_table [num_rows, max_blocks]``
    is padded with the row's first block.
    """

    lengths: tuple[int, ...]
    block_table: Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of all chunks, decode rows first, then the prompt spans one after the other.

    ``slots`` says where the KV of each row goes: ``block * block_size + offset``. ``outputs`` are the rows whose output
    is wanted, in the order of the chunks (``None``: all rows, as they are). ``chunk_rows[i]`` are the rows of chunk
    ``i`` in that order.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    decodes: DecodeRows
    prompts: tuple[PromptSpan, ...]
    outputs: Tensor | None
    chunk_rows: tuple[range, ...]

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


def build_batch(
    chunks: Sequence[Chunk], token_ids: Tensor, layout: KvLayout, wanted: Sequence[int] | None = None
) -> Batch:
    """``token_ids [num_tokens]`` are those of all chunks, one after the other in the order given.

    ``wanted`` are rows in that order, ascending; ``None`` for all.
    """
    device = token_ids.device
    decodes = sorted((i for i, chunk in enumerate(chunks) if chunk.num_tokens == 1), key=lambda i: -chunks[i].end)
    prompts = [i for i, chunk in enumerate(chunks) if chunk.num_tokens != 1]
    ordered = [chunks[i] for i in (*decodes, *prompts)]
    chunk_rows = _chunk_rows(chunks)
    rows = np.concatenate([np.asarray(chunk_rows[i]) for i in (*decodes, *prompts)])
    is_ordered = bool((rows[1:] > rows[:-1]).all())
    positions = np.concatenate([np.arange(chunk.start, chunk.end) for chunk in ordered])
    return Batch(
        token_ids=token_ids if is_ordered else token_ids[_tensor(rows, device)],
        positions=_tensor(positions, device),
        slots=_tensor(_slots(ordered, layout.block_size), device),
        decodes=_decode_rows(ordered[: len(decodes)], layout, device),
        prompts=_prompt_spans(ordered[len(decodes) :], len(decodes), layout, device),
        outputs=_outputs(rows, is_ordered, wanted, device),
        chunk_rows=chunk_rows,
    )


def _chunk_rows(chunks: Sequence[Chunk]) -> tuple[range, ...]:
    ends = np.cumsum([chunk.num_tokens for chunk in chunks]).tolist()
    return tuple(range(end - chunk.num_tokens, end) for chunk, end in zip(chunks, ends, strict=True))


def _outputs(
    rows: NDArray[np.int64], is_ordered: bool, wanted: Sequence[int] | None, device: torch.device
) -> Tensor | None:
    """``rows[i]`` is the place of row ``i`` in the order of the chunks."""
    is_all = wanted is None or len(wanted) == len(rows)
    if is_ordered and is_all:
        return None
    places = np.argsort(rows)
    return _tensor(places if is_all else places[np.asarray(wanted, dtype=np.int64)], device)


def _slots(chunks: Sequence[Chunk], block_size: int) -> NDArray[np.int64]:
    def of(chunk: Chunk) -> NDArray[np.int64]:
        first = chunk.start // block_size
        blocks = np.array(chunk.blocks[first : (chunk.end - 1) // block_size + 1], dtype=np.int64)
        slots = (blocks[:, None] * block_size + np.arange(block_size)).reshape(-1)
        return slots[chunk.start - first * block_size :][: chunk.num_tokens]

    return np.concatenate([of(chunk) for chunk in chunks])


def _decode_rows(chunks: Sequence[Chunk], layout: KvLayout, device: torch.device) -> DecodeRows:
    lengths = tuple(chunk.end for chunk in chunks)
    table = np.empty((len(chunks), layout.num_blocks_for(max(lengths, default=0))), dtype=np.int64)
    for row, chunk in zip(table, chunks, strict=True):
        num_blocks = layout.num_blocks_for(chunk.end)
        row[num_blocks:] = chunk.blocks[0]  # its own: a stranger's may hold NaN, which no mask keeps out of a sum
        row[:num_blocks] = chunk.blocks[:num_blocks]
    return DecodeRows(lengths, _tensor(table, device))


def _prompt_spans(
    chunks: Sequence[Chunk], first_row: int, layout: KvLayout, device: torch.device
) -> tuple[PromptSpan, ...]:
    spans = []
    for chunk in chunks:
        blocks = np.array(chunk.blocks[: layout.num_blocks_for(chunk.end)], dtype=np.int64)
        spans.append(PromptSpan(first_row, chunk.start, chunk.num_tokens, _tensor(blocks, device)))
        first_row += chunk.num_tokens
    return tuple(spans)


def _tensor(values: NDArray[np.int64], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device, non_blocking=True)
