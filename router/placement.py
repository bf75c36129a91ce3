"""Which pair of workers serves a request: a pure decision over what the fleet and the prefix map say.

The cost of a pair is counted in prompt tokens that one prefill worker would have to compute:

* prefill: the prompt tokens queued before this request, and those of its own that are not cached there;
* decode: each sequence it already serves slows a step for all; each block to ship is work on both sides;
* blocks that either pool lacks, because they come free only when other requests end.

The weights order what differs by an order of magnitude; they are not a model of time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..core.messages import Incarnation
from .fleet import Pair, Worker

SEQUENCE_COST = 64.0
"""Of one sequence on the decode worker: a step reads its KV, for a usual context as dear as four blocks of prompt."""
SHIPPING_COST = 0.125
"""Of one token's KV sent to another worker: bandwidth and launches, mostly hidden behind the computing."""
SHORTAGE_COST = 8.0
"""Of one token's worth of blocks that are not free: the request waits for the end of another."""


@dataclass(frozen=True, slots=True)
class Demand:
    """What is to be placed together: ``num_sequences`` choices over one prompt, which share its blocks.

    ``num_total_tokens`` is the prompt plus the longest output of one choice.
    """

    num_prompt_tokens: int
    num_total_tokens: int
    num_sequences: int = 1


@dataclass(frozen=True, slots=True)
class Placement:
    """``num_uncached`` prompt tokens are to be computed, as far as the router knows."""

    pair: Pair
    num_uncached: int
    num_decode_blocks: int


@dataclass(frozen=True, slots=True)
class NoCapacity:
    """No pair takes the request now; ``reason`` is for the client."""

    reason: str


def place(
    demand: Demand,
    pairs: Sequence[Pair],
    cached: Mapping[Incarnation, int],
    tie_break: int,
    avoid: Sequence[Pair] = (),
) -> Placement | NoCapacity:
    """The cheapest of ``pairs`` that can hold ``demand``; among equals the one that ``tie_break`` counts to.

    ``cached`` gives the prompt blocks that each worker holds. A pair in ``avoid`` has failed this request
    before and is taken only when there is no other.
    """
    fitting = [pair for pair in pairs if demand.num_total_tokens <= pair.max_model_len]
    if not fitting:
        return NoCapacity("no worker holds so long a request" if pairs else "no pair of workers is ready")
    costs = [(pair in avoid, _cost(demand, pair, cached)) for pair in fitting]
    cheapest = min(costs)
    ties = [pair for pair, cost in zip(fitting, costs, strict=True) if cost == cheapest]
    pair = ties[tie_break % len(ties)]
    num_decode_blocks = _num_missing(demand, pair.decode, cached) + _num_copies(demand, pair.decode)
    return Placement(pair, _num_uncached(demand, pair.prefill, cached), num_decode_blocks)


def record(placement: Placement, demand: Demand) -> None:
    """Count the placed request in at both workers until their next heartbeats do."""
    prefill, decode = placement.pair.prefill.unreported, placement.pair.decode.unreported
    prefill.num_prompt_tokens += placement.num_uncached
    decode.num_sequences += demand.num_sequences
    decode.num_blocks += placement.num_decode_blocks


def _cost(demand: Demand, pair: Pair, cached: Mapping[Incarnation, int]) -> float:
    num_uncached = _num_uncached(demand, pair.prefill, cached)
    num_shipped = 0 if pair.is_one_worker else _num_missing(demand, pair.decode, cached)
    block_size = pair.decode.card.layout.block_size
    return (
        pair.prefill.num_queued_prompt_tokens
        + num_uncached
        + SEQUENCE_COST * pair.decode.num_sequences
        + SHIPPING_COST * block_size * num_shipped
        + SHORTAGE_COST * block_size * _shortage(demand, pair, cached)
    )


def _num_uncached(demand: Demand, prefill: Worker, cached: Mapping[Incarnation, int]) -> int:
    """Never 0: the last prompt token is computed again even if its block is cached, for its logits."""
    num_cached = cached.get(prefill.incarnation, 0) * prefill.card.layout.block_size
    return max(1, demand.num_prompt_tokens - num_cached)


def _num_missing(demand: Demand, worker: Worker, cached: Mapping[Incarnation, int]) -> int:
    """Prompt blocks that the worker does not hold yet."""
    return worker.card.layout.num_blocks_for(demand.num_prompt_tokens) - cached.get(worker.incarnation, 0)


def _num_copies(demand: Demand, worker: Worker) -> int:
    """Blocks that further choices need for copies of a partial last one."""
    return demand.num_sequences - 1 if demand.num_prompt_tokens % worker.card.layout.block_size else 0


def _shortage(demand: Demand, pair: Pair, cached: Mapping[Incarnation, int]) -> int:
    """Blocks that must come free before the request can run; cached ones of its own prompt count as available."""
    workers = (pair.decode,) if pair.is_one_worker else (pair.prefill, pair.decode)
    return sum(max(0, _num_missing(demand, worker, cached) - worker.num_available_blocks) for worker in workers)
