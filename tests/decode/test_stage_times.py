"""What the decode part tells of the time that a request was in each of its stages."""

from msgspec.structs import replace

from crossdock.core.messages import Abort, Commit, LeaseId, StageTimes
from crossdock.core.part import Handover, StepBudget
from crossdock.core.request import RequestId, TransferId
from crossdock.core.sequence import ChunkResult, Sequence
from crossdock.core.stages import Stage, StageName

from ..parts import ROUTER, from_router, request
from .test_arrivals import Bench as ArrivalBench
from .test_part import Bench

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
A = RequestId("a")


def adopted(name: str = "a") -> Bench:
    """A request that became ready at 2, half a second after its prompt was computed."""
    bench = Bench()
    sequence = Sequence.of(replace(request(name, 15, max_tokens=4), trace=TRACE))
    bench.tables.grow(sequence, sequence.num_prompt)
    sequence.num_scheduled = sequence.num_computed = sequence.num_prompt
    sequence.append(500)
    bench.part.adopt(Handover(sequence, ROUTER, ready_at=2.0, transfer_seconds=0.5))
    return bench


def step(bench: Bench, planned_at: float, done_at: float) -> None:
    (chunk,) = bench.part.plan(StepBudget(512, 64), planned_at)
    bench.part.apply([(chunk, ChunkResult(501))], done_at)
    bench.tables.step_done(chunk)


def test_the_first_token_from_here_brings_the_times_before_it_and_no_other_does() -> None:
    bench = adopted()
    for second in range(3):
        step(bench, 2.25 + second, 3.0 + second)
    times = [delta.times for delta in bench.outbox.deltas]
    assert times == [StageTimes(0.25, transfer_seconds=0.5), None, None]
    assert bench.outbox.stages == [
        Stage(StageName.DECODE_QUEUE, TRACE, A, 2.0, 2.25, {}),
        Stage(StageName.DECODE, TRACE, A, 2.25, 5.0, {"output_tokens": 4}),
    ]


def test_an_abort_ends_the_stage_that_it_met() -> None:
    waiting, running = adopted(), adopted()
    step(running, 2.5, 3.0)
    for bench in (waiting, running):
        bench.part.handle(from_router(Abort(request_id=A)), 7.0)
    stages = [(stage.name, stage.ended_at, stage.outcome) for stage in waiting.outbox.stages]
    assert stages == [("decode.queue", 7.0, "aborted by the client")]
    last = running.outbox.stages[-1]
    assert (last.name, last.outcome, last.counts) == ("decode", "aborted by the client", {"output_tokens": 2})


def test_a_transfer_took_what_the_sender_says_and_the_time_from_its_commit_to_the_last_push() -> None:
    bench = ArrivalBench()
    bench.offer(request("a", 20), now=1.0)
    bench.push("a", 0, [0, 1])
    committed = Commit(
        transfer_id=TransferId("t-a"),
        lease_id=LeaseId(0),
        generation=0,
        num_block_groups=4,
        first_token_ids=[500],
        exposed_seconds=0.125,
    )
    bench.hear(committed, now=2.0)
    assert bench.attached == []
    bench.push("a", 1, [0, 1], now=2.5)
    (handover,) = bench.attached
    assert (handover.ready_at, handover.transfer_seconds) == (2.5, 0.625)
