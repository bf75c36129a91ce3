"""The life of a request in the prefill part; blocks of 16 tokens, two layer groups, first token 500."""

from array import array
from collections.abc import Sequence as Seq

import pytest
from msgspec.structs import replace

from crossdock.core.messages import (
    Abort,
    Attached,
    Cancel,
    Commit,
    LeaseId,
    Message,
    Offer,
    Peer,
    PoolBooks,
    PrefillTask,
    PromptLogprobs,
    Rejected,
    Renew,
    RequestFailed,
    Reservation,
    Revoke,
    StageTimes,
    TokenDelta,
)
from crossdock.core.part import Delivery, Handover, StepBudget
from crossdock.core.request import Pooling, Request, RequestId, TokenLogprobs, TransferId
from crossdock.core.sequence import Chunk, ChunkResult, FinishReason, Sequence
from crossdock.prefill.part import PrefillPart

from ..parts import (
    DECODE,
    LEASE_SECONDS,
    NUM_GROUPS,
    PREFILL,
    ROUTER,
    Record,
    card,
    free,
    from_router,
    name_of,
    request,
    spans,
    tables_of,
)

FIRST = 500
SCORED = TokenLogprobs(-1.0)


class Bench:
    def __init__(self, num_blocks: int = 8, outbox: Record | None = None, min_push_bytes: int = 0) -> None:
        self.uncompiled: set[str] = set()
        self.tables = tables_of(num_blocks)
        self.outbox = outbox or Record()
        self.handed_over: list[Handover] = []
        self.part = PrefillPart(
            PREFILL,
            card(num_blocks),
            self.tables,
            self.outbox,
            self.handed_over.append,
            lambda: 0,
            LEASE_SECONDS,
            lambda sequence: name_of(sequence) not in self.uncompiled,
            min_push_bytes=min_push_bytes,
        )

    def task(self, wanted: Request, decode: Peer = DECODE, now: float = 0.0) -> None:
        task = PrefillTask(request=wanted, transfer_id=TransferId(f"t-{wanted.request_id}"), decode=decode)
        assert self.part.handle(from_router(task), now)

    def answer(self, message: Message, now: float = 0.0) -> None:
        assert self.part.handle(Delivery(DECODE, message), now)

    def plan(self, num_tokens: int = 512) -> list[Chunk]:
        return self.part.plan(StepBudget(num_tokens, 8), 0.0)

    def finish(self, chunks: Seq[Chunk], token_id: int = FIRST) -> None:
        """The step is done, its layer groups were not announced before."""
        results = [ChunkResult(token_id if chunk.samples else None) for chunk in chunks]
        self.part.apply(list(zip(chunks, results, strict=True)), 0.0)
        for chunk in chunks:
            self.tables.step_done(chunk)

    def compute(self, token_id: int = FIRST) -> None:
        self.finish(self.plan(), token_id)

    @property
    def books(self) -> PoolBooks:
        self.tables.prefixes.check()
        return self.tables.pool.books()


def offer(name: str, wanted: Request) -> tuple[Peer, Message]:
    hashes = tables_of(1).prompt_hashes(Sequence.of(wanted))
    return DECODE, Offer(transfer_id=TransferId(f"t-{name}"), request=wanted, router=ROUTER, block_hashes=hashes)


def reservation(blocks: list[int], first_missing: int = 0) -> Reservation:
    return Reservation(
        transfer_id=TransferId("t-a"),
        lease_id=LeaseId(3),
        generation=1,
        first_missing=first_missing,
        blocks=blocks,
        lease_seconds=LEASE_SECONDS,
    )


def commit(num_block_groups: int) -> tuple[Peer, Message]:
    return DECODE, Commit(
        transfer_id=TransferId("t-a"),
        lease_id=LeaseId(3),
        generation=1,
        num_block_groups=num_block_groups,
        first_token_ids=[FIRST],
    )


def cancel(reason: str) -> tuple[Peer, Message]:
    return DECODE, Cancel(transfer_id=TransferId("t-a"), reason=reason)


def failed(reason: str, is_retryable: bool = True) -> tuple[Peer, Message]:
    return ROUTER, RequestFailed(
        request_id=RequestId("a"), transfer_id=TransferId("t-a"), reason=reason, is_retryable=is_retryable
    )


def first_token(
    cached: int = 0, token_id: int | None = FIRST, finish: FinishReason | None = None, prefill_seconds: float = 0.0
) -> TokenDelta:
    times = StageTimes(0.0, prefill_seconds)
    return TokenDelta(RequestId("a"), 0, token_id, finish, cached_tokens=cached, times=times)


# --- computed and decoded here -----------------------------------------------------------------


def test_what_is_decoded_here_changes_its_owner_with_all_its_blocks() -> None:
    bench = Bench()
    bench.task(request("a", 20), decode=PREFILL)
    assert (bench.part.num_requests, bench.part.num_waiting, bench.part.num_queued_tokens) == (1, 1, 20)
    chunks = bench.plan()
    assert (bench.part.num_computing, bench.part.num_waiting) == (1, 0)
    bench.finish(chunks)
    (handover,) = bench.handed_over
    assert (handover.router, handover.sequence.output_ids, handover.sequence.blocks) == (ROUTER, [FIRST], [0, 1])
    assert (bench.outbox.deltas, bench.outbox.sent) == ([first_token()], [])
    assert (bench.part.num_requests, bench.part.has_work, bench.books.leased) == (0, False, 2)


def test_the_first_token_says_how_much_of_the_prompt_was_held() -> None:
    bench = Bench()
    bench.task(request("b", 40), decode=PREFILL)
    bench.compute()
    bench.task(request("a", 40), decode=PREFILL)
    bench.compute()
    assert bench.outbox.deltas[1] == first_token(cached=32)
    assert (bench.part.num_prompt_tokens, bench.part.num_cached_tokens) == (80, 32)


# --- computed here, decoded elsewhere ----------------------------------------------------------


def test_kv_travels_layer_group_by_layer_group_and_the_blocks_are_free_when_it_is_attached() -> None:
    bench = Bench()
    wanted = request("a", 40)
    bench.task(wanted)
    (chunk,) = bench.plan()
    assert bench.outbox.take_sent() == [offer("a", wanted)]
    bench.part.layers_done([chunk], range(1), 0.0)
    assert bench.outbox.pushed == []
    bench.answer(reservation([7, 5, 6]))
    assert bench.outbox.pushed == [(0, [0, 1, 2], [7, 5, 6])]
    bench.part.layers_done([chunk], range(1, 2), 0.0)
    assert bench.outbox.pushed[1:] == [(1, [0, 1, 2], [7, 5, 6])]
    assert bench.outbox.take_sent() == []
    bench.finish([chunk])
    assert (bench.outbox.deltas, bench.outbox.take_sent()) == ([first_token()], [commit(6)])
    assert (bench.part.num_kept, bench.part.has_work, bench.books.leased) == (1, False, 3)
    bench.answer(Attached(transfer_id=TransferId("t-a")))
    assert (bench.part.num_requests, bench.books) == (0, free(8, cached=2))
    assert (bench.part.num_blocks_pushed, bench.part.num_bytes_pushed) == (3, 2 * 3 * 128)


def test_a_request_is_held_until_its_kv_is_attached() -> None:
    bench = Bench()
    bench.task(request("a", 32))
    assert bench.part.request_ids == {"a"}
    bench.compute()
    bench.answer(reservation([0, 1]))
    assert bench.part.request_ids == {"a"}
    bench.answer(Attached(transfer_id=TransferId("t-a")))
    assert bench.part.request_ids == set()


def test_only_whole_blocks_travel_before_the_prompt_is_complete() -> None:
    bench = Bench()
    bench.task(request("a", 40))
    (first,) = bench.plan(32)
    bench.answer(reservation([1, 2, 3]))
    bench.part.layers_done([first], range(1), 0.0)
    (second,) = bench.plan(32)
    assert bench.outbox.pushed == [(0, [0, 1], [1, 2])]
    bench.part.layers_done([first], range(1, 2), 0.0)
    bench.finish([first])
    bench.part.layers_done([second], range(1), 0.0)
    assert bench.outbox.pushed[1:] == [(1, [0, 1], [1, 2]), (0, [2], [3])]
    bench.finish([second])
    assert bench.outbox.pushed[3:] == [(1, [2], [3])]
    assert bench.outbox.sent[-1] == commit(6)


def test_blocks_that_either_side_holds_already_are_not_computed_or_not_shipped() -> None:
    bench = Bench()
    bench.task(request("b", 40), decode=PREFILL)
    bench.compute()
    bench.task(request("a", 40))
    (chunk,) = bench.plan()
    assert (chunk.start, chunk.blocks) == (32, [0, 1, 3])
    bench.answer(reservation([4, 5], first_missing=1))
    assert bench.outbox.pushed == [(0, [1], [4]), (1, [1], [4])]  # held here, missing there
    bench.finish([chunk])
    assert bench.outbox.pushed[2:] == [(0, [3], [5]), (1, [3], [5])]
    assert bench.outbox.sent[-1] == commit(4)
    bench.answer(Attached(transfer_id=TransferId("t-a")))
    assert (bench.part.num_blocks_skipped, bench.part.num_blocks_pushed) == (1, 2)


def test_a_reservation_that_comes_after_the_prompt_is_computed_brings_all_at_once() -> None:
    bench = Bench()
    bench.task(request("a", 20))
    bench.compute()
    assert (bench.part.num_kept, bench.outbox.pushed) == (1, [])
    bench.answer(reservation([1, 2]))
    assert bench.outbox.pushed == [(0, [0, 1], [1, 2]), (1, [0, 1], [1, 2])]
    assert bench.outbox.sent[-1] == commit(4)


def test_a_lease_is_renewed_while_the_prompt_is_computed() -> None:
    bench = Bench()
    bench.task(request("a", 20))
    bench.plan()
    bench.answer(reservation([1, 2]))
    bench.outbox.take_sent()
    bench.part.sweep(LEASE_SECONDS / 3)
    renew = Renew(transfer_id=TransferId("t-a"), lease_id=LeaseId(3), generation=1)
    assert bench.outbox.take_sent() == [(DECODE, renew)]


# --- a prompt that brings its own end ----------------------------------------------------------


@pytest.mark.parametrize("decode", [PREFILL, DECODE])
def test_one_token_is_one_token_and_nothing_is_shipped(decode: Peer) -> None:
    bench = Bench()
    bench.task(request("a", 16, max_tokens=1), decode)
    bench.compute()
    assert bench.outbox.deltas == [first_token(finish=FinishReason.LENGTH)]
    assert (bench.outbox.sent, bench.handed_over, bench.part.num_requests) == ([], [], 0)
    assert bench.books == free(8, cached=1)


@pytest.mark.parametrize("decode", [PREFILL, DECODE])
def test_without_tokens_the_prompt_alone_is_computed(decode: Peer) -> None:
    bench = Bench()
    bench.task(request("a", 16, max_tokens=0), decode)
    (chunk,) = bench.plan()
    assert not chunk.samples
    bench.finish([chunk])
    assert bench.outbox.deltas == [first_token(token_id=None, finish=FinishReason.LENGTH)]
    assert (bench.outbox.sent, bench.handed_over, bench.books) == ([], [], free(8, cached=1))


def test_a_first_token_that_stops_the_request_is_not_committed() -> None:
    bench = Bench()
    bench.task(request("a", 16, stop=(FIRST,)))
    (chunk,) = bench.plan()
    bench.answer(reservation([4]))
    bench.outbox.take_sent()
    bench.finish([chunk])
    assert bench.outbox.deltas == [first_token(finish=FinishReason.STOP)]
    assert bench.outbox.sent == [cancel("the first token ended the request")]
    assert (bench.part.num_requests, bench.books) == (0, free(8, cached=1))


def test_a_first_token_that_stops_a_request_decoded_here_hands_nothing_over() -> None:
    bench = Bench()
    bench.task(request("a", 16, stop=(FIRST,)), decode=PREFILL)
    bench.compute()
    assert bench.outbox.deltas[0].finish == FinishReason.STOP
    assert (bench.handed_over, bench.books) == ([], free(8, cached=1))


def test_logprobs_of_the_prompt_are_told_before_the_first_token() -> None:
    bench = Bench()
    bench.task(request("a", 3, max_tokens=0, prompt_logprobs=0))
    (chunk,) = bench.plan()
    bench.part.apply([(chunk, ChunkResult(None, None, (SCORED, SCORED)))], 0.0)
    scored = PromptLogprobs(request_id=RequestId("a"), start=1, logprobs=[SCORED, SCORED])
    assert bench.outbox.sent == [(ROUTER, scored)]


# --- ends --------------------------------------------------------------------------------------


def test_a_request_that_waits_is_aborted_without_a_trace() -> None:
    bench = Bench()
    bench.task(request("a", 16))
    assert not bench.part.handle(from_router(Abort(request_id=RequestId("a"))), 0.0)  # decode wants to see it too
    assert (bench.part.num_requests, bench.part.has_work, bench.outbox.sent) == (0, False, [])


def test_an_abort_while_a_step_runs_frees_the_blocks_when_the_step_is_done() -> None:
    bench = Bench()
    bench.task(request("a", 40))
    first, second = bench.plan(32), bench.plan(32)
    bench.outbox.take_sent()
    bench.part.handle(from_router(Abort(request_id=RequestId("a"))), 0.0)
    assert bench.outbox.take_sent() == [cancel("aborted by the client")]
    bench.finish(first)
    assert bench.books.leased == 3
    bench.finish(second)
    assert (bench.books, bench.outbox.deltas, bench.outbox.sent) == (free(8), [], [])


def test_an_abort_of_what_is_kept_cancels_the_transfer() -> None:
    bench = Bench()
    bench.task(request("a", 40))
    bench.compute()
    bench.outbox.take_sent()
    bench.part.handle(from_router(Abort(request_id=RequestId("a"))), 0.0)
    assert (bench.outbox.take_sent(), bench.books) == ([cancel("aborted by the client")], free(8, cached=2))
    bench.answer(reservation([1, 2, 3]))
    assert bench.outbox.sent == [cancel("no such transfer here")]


def test_a_broken_link_ends_the_request_and_tells_both() -> None:
    bench = Bench()
    bench.task(request("a", 40))
    chunks = bench.plan()
    bench.outbox.take_sent()
    bench.answer(reservation([1, 2, 3]))
    bench.outbox.is_link_down = True
    bench.part.layers_done(chunks, range(1), 0.0)
    assert bench.outbox.take_sent() == [cancel("the link is down"), failed("the link is down")]
    bench.part.layers_done(chunks, range(1, 2), 0.0)
    bench.finish(chunks)
    assert (bench.outbox.sent, bench.outbox.deltas, bench.books) == ([], [], free(8))
    assert (bench.part.num_transfers, bench.part.num_transfer_failures) == (1, 1)


@pytest.mark.parametrize("kind", [Rejected, Revoke])
def test_what_the_decode_worker_refuses_may_be_tried_again(kind: type[Rejected] | type[Revoke]) -> None:
    bench = Bench()
    bench.task(request("a", 40))
    bench.compute()
    bench.outbox.take_sent()
    bench.answer(kind(transfer_id=TransferId("t-a"), reason="why not"))
    assert bench.outbox.sent == [cancel("why not"), failed("why not")]
    assert bench.books == free(8, cached=2)


def test_messages_of_unknown_transfers_change_nothing() -> None:
    bench = Bench()
    for message in (Attached(transfer_id=TransferId("t-a")), Rejected(transfer_id=TransferId("t-a"), reason="")):
        bench.answer(message)
    assert bench.outbox.sent == []
    bench.answer(Revoke(transfer_id=TransferId("t-a"), reason=""))
    assert bench.outbox.sent == [cancel("no such transfer here")]


def test_what_can_never_be_served_is_refused_at_once() -> None:
    bench = Bench(num_blocks=4)
    bench.task(request("a", 60, max_tokens=5))
    assert bench.outbox.sent == [failed("prompt and max_tokens are 65 tokens, the limit is 64", is_retryable=False)]
    assert not bench.part.has_work


def test_a_repeated_task_is_one_task() -> None:
    bench = Bench()
    bench.task(request("a", 16), decode=PREFILL)
    bench.task(request("a", 16), decode=PREFILL)
    bench.compute()
    assert (len(bench.handed_over), bench.part.has_work) == (1, False)


def test_a_dead_decode_worker_ends_its_requests_and_no_others() -> None:
    bench = Bench()
    bench.task(request("a", 16))
    bench.task(request("b", 16, first_id=100), decode=PREFILL)
    bench.compute()
    bench.outbox.take_sent()
    bench.part.lose(DECODE, 0.0)
    assert bench.outbox.sent == [cancel("the decode worker is gone"), failed("the decode worker is gone")]
    assert (bench.part.num_requests, len(bench.handed_over)) == (0, 1)


def test_without_its_router_a_request_ends_silently() -> None:
    bench = Bench()
    bench.task(request("a", 16))
    bench.plan()
    bench.outbox.take_sent()
    bench.part.lose(ROUTER, 0.0)
    assert bench.outbox.sent == [cancel("the router is gone")]
    assert bench.part.num_requests == 0


def test_a_request_that_comes_again_under_its_id_has_nothing_to_do_with_chunks_of_the_former() -> None:
    bench = Bench()
    bench.task(request("a", 16), decode=PREFILL)
    former = bench.plan()
    bench.part.handle(from_router(Abort(request_id=RequestId("a"))), 0.0)
    bench.task(request("a", 16), decode=PREFILL)
    bench.finish(former, token_id=7)
    assert bench.outbox.deltas == []
    bench.compute()
    assert bench.outbox.deltas == [first_token()]


def test_groups_of_a_cached_prefix_travel_as_soon_as_there_is_a_reservation() -> None:
    bench = Bench()
    bench.task(request("b", 33), decode=PREFILL)
    bench.compute()
    bench.task(request("a", 33))
    bench.plan()
    bench.answer(reservation([1, 2, 3]))
    assert bench.outbox.pushed == [(group, [0, 1], [1, 2]) for group in range(NUM_GROUPS)]


# --- grammars ------------------------------------------------------------------------------------


def test_a_request_whose_grammar_compiles_is_overtaken_and_starts_when_that_is_done() -> None:
    bench = Bench()
    bench.uncompiled.add("a")
    bench.task(request("a", 20))
    bench.task(request("b", 20, first_id=300), PREFILL)
    assert bench.part.num_waiting == 2
    assert spans(bench.plan()) == ["b 0-20 ->"]
    bench.part.sweep(1.0)
    assert (bench.plan(), bench.part.num_waiting, bench.part.num_requests) == ([], 1, 2)
    bench.uncompiled.clear()
    bench.part.sweep(2.0)
    assert spans(bench.plan()) == ["a 0-20 ->"]


def test_a_request_is_aborted_while_its_grammar_compiles() -> None:
    bench = Bench()
    bench.uncompiled.add("a")
    bench.task(request("a", 20))
    bench.part.handle(from_router(Abort(request_id=RequestId("a"))), 0.0)
    bench.uncompiled.clear()
    bench.part.sweep(1.0)
    assert (bench.plan(), bench.part.num_requests, bench.books) == ([], 0, free(8))


def test_a_grammar_that_can_not_be_followed_ends_the_request_at_both_workers_for_good() -> None:
    bench = Bench()
    bench.task(request("a", 20))
    (chunk,) = bench.plan()
    bench.outbox.take_sent()
    bench.part.apply([(chunk, ChunkResult(None, failure="too complex"))], 0.0)
    bench.tables.step_done(chunk)
    assert bench.outbox.take_sent() == [failed("too complex", is_retryable=False), cancel("too complex")]
    assert (bench.outbox.deltas, bench.part.num_requests, bench.books) == ([], 0, free(8))


def test_a_first_token_that_completes_a_grammar_ends_the_request() -> None:
    bench = Bench()
    bench.task(request("a", 20), PREFILL)
    (chunk,) = bench.plan()
    bench.part.apply([(chunk, ChunkResult(FIRST, is_complete=True))], 0.0)
    bench.tables.step_done(chunk)
    assert bench.outbox.deltas == [first_token(finish=FinishReason.STOP)]
    assert (bench.handed_over, bench.part.num_requests) == ([], 0)


@pytest.mark.parametrize("value", [1.0, float("nan"), float("inf")])
def test_a_vector_is_told_only_if_it_is_made_of_numbers(value: float) -> None:
    bench = Bench()
    bench.task(replace(request("a", 20, max_tokens=0), pooling=Pooling.MEAN), PREFILL)
    (chunk,) = bench.plan()
    bench.part.apply([(chunk, ChunkResult(None, pooled=array("d", [20.0, 20 * value]).tobytes()))], 0.0)
    bench.tables.step_done(chunk)
    told = [array("f", delta.pooled).tolist() for delta in bench.outbox.deltas]
    if value == 1:
        assert (told, bench.outbox.take_sent()) == ([[1.0, 1.0]], [])
    else:
        reason = "the model's output is not a number"
        assert (told, bench.outbox.take_sent()) == ([], [failed(reason, is_retryable=True)])
    assert (bench.part.num_requests, bench.books.leased) == (0, 0)
