"""Greedy answers by Transformers, and how to tell a near tie from a fault."""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch
from transformers import GenerationConfig, PreTrainedModel

NEAR_TIE = 1e-4
"""Where Transformers' own two best logits lie closer than this, another choice is no fault."""


@dataclass(frozen=True, slots=True)
class Greedy:
    """``tokens`` are an answer's ids or their texts, ``gaps[i]`` the distance of the two best logits at token i."""

    tokens: Sequence[int] | Sequence[str]
    gaps: list[float]


def greedy(model: PreTrainedModel, prompt: Sequence[int], num_tokens: int) -> Greedy:
    """Exactly ``num_tokens`` tokens, whatever they are."""
    inputs = torch.tensor([list(prompt)])
    output = model.generate(  # type: ignore[operator]  # its mixin is untyped
        inputs,
        attention_mask=torch.ones_like(inputs),
        generation_config=GenerationConfig(max_new_tokens=num_tokens, do_sample=False),
        output_logits=True,
        return_dict_in_generate=True,
    )
    best = torch.cat(output.logits).topk(2).values
    return Greedy(output.sequences[0, len(prompt) :].tolist(), (best[:, 0] - best[:, 1]).tolist())


def differences(expected: Sequence[Greedy], answers: Sequence[Sequence[int] | Sequence[str]]) -> list[str]:
    """Answers that differ at a token where Transformers was sure; after a near tie, which pytest's summary then
    lists as a warning, anything may follow."""
    faults = []
    for number, (right, answer) in enumerate(zip(expected, answers, strict=True)):
        first = next((i for i, (a, b) in enumerate(zip(right.tokens, answer, strict=True)) if a != b), None)
        if first is None:
            continue
        difference = f"prompt {number}, token {first}: {answer[first]!r} for {right.tokens[first]!r}"
        if right.gaps[first] > NEAR_TIE:
            faults.append(difference)
        else:
            warnings.warn(f"near tie of {right.gaps[first]:.1e}: {difference}", stacklevel=2)
    return faults


def random_prompts(num_prompts: int, longest: int, vocab_size: int, seed: int) -> list[list[int]]:
    """Prompts of 1 to ``longest`` random ids, both lengths among them."""
    random = Random(seed)
    lengths = [1, longest, *(random.randint(1, longest) for _ in range(num_prompts - 2))]
    return [[random.randrange(vocab_size) for _ in range(length)] for length in lengths]
