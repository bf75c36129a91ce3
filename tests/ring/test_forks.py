"""Stories of requests with several choices, with exact pools; tokens are checked by `Call.take`."""

from collections.abc import Callable
from random import Random

import pytest
from msgspec.structs import replace

from crossdock.core.request import Fork, Request, RequestId

from .fake_device import reference_output
from .simulated_ring import LEASE_SECONDS, Call, Ring
from .test_stories import (
    all_free,
    is_arriving,
    is_computing,
    is_decoding,
    is_kept,
    is_waiting,
    one_mixed,
    pair,
    request,
    step_until_done,
)


def forked(name: str, num_prompt: int, max_tokens: int, num_choices: int = 4) -> Request:
    forks = tuple(Fork(RequestId(f"{name}.{number}"), number) for number in range(1, num_choices))
    return replace(request(name, num_prompt, max_tokens), forks=forks)


def calls_of(ring: Ring, wanted: Request) -> list[Call]:
    return [ring.calls[choice.request_id] for choice in wanted.choices]


def test_four_choices_cost_one_prefill_and_one_transfer() -> None:
    ring, wanted = pair(12), forked("a", 40, 8)
    ring.submit(wanted, "p", "d")
    ring.settle()
    assert [(call.outcome, len(call.legs)) for call in calls_of(ring, wanted)] == [("complete", 8)] * 4
    assert len({tuple(reference_output(choice)) for choice in wanted.choices}) == 4
    prefill, decode = ring.workers["p"].prefill, ring.workers["d"].decode
    assert (prefill.num_transfers, prefill.num_prompt_tokens, prefill.num_blocks_pushed) == (1, 40, 3)
    assert decode.num_preemptions == 0
    ring.drain(4 * LEASE_SECONDS)


@pytest.mark.parametrize("make", [one_mixed, pair])
def test_choices_run_side_by_side_in_a_pool_that_holds_their_prompt_once(make: Callable[[int], Ring]) -> None:
    """Three full blocks and a partial one that each needs a copy of: seven for four choices, ten for four requests."""
    ring, wanted = make(7), forked("a", 56, 8)
    ring.submit(wanted, *(("p", "d") if "p" in ring.workers else ("m", "m")))
    ring.settle()
    assert {call.outcome for call in calls_of(ring, wanted)} == {"complete"}
    assert [worker.decode.num_preemptions for worker in ring.workers.values()] == [0] * len(ring.workers)
    ring.drain(4 * LEASE_SECONDS)


def test_choices_that_outgrow_the_pool_together_give_way_to_each_other() -> None:
    ring, wanted = one_mixed(6, prefix_cache=False), forked("a", 40, 40)
    ring.submit(wanted, "m", "m")
    step_until_done(ring, ring.workers["m"])
    assert [(call.outcome, len(call.legs)) for call in calls_of(ring, wanted)] == [("complete", 40)] * 4
    assert ring.workers["m"].decode.num_preemptions >= 1
    ring.drain(0.0)


@pytest.mark.parametrize("stage", [is_waiting, is_computing, is_kept, is_arriving, is_decoding])
def test_choices_that_are_aborted_one_by_one_at_any_stage_leave_the_others_whole(
    stage: Callable[[Ring, Call], bool],
) -> None:
    ring, random = pair(12, chunk_tokens=32), Random(1)
    for number in range(20):
        ring.submit(forked(f"r{number}", 40, 8), "p", "d")
    spared = set(random.sample(sorted(ring.calls), 20))
    while ring.open_calls:
        ring.move()
        for call in ring.open_calls:
            if call.request_id not in spared and stage(ring, call):
                ring.abort(call)
    ring.settle()
    assert {ring.calls[request_id].outcome for request_id in spared} == {"complete"}
    assert "aborted" in {call.outcome for call in ring.calls.values()}
    assert all_free(ring)
    ring.drain(4 * LEASE_SECONDS)
