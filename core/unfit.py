"""The last look at a request before a worker takes it, behind the router's own door.

Apart from the protocol of the parts, because the router, which knows that one, does without numpy.
"""

import numpy as np

from .messages import WorkerCard
from .request import Request


def refuse_unfit(request: Request, card: WorkerCard) -> str | None:
    """Why this worker can never serve the request, or ``None``."""
    if request.num_prompt_tokens == 0 or len(request.prompt) % 4:
        return "the prompt is empty or not a list of 32-bit ids"
    if request.params.max_tokens is None or request.params.seed is None:
        return "max_tokens and seed are unset"
    if request.max_total_tokens > card.max_model_len:
        return f"prompt and max_tokens are {request.max_total_tokens} tokens, the limit is {card.max_model_len}"
    largest_id = int(np.frombuffer(request.prompt, dtype=np.uint32).max())
    if largest_id >= card.vocab_size:
        return f"token id {largest_id} lies outside the vocabulary of {card.vocab_size}"
    num_choices, most = 1 + len(request.forks), card.max_choices(request.num_prompt_tokens)
    if num_choices > most:
        return f"{num_choices} choices over this prompt are asked for, this worker holds {most}"
    named = (*request.params.stop_token_ids, *request.params.logit_bias)
    if any(not 0 <= token_id < card.vocab_size for token_id in named):
        return f"a stop_token_ids or logit_bias id lies outside the vocabulary of {card.vocab_size}"
    return None
