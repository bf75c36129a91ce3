"""What changes logits before a token is drawn from them: penalties by what a sequence holds, and sparse additions.

The counts of the sequences with penalties stay on the device: a sampled token is counted there, by the step that
sampled it, and the next step needs nothing from the host.
"""

import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import dependent_launch, let_next_start, wait_for_previous
from .reference import Penalties
from .sizes import cdiv, next_power_of_2

BLOCK = 4096


def penalise(logits: Tensor, penalties: Penalties) -> None:
    """In place, of float32 ``logits [n, vocab]`` the rows that have counts.

    Repetition over prompt and output as Hugging Face does, presence and frequency over the output as OpenAI.
    """
    num_rows, vocab = logits.shape
    _penalise[(cdiv(vocab, BLOCK), num_rows)](
        logits, penalties.counts, penalties.places, penalties.repetition, penalties.presence, penalties.frequency,
        vocab, BLOCK=BLOCK, num_warps=4, **dependent_launch(logits.device),
    )  # fmt: skip


def count_tokens(counts: Tensor, places: Tensor, token_ids: Tensor) -> None:
    """One more of ``token_ids[i]`` in row ``places[i]`` of ``counts [num_places, vocab]``; no row twice.

    A row or a token of -1 is none.
    """
    size = next_power_of_2(len(places))
    _count_tokens[(1,)](
        counts, places, token_ids, len(places), counts.shape[1],
        SIZE=size, num_warps=1, **dependent_launch(counts.device),
    )  # fmt: skip


def add_at(logits: Tensor, rows: Tensor, token_ids: Tensor, values: Tensor) -> None:
    """``logits[rows[i], token_ids[i]] += values[i]`` in place, no pair twice; row -1 is nothing. -inf bars a token."""
    num_entries, block = len(rows), 256
    _add_at[(cdiv(num_entries, block),)](
        logits, rows, token_ids, values, num_entries, logits.shape[1],
        BLOCK=block, num_warps=1, **dependent_launch(logits.device),
    )  # fmt: skip


@triton.jit
def _penalise(
    logits, counts, places, repetitions, presences, frequencies, vocab, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(1)
    place = tl.load(places + row).to(tl.int64)
    if place >= 0:
        tokens = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        is_inside = tokens < vocab
        entries = tl.load(counts + place * vocab + tokens, mask=is_inside, other=0)
        num_output = (entries & 0x3FFFFFFF).to(tl.float32)
        repetition, presence, frequency = (
            tl.load(repetitions + row),
            tl.load(presences + row),
            tl.load(frequencies + row),
        )
        x = tl.load(logits + row.to(tl.int64) * vocab + tokens, mask=is_inside, other=0.0)
        repeated = tl.where(x > 0, tl.div_rn(x, tl.zeros_like(x) + repetition), x * repetition)
        x = tl.where(entries > 0, repeated, x) - frequency * num_output - tl.where(num_output > 0, presence, 0.0)
        tl.store(logits + row.to(tl.int64) * vocab + tokens, x, mask=is_inside)


@triton.jit(do_not_specialize=["num_rows"])
def _count_tokens(counts, places, token_ids, num_rows, vocab, SIZE: tl.constexpr, EARLY: tl.constexpr):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    rows = tl.arange(0, SIZE)
    place = tl.load(places + rows, mask=rows < num_rows, other=-1).to(tl.int64)
    token = tl.load(token_ids + rows, mask=rows < num_rows, other=-1)
    is_counted = (place >= 0) & (token >= 0)
    entries = counts + place * vocab + token
    tl.store(entries, tl.load(entries, mask=is_counted, other=0) + 1, mask=is_counted)


@triton.jit(do_not_specialize=["num_entries"])
def _add_at(logits, rows, token_ids, values, num_entries, vocab, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    entries = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_inside = entries < num_entries
    row = tl.load(rows + entries, mask=is_inside, other=-1).to(tl.int64)
    places = logits + row * vocab + tl.load(token_ids + entries, mask=is_inside, other=0)
    value = tl.load(values + entries, mask=is_inside, other=0.0)
    tl.store(places, tl.load(places, mask=row >= 0, other=0.0) + value, mask=row >= 0)
