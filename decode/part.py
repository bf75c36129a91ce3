"""The decode half of a worker. The life of a request here::

    Offer ─> arrivals (KV on its way) ──Commit──┐
                                                ├──> running ──stop or length──> gone
    Handover (computed on this worker) ─────────┘    │     ^
                                   gives way         v     │ room again: computes prompt and output
                                                    preempted

Of a request with forks one copy of the KV arrives; from then on each choice is a request of its own.

A running request yields a token a step. Whatever ends it frees its blocks at once, or as soon as the step on
the device that still writes to them has ended.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from msgspec.structs import replace

from ..core.block_tables import BlockTables
from ..core.messages import Abort, Peer, Push, RequestFailed, StageTimes, TokenDelta, WorkerCard
from ..core.part import Checksums, Delivery, Handover, MayRun, Outbox, Payload, StepBudget, no_checksums
from ..core.request import RequestId, TransferId
from ..core.sequence import Chunk, ChunkResult, settle
from ..core.stages import StageName, Timeline
from ..kvtransfer.pool_bytes import Mark
from .arrivals import Arrivals
from .scheduler import DecodeScheduler


@dataclass(frozen=True, slots=True)
class _Held:
    """A request that runs here, or waits for room to."""

    handover: Handover
    timeline: Timeline

    @property
    def times(self) -> StageTimes:
        """Once it is in its first step."""
        queue = self.timeline.seconds(StageName.DECODE_QUEUE, self.handover.ready_at)
        return StageTimes(queue, transfer_seconds=self.handover.transfer_seconds)


class DecodePart:
    """See the module's docstring for the life of a request.

    ``land`` launches the copy of a `Push`'s payload into the pool; ``group_bytes`` are the bytes of one block's layer
    groups. ``checksums`` are compared with those of a `Commit` that brings any.
    """

    def __init__(
        self,
        card: WorkerCard,
        tables: BlockTables,
        outbox: Outbox,
        group_bytes: tuple[int, ...],
        land: Callable[[Push, Payload], Mark],
        lease_seconds: float,
        may_run: MayRun = lambda sequence: True,
        checksums: Checksums = no_checksums,
    ) -> None:
        self._tables = tables
        self._outbox = outbox
        self._scheduler = DecodeScheduler(tables, may_run)
        self._requests: dict[RequestId, _Held] = {}
        self._newcomers: set[RequestId] = set()
        self._arrivals = Arrivals(
            card,
            tables,
            outbox,
            group_bytes,
            lease_seconds,
            lambda: self.num_held_back,
            self.adopt,
            land,
            may_run,
            checksums,
        )
        self.num_output_tokens = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def request_ids(self) -> AbstractSet[RequestId]:
        return self._requests.keys() | self._arrivals.request_ids

    @property
    def num_held_back(self) -> int:
        """Blocks that no newcomer, here or in the prefill part, may take."""
        return self._scheduler.num_held_back + self._arrivals.num_promised

    @property
    def num_requests(self) -> int:
        """Requests that this part still owes an answer."""
        return len(self._requests) + self.num_arriving

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_preempted(self) -> int:
        return self._scheduler.num_preempted

    @property
    def num_preemptions(self) -> int:
        return self._scheduler.num_preemptions

    @property
    def num_arriving(self) -> int:
        return self._arrivals.num_arriving

    def adopt(self, handover: Handover) -> None:
        """Take over a request whose prompt is computed and whose first token is known; never the same one twice."""
        request_id = handover.sequence.request.request_id
        if request_id in self._requests:
            self._tables.release(handover.sequence)
            return
        timeline = Timeline(handover.sequence.request, StageName.DECODE_QUEUE, handover.ready_at)
        self._requests[request_id] = _Held(handover, timeline)
        self._newcomers.add(request_id)
        self._scheduler.add(handover.sequence)

    def handle(self, delivery: Delivery, now: float) -> bool:
        if isinstance(delivery.message, Abort):
            self._arrivals.abort(delivery.message.request_id, now)
            self._end(delivery.message.request_id, now, "aborted by the client")
            return True
        return self._arrivals.handle(delivery, now)

    def plan(self, budget: StepBudget, now: float) -> list[Chunk]:
        chunks = self._scheduler.plan(budget)
        if self._newcomers:
            self._note_starts(chunks, now)
        return chunks

    def _note_starts(self, chunks: Seq[Chunk], now: float) -> None:
        """Some newcomers are in their first step."""
        started = self._newcomers.intersection(chunk.sequence.request.request_id for chunk in chunks)
        self._newcomers -= started
        for request_id in started:
            self._requests[request_id].timeline.enter(StageName.DECODE, now)

    def layers_done(self, chunks: Seq[Chunk], groups: range, now: float) -> None:
        """Nothing waits for the KV of a single layer group here."""

    def apply(self, done: Iterable[tuple[Chunk, ChunkResult]], now: float) -> None:
        told: defaultdict[Peer, list[TokenDelta]] = defaultdict(list)
        for chunk, result in done:
            sequence = chunk.sequence
            request_id = sequence.request.request_id
            held = self._requests.get(request_id)
            if held is None or held.handover.sequence is not sequence:
                continue  # it ended while this chunk was on the device
            if result.failure:
                self._fail(held.handover, result, now)
                continue
            finish = settle(chunk, result)
            self._tables.publish(sequence)
            if result.token_id is not None:
                index = sequence.num_computed - sequence.num_prompt
                delta = TokenDelta(request_id, index, result.token_id, finish, result.logprobs)
                told[held.handover.router].append(replace(delta, times=held.times) if index == 1 else delta)
            if finish is not None:
                self._end(request_id, now)
        for router, deltas in told.items():
            self.num_output_tokens += len(deltas)
            self._outbox.emit(router, deltas)

    def _fail(self, handover: Handover, result: ChunkResult, now: float) -> None:
        """End a request that can't go on."""
        request_id = handover.sequence.request.request_id
        failed = RequestFailed(
            request_id=request_id,
            transfer_id=TransferId(request_id),  # the router knows it by its request id; the transfer is over
            reason=result.failure,
            is_retryable=result.is_retryable,
        )
        self._outbox.send(handover.router, failed)
        self._end(request_id, now, result.failure)

    def sweep(self, now: float) -> None:
        self._arrivals.sweep(now)

    def lose(self, peer: Peer, now: float) -> None:
        """Without its router nobody reads a request; a dead prefill worker matters only to what is still arriving."""
        self._arrivals.lose(peer, now)
        for request_id, held in list(self._requests.items()):
            if held.handover.router == peer:
                self._end(request_id, now, "the router is gone")

    def _end(self, request_id: RequestId, now: float, outcome: str = "") -> None:
        """Forget a request, if it is here, and free its blocks."""
        if held := self._requests.pop(request_id, None):
            sequence = held.handover.sequence
            self._newcomers.discard(request_id)
            self._scheduler.remove(sequence)
            self._tables.release(sequence)
            held.timeline.count(output_tokens=len(sequence.token_ids) - sequence.num_prompt)
            self._outbox.note(held.timeline.ended(now, outcome))
