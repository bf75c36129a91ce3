"""The life of a request in the decode part; blocks of 16 tokens."""

from collections.abc import Sequence as Seq

import pytest

from crossdock.core.messages import (
    Abort,
    Attached,
    Incarnation,
    Offer,
    Peer,
    PoolBooks,
    RequestFailed,
    StageTimes,
    TokenDelta,
)
from crossdock.core.part import Delivery, Handover, StepBudget
from crossdock.core.request import Request, RequestId, TransferId
from crossdock.core.sequence import Chunk, ChunkResult, FinishReason, Sequence
from crossdock.decode.part import DecodePart
from crossdock.kvtransfer.pool_bytes import PASSED

from ..parts import LAYOUT, LEASE_SECONDS, PREFILL, ROUTER, Record, card, free, from_router, request, tables_of


class Routers(Record):
    """Keeps what each router is told, call by call."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[Peer, list[TokenDelta]]] = []

    def emit(self, router: Peer, deltas: Seq[TokenDelta]) -> None:
        self.told.append((router, list(deltas)))


class Bench:
    def __init__(self, num_blocks: int = 8, outbox: Record | None = None) -> None:
        self.tables = tables_of(num_blocks)
        self.outbox = outbox or Record()
        group_bytes = (LAYOUT.layer_bytes,) * 2
        self.part = DecodePart(
            card(num_blocks), self.tables, self.outbox, group_bytes, lambda push, payload: PASSED, LEASE_SECONDS
        )

    def adopt(self, wanted: Request, first_token_id: int = 500, router: Peer = ROUTER) -> Sequence:
        sequence = Sequence.of(wanted)
        self.tables.grow(sequence, sequence.num_prompt)
        sequence.num_scheduled = sequence.num_computed = sequence.num_prompt
        sequence.append(first_token_id)
        self.part.adopt(Handover(sequence, router, ready_at=0.0))
        return sequence

    def plan(self) -> list[Chunk]:
        return self.part.plan(StepBudget(512, 64), 0.0)

    def finish(self, chunks: Seq[Chunk], *token_ids: int) -> list[TokenDelta]:
        """The step has drawn ``token_ids``; what the router hears of it."""
        results = [ChunkResult(token_id) for token_id in token_ids]
        self.part.apply(list(zip(chunks, results, strict=True)), 0.0)
        for chunk in chunks:
            self.tables.step_done(chunk)
        deltas, self.outbox.deltas = self.outbox.deltas, []
        return deltas

    @property
    def books(self) -> PoolBooks:
        self.tables.prefixes.check()
        return self.tables.pool.books()


def token(name: str, index: int, token_id: int, finish: FinishReason | None = None) -> TokenDelta:
    times = StageTimes(0.0) if index == 1 else None
    return TokenDelta(RequestId(name), index, token_id, finish, times=times)


def test_a_request_yields_a_token_a_step_from_index_one_on_and_leaves_nothing_behind() -> None:
    bench = Bench()
    bench.adopt(request("a", 15, max_tokens=3))
    assert (bench.part.num_requests, bench.part.num_running, bench.part.num_held_back) == (1, 1, 1)
    assert bench.finish(bench.plan(), 501) == [token("a", 1, 501)]
    assert bench.finish(bench.plan(), 502) == [token("a", 2, 502, FinishReason.LENGTH)]
    assert (bench.part.num_requests, bench.part.has_work, bench.part.num_output_tokens) == (0, False, 2)
    assert bench.books == free(8, cached=1)


def test_each_router_is_told_the_tokens_of_its_own_requests_in_one_call_a_step() -> None:
    outbox, other = Routers(), Peer("tcp://other", Incarnation("other"))
    bench = Bench(outbox=outbox)
    for name, router in (("a", ROUTER), ("b", other), ("c", ROUTER)):
        bench.adopt(request(name, 15), router=router)
    bench.finish(bench.plan(), 501, 502, 503)
    assert outbox.told == [(ROUTER, [token("a", 1, 501), token("c", 1, 503)]), (other, [token("b", 1, 502)])]


def test_a_stop_token_that_is_found_after_the_next_step_was_launched_lets_nothing_leak() -> None:
    bench = Bench()
    sequence = bench.adopt(request("a", 16, max_tokens=9, stop=(7,)))
    first, second = bench.plan(), bench.plan()
    assert bench.finish(first, 7) == [token("a", 1, 7, FinishReason.STOP)]
    assert (bench.part.num_requests, bench.plan(), bench.books.leased) == (0, [], 2)
    assert bench.finish(second, 8) == []
    assert (sequence.output_ids, bench.part.num_output_tokens) == ([500, 7], 1)
    assert bench.books == free(8, cached=1)


@pytest.mark.parametrize(("stop_at", "kept", "reason"), [(2, 3, FinishReason.STOP), (5, 5, FinishReason.LENGTH)])
def test_whatever_comes_first_ends_the_output_the_stop_or_the_cap(
    stop_at: int, kept: int, reason: FinishReason
) -> None:
    bench = Bench()
    drawn = [10, 11, 20, 21, 22, 23]
    drawn[stop_at] = 9
    bench.adopt(request("a", 16, max_tokens=5, stop=(9,)), drawn[0])
    deltas: list[TokenDelta] = []
    for token_id in drawn[1:]:
        if chunks := bench.plan():
            deltas += bench.finish(chunks, token_id)
    assert [delta.token_id for delta in deltas] == drawn[1:kept]
    assert [delta.finish for delta in deltas] == [None] * (kept - 2) + [reason]


def test_a_stop_token_as_the_last_allowed_one_is_a_stop() -> None:
    bench = Bench()
    bench.adopt(request("a", 16, max_tokens=2, stop=(7,)))
    assert bench.finish(bench.plan(), 7) == [token("a", 1, 7, FinishReason.STOP)]


def test_an_abort_while_steps_run_frees_the_blocks_when_the_last_of_them_is_done() -> None:
    bench = Bench()
    bench.adopt(request("a", 16))
    first, second = bench.plan(), bench.plan()
    assert bench.part.handle(from_router(Abort(request_id=RequestId("a"))), 0.0)
    assert (bench.part.num_requests, bench.plan()) == (0, [])
    assert (bench.finish(first, 501), bench.books.leased) == ([], 2)
    assert (bench.finish(second, 502), bench.books) == ([], free(8))


def test_an_abort_while_nothing_runs_frees_the_blocks_at_once() -> None:
    bench = Bench()
    bench.adopt(request("a", 16))
    bench.part.handle(from_router(Abort(request_id=RequestId("a"))), 0.0)
    assert bench.books == free(8)


def test_a_request_is_held_until_its_last_token() -> None:
    bench = Bench()
    bench.adopt(request("a", 16, max_tokens=2))
    assert bench.part.request_ids == {"a"}
    bench.finish(bench.plan(), 501)
    assert bench.part.request_ids == set()


def test_an_abort_of_what_is_unknown_is_fine() -> None:
    bench = Bench()
    assert bench.part.handle(from_router(Abort(request_id=RequestId("a"))), 0.0)
    assert bench.outbox.sent == []


def test_a_request_that_is_handed_over_twice_runs_once() -> None:
    bench = Bench()
    bench.adopt(request("a", 16, max_tokens=2))
    bench.adopt(request("a", 16, max_tokens=2))
    assert (bench.part.num_requests, bench.books.leased) == (1, 1)
    assert bench.finish(bench.plan(), 501) == [token("a", 1, 501, FinishReason.LENGTH)]
    assert (bench.plan(), bench.part.has_work, bench.books) == ([], False, free(8, cached=1))


def test_a_request_that_comes_again_under_its_id_has_nothing_to_do_with_chunks_of_the_former() -> None:
    bench = Bench()
    bench.adopt(request("a", 16))
    former = bench.plan()
    bench.part.handle(from_router(Abort(request_id=RequestId("a"))), 0.0)
    bench.adopt(request("a", 16))
    assert bench.finish(former, 7) == []
    assert bench.finish(bench.plan(), 501) == [token("a", 1, 501)]


def test_without_its_router_a_request_ends() -> None:
    bench = Bench()
    bench.adopt(request("a", 16))
    bench.part.lose(PREFILL, 0.0)
    assert bench.part.num_requests == 1
    bench.part.lose(ROUTER, 0.0)
    assert (bench.part.num_requests, bench.outbox.sent, bench.books) == (0, [], free(8))


def test_what_is_on_its_way_counts_as_a_request_and_leaves_running_ones_room() -> None:
    bench = Bench(3)
    bench.adopt(request("a", 20))
    offer = Offer(transfer_id=TransferId("t-b"), request=request("b", 16), router=ROUTER)
    assert bench.part.handle(Delivery(PREFILL, offer), 0.0)
    assert (bench.outbox.sent, bench.part.num_requests, bench.part.num_arriving) == ([], 2, 1)
    bench.part.handle(from_router(Abort(request_id=RequestId("a"))), 0.0)
    bench.part.sweep(0.0)
    assert len(bench.outbox.sent) == 1


def test_an_abort_reaches_what_is_on_its_way_too() -> None:
    bench = Bench()
    bench.part.handle(Delivery(PREFILL, Offer(transfer_id=TransferId("t"), request=request("a"), router=ROUTER)), 0.0)
    bench.part.handle(from_router(Abort(request_id=RequestId("a"))), 0.0)
    assert (bench.part.num_requests, bench.books.quarantined) == (0, 1)


def test_messages_for_the_prefill_part_are_not_taken() -> None:
    assert not Bench().part.handle(Delivery(PREFILL, Attached(transfer_id=TransferId("t"))), 0.0)


def test_preemption_changes_no_token_and_repeats_none() -> None:
    bench = Bench(4)
    bench.adopt(request("a", 31, max_tokens=9))
    bench.adopt(request("b", 30, max_tokens=9, first_id=100))
    told: dict[str, list[tuple[int, int | None]]] = {"a": [], "b": []}
    while chunks := bench.plan():
        drawn = [600 + chunk.output_index if chunk.samples else None for chunk in chunks]
        results = [ChunkResult(token_id) for token_id in drawn]
        bench.part.apply(list(zip(chunks, results, strict=True)), 0.0)
        for chunk in chunks:
            bench.tables.step_done(chunk)
    for delta in bench.outbox.deltas:
        told[str(delta.request_id)].append((delta.index, delta.token_id))
    expected = [(index, 600 + index) for index in range(1, 9)]
    assert (told, bench.part.num_preemptions, bench.part.num_preempted) == ({"a": expected, "b": expected}, 1, 0)
    assert bench.books.leased == 0


def test_a_token_that_completes_a_grammar_ends_the_request() -> None:
    bench = Bench()
    bench.adopt(request("a", 15))
    chunks = bench.plan()
    bench.part.apply([(chunks[0], ChunkResult(501, is_complete=True))], 0.0)
    bench.tables.step_done(chunks[0])
    assert bench.outbox.deltas == [token("a", 1, 501, FinishReason.STOP)]
    assert (bench.part.num_requests, bench.books.leased) == (0, 0)


def test_a_grammar_that_can_not_be_followed_ends_its_request_for_good_and_no_other() -> None:
    bench = Bench()
    bench.adopt(request("a", 15))
    bench.adopt(request("b", 15, first_id=300))
    chunks = bench.plan()
    results = [ChunkResult(None, failure="too complex"), ChunkResult(501)]
    bench.part.apply(list(zip(chunks, results, strict=True)), 0.0)
    for chunk in chunks:
        bench.tables.step_done(chunk)
    (to, message), *others = bench.outbox.take_sent()
    assert (to, others, bench.outbox.deltas) == (ROUTER, [], [token("b", 1, 501)])
    assert isinstance(message, RequestFailed)
    assert (message.request_id, message.reason, message.is_retryable) == ("a", "too complex", False)
    assert bench.part.num_requests == 1
