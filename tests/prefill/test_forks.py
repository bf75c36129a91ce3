"""A request with forks in the prefill part: one prompt, one transfer, a first token and an end for each choice."""

from collections.abc import Sequence as Seq

from crossdock.core.messages import (
    Abort,
    Attached,
    Message,
    Offer,
    Peer,
    PromptLogprobs,
    RequestFailed,
    StageTimes,
    TokenDelta,
)
from crossdock.core.request import RequestId, TokenLogprobs, TransferId
from crossdock.core.sequence import ChunkResult, Draw, FinishReason

from ..parts import PREFILL, ROUTER, free, from_router, name_of, request
from .test_part import FIRST, Bench, offer, reservation

STOP = 999
WANTED = request("a", 20, stop=(STOP,), num_forks=2)


def draw(bench: Bench, *others: int, logprobs: TokenLogprobs | None = None) -> None:
    """The only chunk of the prompt is done; the choices' first tokens are `FIRST` and ``others``."""
    (chunk,) = bench.plan()
    result = ChunkResult(FIRST, logprobs, forks=tuple(Draw(token_id, logprobs) for token_id in others))
    bench.part.apply([(chunk, result)], 0.0)
    bench.tables.step_done(chunk)


def said(bench: Bench) -> list[tuple[str, int | None, FinishReason | None]]:
    return [(str(delta.request_id), delta.token_id, delta.finish) for delta in bench.outbox.deltas]


def abort(bench: Bench, *names: str) -> None:
    for name in names:
        bench.part.handle(from_router(Abort(request_id=RequestId(name))), 0.0)


def failures(sent: Seq[tuple[Peer, Message]]) -> list[str]:
    return [str(message.request_id) for to, message in sent if to == ROUTER and isinstance(message, RequestFailed)]


def committed(bench: Bench) -> list[int | None]:
    return next(
        message.first_token_ids for _, message in bench.outbox.take_sent() if hasattr(message, "first_token_ids")
    )


def test_one_prompt_and_one_transfer_give_a_first_token_to_every_choice() -> None:
    bench = Bench()
    bench.task(WANTED)
    scored, times = TokenLogprobs(-1.5), StageTimes(0.0, prefill_seconds=0.0)
    draw(bench, 501, STOP, logprobs=scored)
    assert bench.outbox.deltas == [
        TokenDelta(RequestId("a"), 0, FIRST, logprobs=scored, times=times),
        TokenDelta(RequestId("a1"), 0, 501, logprobs=scored, times=times),
        TokenDelta(RequestId("a2"), 0, STOP, FinishReason.STOP, logprobs=scored, times=times),
    ]
    assert bench.outbox.take_sent() == [offer("a", WANTED)]
    bench.answer(reservation([5, 6]))
    assert committed(bench) == [FIRST, 501, None]
    bench.answer(Attached(transfer_id=TransferId("t-a")))
    counts = (bench.part.num_transfers, bench.part.num_prompt_tokens, bench.part.num_blocks_pushed)
    assert (counts, bench.part.num_requests, bench.books) == ((1, 20, 2), 0, free(8, cached=1))


def test_what_is_decoded_here_is_split_without_a_transfer() -> None:
    bench = Bench()
    bench.task(WANTED, decode=PREFILL)
    draw(bench, STOP, 502)
    handed = [(name_of(over.sequence), over.sequence.output_ids, over.sequence.blocks) for over in bench.handed_over]
    assert handed == [("a", [FIRST], [0, 1]), ("a2", [502], [0, 1])]
    assert (bench.outbox.sent, bench.part.num_requests, bench.books.leased) == ([], 0, 2)


def test_a_choice_that_is_aborted_says_nothing_and_the_others_go_on() -> None:
    bench = Bench()
    bench.task(WANTED)
    abort(bench, "a")
    draw(bench, 501, 502)
    assert said(bench) == [("a1", 501, None), ("a2", 502, None)]
    bench.answer(reservation([5, 6]))
    assert committed(bench) == [None, 501, 502]
    for name in ("a1", "a2"):
        abort(bench, name)
    assert (bench.part.num_requests, bench.books) == (0, free(8, cached=1))


def test_choices_that_all_end_at_once_are_not_offered_for_nothing() -> None:
    bench = Bench()
    bench.task(request("a", 20, max_tokens=0, num_forks=2))
    bench.compute()
    assert said(bench) == [(name, None, FinishReason.LENGTH) for name in ("a", "a1", "a2")]
    bench.outbox.deltas.clear()
    bench.task(request("b", 20, max_tokens=1, num_forks=1))
    draw(bench, 501)
    assert said(bench) == [("b", FIRST, FinishReason.LENGTH), ("b1", 501, FinishReason.LENGTH)]
    assert (bench.outbox.sent, bench.books) == ([], free(8, cached=1))


def test_a_transfer_that_fails_fails_every_choice_that_still_waits_for_it() -> None:
    bench = Bench()
    bench.task(WANTED)
    draw(bench, STOP, 502)
    bench.outbox.is_link_down = True
    bench.answer(reservation([5, 6]))
    assert failures(bench.outbox.take_sent()) == ["a", "a2"]
    assert (bench.part.num_requests, bench.part.num_transfer_failures, bench.books) == (0, 1, free(8, cached=1))


def test_prompt_logprobs_are_told_once_under_a_choice_that_is_wanted() -> None:
    bench = Bench()
    bench.task(request("a", 20, prompt_logprobs=0, num_forks=2))
    abort(bench, "a")
    (chunk,) = bench.plan()
    scores = (TokenLogprobs(-1.0),) * 19
    result = ChunkResult(FIRST, prompt_logprobs=scores, forks=(Draw(501), Draw(502)))
    bench.part.apply([(chunk, result)], 0.0)
    told = [message for to, message in bench.outbox.sent if to == ROUTER]
    assert told == [PromptLogprobs(request_id=RequestId("a1"), start=1, logprobs=list(scores))]


def test_more_choices_than_the_pool_can_hold_are_refused_and_those_that_fit_wait_for_room() -> None:
    bench = Bench(4)
    bench.task(request("a", 20, num_forks=3))
    assert failures(bench.outbox.take_sent()) == ["a", "a1", "a2", "a3"]
    bench.task(request("b", 20, num_forks=2))
    held = bench.tables.pool.take(1)
    assert bench.plan() == []
    bench.tables.pool.give_back(held)
    assert len(bench.plan()) == 1
    assert [type(message) for _, message in bench.outbox.sent] == [Offer]
