"""The ledger of open requests: one entry a choice, with what it asked for, what it has emitted and its two legs.

    open -> begin -> tokens in the order of their index -> end
              ^          |
              +- retry --+   a leg failed and nothing has reached the client

Workers see a new request id in every attempt, ``<id>.<attempt>``, so that whatever an older one still sends
is unknown here and ignored. Pure bookkeeping: the dispatcher sends and receives.
"""

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from ..core.messages import Incarnation, Peer, PrefillTask, PromptLogprobs, TokenDelta
from ..core.request import Fork, Request, RequestId, TransferId
from .fleet import Pair, Worker


class Sink(Protocol):
    """Where the results of an entry go: the stream of its HTTP request."""

    def emit(self, entry: "Entry", delta: TokenDelta) -> None:
        """The next token, exactly once and in order; the one with ``finish`` is the last."""

    def emit_prompt(self, entry: "Entry", part: PromptLogprobs) -> None:
        """Log-probabilities of some prompt positions, before the first token; may be repeated."""

    def restart(self, entry: "Entry") -> None:
        """A new attempt begins at index 0: forget all that came for this choice."""

    def fail(self, entry: "Entry", failure: "Failure") -> None:
        """The choice ends here without its result."""


@dataclass(frozen=True, slots=True)
class Failure:
    """``is_retryable`` says that the fault lies in the fleet or the moment, not in the request."""

    reason: str
    is_retryable: bool


@dataclass(frozen=True, slots=True)
class Attempt:
    """One try of one pair."""

    request_id: RequestId
    pair: Pair

    @property
    def legs(self) -> tuple[Worker, ...]:
        return (self.pair.prefill,) if self.pair.is_one_worker else (self.pair.prefill, self.pair.decode)


class AttemptTrace(Protocol):
    """Who tells of the attempts of an entry."""

    def begin_attempt(self, entry: "Entry") -> str:
        """The entry's newest attempt is about to be sent; the ``Request.trace`` that its workers see."""

    def end_attempt(self, entry: "Entry", outcome: str, is_failure: bool) -> None:
        """The newest attempt is over, and why."""


@dataclass(slots=True, eq=False)
class Entry:
    """One choice of one HTTP request.

    ``may_restart`` is true where nothing reaches the client before the end (no streaming), so that a new
    attempt may begin whatever was received. ``moved_at`` is when the attempt began or last emitted a token,
    ``asked_at`` when its legs were last asked whether they hold it, and ``denied_by`` are those that said no;
    ``end_reason`` why it is over for good. The prompt of a fork is computed for another choice. ``num_counted`` output
    tokens are in the metrics, whatever attempt they came in; ``prefill_seconds`` is what the prefill worker took, if
    it told.
    """

    request: Request
    choice: int
    sink: Sink
    opened_at: float
    may_restart: bool = False
    trace: AttemptTrace | None = None
    attempts: list[Attempt] = field(default_factory=list)
    output_ids: "array[int]" = field(default_factory=lambda: array("I"))
    is_finished: bool = False
    is_fork: bool = False
    first_token_at: float | None = None
    moved_at: float = 0.0
    asked_at: float = 0.0
    denied_by: set[Incarnation] = field(default_factory=set)
    end_reason: str | None = None
    num_counted: int = 0
    cached_tokens: int = 0
    prefill_seconds: float | None = None
    gap_since: float | None = None
    ahead: dict[int, TokenDelta] = field(default_factory=dict)

    @property
    def attempt(self) -> Attempt:
        return self.attempts[-1]

    @property
    def can_restart(self) -> bool:
        """Whether a client would not notice that the output begins again."""
        return self.may_restart or not self.output_ids

    def needs(self, worker: Worker) -> bool:
        """Whether this request can't go on without ``worker``, a leg of its attempt.

        The prefill worker has done its part once a token of the decode worker is here.
        """
        return worker.peer == self.attempt.pair.decode.peer or len(self.output_ids) < 2

    def accept(self, delta: TokenDelta, now: float) -> list[TokenDelta]:
        """The tokens that may be emitted now that ``delta`` is here.

        Legs are not ordered among each other: what comes early waits for the gap to close, what was
        emitted before is dropped.
        """
        if self.is_finished or not len(self.output_ids) <= delta.index <= self.request.max_tokens:
            return []
        if delta.index == len(self.output_ids) and not self.ahead:  # nearly always
            self._append(delta)
            return [delta]
        self.ahead.setdefault(delta.index, delta)
        ready = list(self._take_ready())
        if not self.ahead:
            self.gap_since = None
        elif ready or self.gap_since is None:
            self.gap_since = now
        return ready

    def _take_ready(self) -> Iterator[TokenDelta]:
        while not self.is_finished and (delta := self.ahead.pop(len(self.output_ids), None)) is not None:
            self._append(delta)
            yield delta

    def _append(self, delta: TokenDelta) -> None:
        self.is_finished = delta.finish is not None or delta.token_id is None
        if delta.token_id is not None:
            self.output_ids.append(delta.token_id)

    def forget_output(self) -> None:
        self.output_ids = array("I")
        self.ahead.clear()
        self.first_token_at = self.gap_since = None


class Ledger:
    """All entries with an attempt under way, by the id that the workers know and by worker."""

    def __init__(self) -> None:
        self._entries: dict[RequestId, Entry] = {}
        self._by_worker: dict[Incarnation, dict[RequestId, Entry]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        return iter(list(self._entries.values()))

    @property
    def num_running(self) -> int:
        """Entries that have their first token."""
        return sum(entry.first_token_at is not None for entry in self._entries.values())

    def begin(self, entries: Sequence[Entry], pair: Pair, now: float) -> PrefillTask:
        """A new attempt on ``pair``, of choices over one prompt; what the prefill worker must be told.

        The prompt is computed once: the first choice is the request, the others are its forks. One that fails alone
        is begun alone the next time.
        """
        for entry in entries:
            request_id = RequestId(f"{entry.request.request_id}.{len(entry.attempts) + 1}")
            entry.attempts.append(Attempt(request_id, pair))
            entry.is_fork = entry is not entries[0]
            entry.moved_at = now
            self._entries[request_id] = entry
            for leg in entry.attempt.legs:
                self._by_worker.setdefault(leg.incarnation, {})[request_id] = entry
        request_id, request = entries[0].attempt.request_id, _request(entries)
        return PrefillTask(request=request, transfer_id=TransferId(request_id), decode=pair.decode.peer)

    def find(self, request_id: RequestId, sender: Peer) -> Entry | None:
        """The entry whose current attempt has this id and runs, in part, on ``sender``."""
        of_worker = self._by_worker.get(sender.incarnation)
        return of_worker.get(request_id) if of_worker is not None else None

    def end(self, entry: Entry) -> bool:
        """The current attempt is over; false if it was already."""
        attempt = entry.attempt
        if self._entries.pop(attempt.request_id, None) is None:
            return False
        for leg in attempt.legs:
            of_worker = self._by_worker[leg.incarnation]
            del of_worker[attempt.request_id]
            if not of_worker:
                del self._by_worker[leg.incarnation]
        return True

    def on_worker(self, worker: Worker) -> list[Entry]:
        """The entries with a leg on this worker."""
        return list(self._by_worker.get(worker.incarnation, {}).values())


def _request(entries: Sequence[Entry]) -> Request:
    """The first entry's request with the others as its forks, under the ids of their newest attempts."""
    forks = []
    for entry in entries:
        seed = entry.request.params.seed
        assert seed is not None, "the seed of a choice is settled when it is prepared"
        trace = entry.trace.begin_attempt(entry) if entry.trace is not None else ""
        forks.append(Fork(entry.attempt.request_id, seed, trace))
    first, *others = forks
    return msgspec.structs.replace(
        entries[0].request, request_id=first.request_id, trace=first.trace, forks=tuple(others)
    )
