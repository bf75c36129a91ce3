"""What the prefill part tells of the time that a request was in each of its stages."""

from msgspec.structs import replace

from crossdock.core.messages import Abort, Attached, Peer, StageTimes
from crossdock.core.part import StepBudget
from crossdock.core.request import RequestId, TransferId
from crossdock.core.sequence import ChunkResult
from crossdock.core.stages import Stage, StageName

from ..parts import DECODE, PREFILL, from_router, request
from .test_part import FIRST, Bench, reservation

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
A = RequestId("a")
COUNTS = {"prompt_tokens": 40, "cached_tokens": 0}


def computed(decode: Peer) -> Bench:
    """Request a came at 1, was started at 3 and computed at 4.5."""
    bench = Bench()
    bench.task(replace(request("a", 40), trace=TRACE), decode, now=1.0)
    (chunk,) = bench.part.plan(StepBudget(512, 8), 3.0)
    bench.part.apply([(chunk, ChunkResult(FIRST))], 4.5)
    bench.tables.step_done(chunk)
    return bench


def test_the_first_token_brings_the_times_before_it() -> None:
    assert [delta.times for delta in computed(DECODE).outbox.deltas] == [StageTimes(2.0, prefill_seconds=1.5)]


def test_only_what_is_left_of_the_transfer_after_the_last_chunk_is_its_stage() -> None:
    bench = computed(DECODE)
    assert bench.outbox.stages == []
    bench.answer(reservation([7, 5, 6]), 5.0)
    bench.answer(Attached(transfer_id=TransferId("t-a")), 5.5)
    assert bench.outbox.stages == [
        Stage(StageName.PREFILL_QUEUE, TRACE, A, 1.0, 3.0, {}),
        Stage(StageName.PREFILL, TRACE, A, 3.0, 4.5, COUNTS),
        Stage(StageName.TRANSFER, TRACE, A, 4.5, 5.5, {"blocks_pushed": 3, "blocks_skipped": 0}),
    ]


def test_what_is_decoded_here_is_not_transferred() -> None:
    bench = computed(PREFILL)
    assert [(stage.name, stage.outcome) for stage in bench.outbox.stages] == [("prefill.queue", ""), ("prefill", "")]
    (handover,) = bench.handed_over
    assert (handover.ready_at, handover.transfer_seconds) == (4.5, None)


def test_an_abort_ends_the_stage_that_it_met() -> None:
    bench = computed(DECODE)
    bench.part.handle(from_router(Abort(request_id=A)), 6.0)
    last = bench.outbox.stages[-1]
    assert (last.name, last.ended_at, last.outcome) == ("transfer", 6.0, "aborted by the client")


def test_an_abort_in_the_queue_is_told_too() -> None:
    bench = Bench()
    bench.task(replace(request("a", 40), trace=TRACE), now=1.0)
    bench.part.handle(from_router(Abort(request_id=A)), 2.0)
    assert bench.outbox.stages == [Stage(StageName.PREFILL_QUEUE, TRACE, A, 1.0, 2.0, {}, "aborted by the client")]
