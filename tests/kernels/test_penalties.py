"""Penalties and additions to logits, in place."""

import os
from math import inf

import torch
from torch import Tensor

from crossdock.kernels import reference

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"

from crossdock.kernels import penalties  # noqa: E402

DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
VOCAB = 5000


def column(*values: float) -> Tensor:
    return torch.tensor(values, device=DEVICE)


def places_of(*places: int) -> Tensor:
    return torch.tensor(places, dtype=torch.int32, device=DEVICE)


def test_each_penalty_looks_at_what_it_is_meant_to() -> None:
    """Case G3: prompt [5, 5, 7], output [7, 9]."""
    logits = torch.full((4, 12), 2.0, device=DEVICE)
    logits[:, 5] = -2.0
    counts = torch.zeros(2, 12, dtype=torch.int32, device=DEVICE)
    counts[1, [5, 7]] = reference.IN_PROMPT
    counts[1, [7, 9]] += 1
    asked = (column(1, 1, 2, 2), column(0, 0.5, 0, 9), column(0.5, 0, 0, 9))
    penalties.penalise(logits, reference.Penalties(counts, places_of(1, 1, 1, -1), *asked))
    plain = [2.0] * 5 + [-2.0] + [2.0] * 6
    lower = [1.5 if i in (7, 9) else x for i, x in enumerate(plain)]
    repeated = [{5: -4.0, 7: 1.0, 9: 1.0}.get(i, x) for i, x in enumerate(plain)]
    assert logits.tolist() == [lower, lower, repeated, plain]


def test_the_twin_agrees_on_random_counts() -> None:
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(-3, 4, (3, VOCAB), generator=generator).clamp(min=0).int().to(DEVICE)
    counts[:, ::5] += reference.IN_PROMPT
    ours = torch.randn(4, VOCAB, generator=generator).to(DEVICE)
    twins = ours.clone()
    asked = (column(1.3, 1.0, 0.8, 1.1), column(0.2, -0.4, 0, 1), column(0.3, 0.1, -0.2, 1))
    which = reference.Penalties(counts, places_of(2, 0, 1, -1), *asked)
    penalties.penalise(ours, which)
    reference.penalise(twins, which)
    torch.testing.assert_close(ours, twins)


def test_sampled_tokens_are_counted_where_somebody_asks() -> None:
    counts, twins = (torch.zeros(3, VOCAB, dtype=torch.int32, device=DEVICE) for _ in range(2))
    counts[2, 4] = twins[2, 4] = reference.IN_PROMPT
    for token_ids in ([4, 9, 4999], [4, 9, 4999], [4, 8, 0]):
        penalties.count_tokens(counts, places_of(2, -1, 0), torch.tensor(token_ids, device=DEVICE))
        reference.count_tokens(twins, places_of(2, -1, 0), torch.tensor(token_ids, device=DEVICE))
    assert counts[2, 4] == reference.IN_PROMPT + 3
    assert torch.equal(counts, twins)
    assert counts.count_nonzero() == 3


def test_biases_are_added_and_barred_tokens_sink() -> None:
    logits, twins = torch.ones(2, VOCAB, device=DEVICE), torch.ones(2, VOCAB, device=DEVICE)
    rows, ids = places_of(0, 1, -1, 1), places_of(3, 4999, 2, 0)
    penalties.add_at(logits, rows, ids, column(0.5, -inf, 7.0, -1.0))
    reference.add_at(twins, rows, ids, column(0.5, -inf, 7.0, -1.0))
    assert torch.equal(logits, twins)
    assert logits[[0, 1, 0, 1], [3, 4999, 2, 0]].tolist() == [1.5, -inf, 1.0, 0.0]
