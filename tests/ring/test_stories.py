"""Single stories with exact pools, each of which has broken some other server; tokens are checked by `Call.take`."""

from collections.abc import Callable
from random import Random

import pytest

from crossdock.core.messages import PoolBooks, Role
from crossdock.core.request import Request, RequestId, SamplingParams, pack_ids

from .fake_device import reference_output
from .simulated_ring import LEASE_SECONDS, Call, Ring, Shape, SimulatedWorker


def one_mixed(num_blocks: int, chunk_tokens: int = 64, prefix_cache: bool = True) -> Ring:
    return Ring(Random(1), {"m": (Role.MIXED, Shape(num_blocks, 16, chunk_tokens, 64, prefix_cache))})


def pair(num_blocks: int, chunk_tokens: int = 64) -> Ring:
    shape = Shape(num_blocks, 16, chunk_tokens)
    return Ring(Random(1), {"p": (Role.PREFILL, shape), "d": (Role.DECODE, shape)})


def request(name: str, num_prompt: int, max_tokens: int, seed: int = 0, stop: tuple[int, ...] = ()) -> Request:
    """No two names share a prefix."""
    first_id = 1000 * (1 + sum(name.encode()) % 500)
    params = SamplingParams(max_tokens=max_tokens, seed=seed, stop_token_ids=stop)
    prompt = pack_ids(list(range(first_id, first_id + num_prompt)))
    return Request(request_id=RequestId(name), prompt=prompt, params=params)


def step_until_done(ring: Ring, worker: SimulatedWorker) -> None:
    """Run one worker; it may not stand idle while there is work."""
    while ring.open_calls:
        while not ring.network.is_empty:
            ring.network.deliver_one()
        ring.route()
        worker.resume()
        assert not (worker.is_quiet and worker.engine.has_work), "there is work, and nothing is planned"
        if worker.device.queue:
            worker.device.advance()


def all_free(ring: Ring) -> bool:
    return all(worker.pool.num_available == worker.pool.num_blocks for worker in ring.workers.values())


# --- what does not fit -------------------------------------------------------------------------


def test_prompts_longer_than_the_pool_are_refused_and_block_nobody() -> None:
    ring = one_mixed(50)
    big = [ring.submit(request(f"big{number}", 1002, 5), "m", "m") for number in range(5)]
    small = ring.submit(request("small", 10, 5), "m", "m")
    ring.settle()
    refusal = "failed: prompt and max_tokens are 1007 tokens, the limit is 800"
    assert ([call.outcome for call in big], small.outcome) == ([refusal] * 5, "complete")


def test_an_output_that_would_outgrow_the_pool_is_refused_and_one_that_just_fits_is_served() -> None:
    ring = one_mixed(50)
    too_long, just_right = request("long", 10, 791), request("right", 10, 790)
    calls = [ring.submit(wanted, "m", "m") for wanted in (too_long, just_right)]
    ring.settle()
    refusal = "failed: prompt and max_tokens are 801 tokens, the limit is 800"
    assert [call.outcome for call in calls] == [refusal, "complete"]
    assert ring.workers["m"].decode.num_preemptions == 0


# --- preemption --------------------------------------------------------------------------------


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize(("num_blocks", "num_preemptions"), [(64, 0), (7, 1)])
def test_preemption_is_invisible_to_the_client(num_blocks: int, num_preemptions: int, prefix_cache: bool) -> None:
    ring = one_mixed(num_blocks, prefix_cache=prefix_cache)
    calls = [ring.submit(request(name, 34, 35, seed=number), "m", "m") for number, name in enumerate("ab")]
    step_until_done(ring, ring.workers["m"])
    assert [(call.outcome, len(call.legs)) for call in calls] == [("complete", 35)] * 2
    assert ring.workers["m"].decode.num_preemptions == num_preemptions
    ring.drain(0.0)


def test_prompts_that_fill_the_pool_do_not_bring_decoding_to_a_standstill() -> None:
    ring = one_mixed(8, chunk_tokens=256)
    calls = [ring.submit(request(f"r{number}", 16, 20), "m", "m") for number in range(8)]
    step_until_done(ring, ring.workers["m"])
    assert [(call.outcome, len(call.legs)) for call in calls] == [("complete", 20)] * 8
    assert ring.workers["m"].decode.num_preemptions >= 1
    ring.drain(0.0)


@pytest.mark.parametrize("chunk_tokens", [16, 32, 64, 128, 256])
def test_a_decode_worker_that_runs_out_of_blocks_resumes_its_requests_itself(chunk_tokens: int) -> None:
    ring = pair(8, chunk_tokens)
    calls = [ring.submit(request(f"r{number}", 30, 60, seed=number), "p", "d") for number in range(6)]
    ring.settle()
    assert [call.outcome for call in calls] == ["complete"] * 6
    assert ring.workers["d"].decode.num_preemptions >= 1
    ring.drain(4 * LEASE_SECONDS)


# --- the first token ---------------------------------------------------------------------------


def test_a_request_that_the_first_token_ends_ships_nothing_and_leaves_both_pools_free() -> None:
    ring = pair(8)
    stop = reference_output(request("stop", 40, 9))[0]
    ends = [request("none", 40, 0), request("one", 40, 1), request("stop", 40, 9, stop=(stop,))]
    calls = [ring.submit(wanted, "p", "d") for wanted in ends]
    ring.settle()
    assert [(call.outcome, len(call.legs)) for call in calls] == [("complete", 1)] * 3
    assert [worker.pool.books().leased for worker in ring.workers.values()] == [0, 0]
    assert ring.workers["d"].decode.num_output_tokens == 0


def test_two_tokens_come_from_two_legs() -> None:
    ring = pair(8)
    call = ring.submit(request("two", 40, 2), "p", "d")
    ring.settle()
    assert [peer.address for peer in call.legs.values()] == ["tcp://p", "tcp://d"]
    assert call.outcome == "complete"


# --- clients that leave ------------------------------------------------------------------------


def is_waiting(ring: Ring, call: Call) -> bool:
    job = ring.workers["p"].prefill._jobs.get(call.request_id)
    return job is not None and not job.is_started


def is_computing(ring: Ring, call: Call) -> bool:
    job = ring.workers["p"].prefill._jobs.get(call.request_id)
    return job is not None and job.is_started and not job.is_computed


def is_kept(ring: Ring, call: Call) -> bool:
    job = ring.workers["p"].prefill._jobs.get(call.request_id)
    return job is not None and job.is_computed


def is_arriving(ring: Ring, call: Call) -> bool:
    arrival = ring.workers["d"].decode._arrivals._arrivals.get(call.task.transfer_id)
    return arrival is not None and arrival.sequence is not None


def is_decoding(ring: Ring, call: Call) -> bool:
    return call.request_id in ring.workers["d"].decode._requests


@pytest.mark.parametrize("stage", [is_waiting, is_computing, is_kept, is_arriving, is_decoding])
def test_clients_that_leave_strand_no_block(stage: Callable[[Ring, Call], bool]) -> None:
    """Fifty of them, at pools for four; everything is free again without any clock."""
    ring = pair(12, chunk_tokens=32)
    for number in range(50):
        ring.submit(request(f"r{number}", 40, 8, seed=number), "p", "d")
    while ring.open_calls:
        ring.move()
        for call in ring.open_calls:
            if stage(ring, call):
                ring.abort(call)
    ring.settle()
    assert [call.outcome for call in ring.calls.values()].count("aborted") >= 45
    assert all_free(ring)
    last = ring.submit(request("last", 40, 8), "p", "d")
    ring.settle()
    assert last.outcome == "complete"
    ring.drain(4 * LEASE_SECONDS)


def test_clients_that_leave_while_their_offer_is_queued_strand_no_block() -> None:
    ring = pair(8)
    held = ring.submit(request("held", 100, 28), "p", "d")
    while len(held.legs) < 2:
        ring.move()
    calls = [ring.submit(request(f"r{number}", 33, 8), "p", "d") for number in range(3)]
    while ring.workers["d"].decode.num_arriving < 2:
        ring.move()
    for call in calls:
        ring.abort(call)
    ring.settle()
    assert held.outcome == "complete"
    assert all_free(ring)
    assert ring.workers["d"].pool.books().leased == 0


def test_after_many_requests_the_tables_are_empty() -> None:
    ring = pair(16)
    for number in range(200):
        ring.submit(request(f"r{number}", number % 60 + 1, number % 7), "p", "d")
        ring.settle()
    assert {call.outcome for call in ring.calls.values()} == {"complete"}
    ring.drain(4 * LEASE_SECONDS)
    assert ring.leftovers == []


def test_a_dead_worker_leaves_the_other_with_all_its_blocks() -> None:
    ring = pair(8)
    ring.submit(request("a", 60, 8), "p", "d")
    while ring.workers["d"].pool.books() == PoolBooks(free=8, cached=0, leased=0, quarantined=0):
        ring.move()
    ring.kill("p")
    ring.bury()
    ring.settle()
    assert ring.workers["d"].pool.books().quarantined == 4
    ring.drain(2 * LEASE_SECONDS)
