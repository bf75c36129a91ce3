"""The prefill half of a worker. The life of a request here::

    PrefillTask
        │
     waiting ──room for the whole prompt──> computing ──last chunk: first token──> kept ──Attached──> gone
        │                                   │ first chunk: Offer                   │
        │                                   │ each layer group: Push               │
        └──── Abort, failure ───────────────┴──── first token ends it, Abort, ─────┘
                                                  transfer failed

When the decode side of the task is this very worker nothing is shipped: the sequence, blocks and all, changes its
owner (`Handover`). Whatever ends a request here frees its blocks and tells the decode side at once.

A request with forks is one job: its prompt is computed and shipped once, then every choice gets a first token of its
own. A choice may be aborted alone; the job ends with the last of them.
"""

from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from msgspec.structs import replace

from ..core.block_tables import BlockTables
from ..core.messages import (
    Abort,
    Attached,
    Commit,
    Message,
    Offer,
    Peer,
    PrefillTask,
    PromptLogprobs,
    Push,
    Rejected,
    RequestFailed,
    Reservation,
    Revoke,
    StageTimes,
    TokenDelta,
    WorkerCard,
)
from ..core.part import (
    Checksums,
    Delivery,
    Handover,
    MayRun,
    Outbox,
    StepBudget,
    TransferFailed,
    no_checksums,
)
from ..core.pooling import PooledSum
from ..core.request import Request, RequestId, TransferId
from ..core.sequence import Chunk, ChunkResult, Draw, FinishReason, Sequence, ending, settle
from ..core.stages import StageName, Timeline
from ..core.unfit import refuse_unfit
from ..kvtransfer.sender import Failed, Sender, SenderActions, answer_unknown
from .scheduler import PromptScheduler

TICK_SECONDS = 0.01
"""Deadlines of transfers are seconds away: to look at all of them whenever the loop comes round would add up."""


@dataclass(slots=True, eq=False)
class Job:
    """A request on its way through this part.

    ``sender`` exists from the first chunk on if its KV travels, ``pooled`` if a vector of its prompt is wanted.
    ``wanted`` are the choices that nobody has aborted.
    """

    task: PrefillTask
    router: Peer
    sequence: Sequence
    choices: tuple[Request, ...]
    wanted: set[RequestId]
    timeline: Timeline
    sender: Sender | None = None
    pooled: PooledSum | None = None
    num_cached: int = 0
    first_missing: int = 0
    is_started: bool = False
    is_computed: bool = False

    @classmethod
    def of(cls, task: PrefillTask, router: Peer, now: float) -> "Job":
        choices = task.request.choices
        wanted = {choice.request_id for choice in choices}
        timeline = Timeline(task.request, StageName.PREFILL_QUEUE, now)
        return cls(task, router, Sequence.of(task.request), choices, wanted, timeline)

    @property
    def wanted_choices(self) -> list[Request]:
        return [choice for choice in self.choices if choice.request_id in self.wanted]


class PrefillPart:
    """See the module's docstring for the life of a request.

    ``hand_over`` takes a computed sequence to the decode part of this worker; ``held_back`` is the number of blocks
    that part wants left free. A request that ``may_run`` holds up is queued once it no longer does. KV waits for more,
    if more will come, until there are ``min_push_bytes`` of it to be pushed.
    """

    def __init__(
        self,
        me: Peer,
        card: WorkerCard,
        tables: BlockTables,
        outbox: Outbox,
        hand_over: Callable[[Handover], None],
        held_back: Callable[[], int],
        lease_seconds: float,
        may_run: MayRun = lambda sequence: True,
        checksums: Checksums = no_checksums,
        min_push_bytes: int = 0,
    ) -> None:
        self._me = me
        self._card = card
        self._tables = tables
        self._outbox = outbox
        self._hand_over = hand_over
        self._lease_seconds = lease_seconds
        self._may_run = may_run
        self._checksums = checksums
        self._groups = card.layout.layer_groups(card.num_layer_groups)
        self._min_pairs = min_push_bytes * card.num_layer_groups // card.layout.block_bytes
        self._scheduler = PromptScheduler(tables, held_back)
        self._uncompiled: list[Job] = []
        self._jobs: dict[RequestId, Job] = {}
        self._by_transfer: dict[TransferId, Job] = {}
        self._next_tick = 0.0
        self.num_cached_tokens = 0
        self.num_prompt_tokens = 0
        self.num_transfers = 0
        self.num_transfer_failures = 0
        self.num_blocks_pushed = 0
        self.num_blocks_skipped = 0
        self.num_bytes_pushed = 0

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work

    @property
    def request_ids(self) -> AbstractSet[RequestId]:
        return self._jobs.keys()

    @property
    def num_requests(self) -> int:
        return len(self._by_transfer)

    @property
    def num_waiting(self) -> int:
        return self._scheduler.num_waiting + len(self._uncompiled)

    @property
    def num_computing(self) -> int:
        return sum(1 for job in self._by_transfer.values() if job.is_started and not job.is_computed)

    @property
    def num_kept(self) -> int:
        """Computed prompts whose KV waits for its decode worker."""
        return sum(1 for job in self._by_transfer.values() if job.is_computed)

    @property
    def num_queued_tokens(self) -> int:
        return self._scheduler.num_queued_tokens

    # --- messages ------------------------------------------------------------------------------

    def handle(self, delivery: Delivery, now: float) -> bool:
        match delivery.message:
            case PrefillTask() as task:
                self._take(task, delivery.sender, now)
            case Abort(request_id=request_id):
                if job := self._jobs.get(request_id):
                    self._abort(job, request_id, now)
                return False  # the decode part may hold the other leg
            case Reservation() | Attached() | Rejected() | Revoke() as message:
                job = self._by_transfer.get(message.transfer_id)
                if job is not None and job.sender is not None and job.task.decode == delivery.sender:
                    if isinstance(message, Reservation):
                        job.first_missing = message.first_missing
                    self._act(job, job.sender.handle(message, now), now)
                elif answer := answer_unknown(message):
                    self._outbox.send(delivery.sender, answer)
            case _:
                return False
        return True

    def _take(self, task: PrefillTask, router: Peer, now: float) -> None:
        if task.transfer_id in self._by_transfer:
            return
        job = Job.of(task, router, now)
        if reason := refuse_unfit(task.request, self._card):
            self._report(job, reason, is_retryable=False)
            return
        self._jobs |= dict.fromkeys(job.wanted, job)
        self._by_transfer[task.transfer_id] = job
        if self._may_run(job.sequence):
            self._scheduler.add(job.sequence)
        else:
            self._uncompiled.append(job)

    # --- a step --------------------------------------------------------------------------------

    def plan(self, budget: StepBudget, now: float) -> list[Chunk]:
        chunks = self._scheduler.plan(budget)
        for chunk in chunks:
            job = self._jobs[chunk.sequence.request.request_id]
            if not job.is_started:
                self._start(job, now)
        return chunks

    def _start(self, job: Job, now: float) -> None:
        """At the first chunk: offer the KV that is going to come, and push what is cached already."""
        job.is_started = True
        sequence = job.sequence
        job.num_cached = sequence.num_computed
        job.timeline.enter(StageName.PREFILL, now)
        job.timeline.count(prompt_tokens=sequence.num_prompt, cached_tokens=job.num_cached)
        self.num_prompt_tokens += sequence.num_prompt
        self.num_cached_tokens += job.num_cached
        if job.task.decode == self._me or job.task.request.max_tokens <= 1:
            return
        offer = Offer(
            transfer_id=job.task.transfer_id,
            request=job.task.request,
            router=job.router,
            block_hashes=self._tables.prompt_hashes(sequence),
        )
        layout = self._card.layout
        num_blocks = layout.num_blocks_for(sequence.num_prompt)
        num_groups = self._card.num_layer_groups
        job.sender = Sender(offer, num_blocks, num_groups, self._me.incarnation, self._lease_seconds, self._min_pairs)
        self.num_transfers += 1
        self._act(job, job.sender.start(now), now)
        self._written(job, range(num_groups), job.num_cached, now)

    def layers_done(self, chunks: Seq[Chunk], groups: range, now: float) -> None:
        for chunk in chunks:
            if job := self._job_of(chunk):
                self._written(job, groups, chunk.end, now)

    def _written(self, job: Job, groups: range, num_tokens: int, now: float) -> None:
        if job.sender is None:
            return
        is_all = num_tokens == job.sequence.num_prompt
        layout = self._card.layout
        num_blocks = layout.num_blocks_for(num_tokens) if is_all else num_tokens // layout.block_size
        self._act(job, job.sender.written(groups, num_blocks, now), now)

    def apply(self, done: Iterable[tuple[Chunk, ChunkResult]], now: float) -> None:
        """All first tokens are told before any KV is pushed, which takes a while."""
        going_on: list[tuple[Job, list[int | None]]] = []
        for chunk, result in done:
            if job := self._job_of(chunk):
                if result.failure:
                    self._report(job, result.failure, result.is_retryable)
                    self._drop(job, result.failure, now)
                    continue
                settle(chunk, result)
                self._tables.publish(job.sequence)
                if result.prompt_logprobs:
                    self._tell_prompt_logprobs(job, chunk, result)
                if result.pooled:
                    job.pooled = job.pooled or PooledSum(job.task.request)
                    job.pooled.add(result.pooled)
                is_whole = chunk.end == job.sequence.num_prompt
                if is_whole and (first_token_ids := self._complete(job, result, now)):
                    going_on.append((job, first_token_ids))
        for job, first_token_ids in going_on:
            self._hand_on(job, first_token_ids, now)

    def _job_of(self, chunk: Chunk) -> Job | None:
        """The job of a chunk, unless it was dropped while the chunk was on the device."""
        job = self._jobs.get(chunk.sequence.request.request_id)
        return job if job is not None and job.sequence is chunk.sequence else None

    def _tell_prompt_logprobs(self, job: Job, chunk: Chunk, result: ChunkResult) -> None:
        told_as = job.wanted_choices[0].request_id
        scored = PromptLogprobs(request_id=told_as, start=chunk.start + 1, logprobs=list(result.prompt_logprobs))
        self._outbox.send(job.router, scored)

    def _complete(self, job: Job, result: ChunkResult, now: float) -> list[int | None]:
        """The prompt is computed, and first tokens go to the router.

        Those of choices that go on, ``None`` for others; nothing where none does.
        """
        job.is_computed = True
        queue, prefill = (job.timeline.seconds(stage, now) for stage in (StageName.PREFILL_QUEUE, StageName.PREFILL))
        times = StageTimes(queue, prefill)
        if result.token_id is None:
            self._complete_alone(job, times, now)
            return []
        draws = (Draw(result.token_id, result.logprobs, result.is_complete), *result.forks)
        for choice, draw in zip(job.choices, draws, strict=True):
            if choice.request_id in job.wanted:
                self._tell_first(job, choice, draw, times)
        if not job.wanted:
            self._drop(job, "the first token ended the request", now, is_done=True)
            return []
        return [
            draw.token_id if choice.request_id in job.wanted else None
            for choice, draw in zip(job.choices, draws, strict=True)
        ]

    def _hand_on(self, job: Job, first_token_ids: list[int | None], now: float) -> None:
        """To the decode worker, which may be this one."""
        if job.sender is not None:
            job.timeline.enter(StageName.TRANSFER, now)
            self._act(job, job.sender.finish(first_token_ids, now), now)
        else:
            self._forget(job, now)
            for sequence in self._tables.split(job.sequence, first_token_ids):
                self._hand_over(Handover(sequence, job.router, now))

    def _complete_alone(self, job: Job, times: StageTimes, now: float) -> None:
        """``max_tokens`` is 0: the prompt was wanted, or its vector."""
        if job.pooled is not None and not job.pooled.is_sound:
            reason = "the model's output is not a number"
            self._report(job, reason, is_retryable=True)
            self._drop(job, reason, now)
            return
        vector = job.pooled.vector() if job.pooled is not None else b""
        for choice in job.wanted_choices:
            delta = TokenDelta(choice.request_id, 0, None, FinishReason.LENGTH, None, job.num_cached, vector, times)
            self._outbox.emit(job.router, [delta])
        self._drop(job, "nothing was to be generated", now, is_done=True)

    def _tell_first(self, job: Job, choice: Request, draw: Draw, times: StageTimes) -> None:
        finish = FinishReason.STOP if draw.is_complete else ending(choice, draw.token_id, 1)
        if finish is not None:
            job.wanted.remove(choice.request_id)
        delta = TokenDelta(choice.request_id, 0, draw.token_id, finish, draw.logprobs, job.num_cached, times=times)
        self._outbox.emit(job.router, [delta])

    # --- the transfer --------------------------------------------------------------------------

    def _act(self, job: Job, actions: SenderActions, now: float) -> None:
        """Do what the transfer's state machine asks for; its outcome ends the job."""
        decode = job.task.decode
        for push in actions.pushes:
            try:
                blocks = job.sequence.blocks[push.source.start : push.source.stop]
                self._outbox.push(decode, push.header, blocks)
            except TransferFailed as error:
                assert job.sender is not None, "only a sender pushes"
                self._act(job, job.sender.cancel(str(error)), now)
                return
            self.num_bytes_pushed += len(push.source) * self._bytes_of_block(push.header)
        for message in actions.messages:
            self._outbox.send(decode, self._sealed(message, job))
        match actions.outcome:
            case Failed(reason=reason):
                self.num_transfer_failures += 1
                self._report(job, reason, is_retryable=True)
                self._forget(job, now, reason)
                self._tables.release(job.sequence)
            case Attached():
                num_pushed = len(job.sequence.blocks) - job.first_missing
                self.num_blocks_skipped += job.first_missing
                self.num_blocks_pushed += num_pushed
                job.timeline.count(blocks_pushed=num_pushed, blocks_skipped=job.first_missing)
                self._forget(job, now)
                self._tables.release(job.sequence)

    def _sealed(self, message: Message, job: Job) -> Message:
        if not isinstance(message, Commit):
            return message
        return replace(message, checksums=self._checksums(job.sequence.blocks[job.first_missing :]))

    def _bytes_of_block(self, push: Push) -> int:
        groups = self._groups[push.group : push.group + push.num_groups]
        return (groups[-1].end - groups[0].first) * self._card.layout.layer_bytes

    def _report(self, job: Job, reason: str, is_retryable: bool) -> None:
        for choice in job.wanted_choices:
            failed = RequestFailed(
                request_id=choice.request_id, transfer_id=job.task.transfer_id, reason=reason, is_retryable=is_retryable
            )
            self._outbox.send(job.router, failed)

    # --- the end -------------------------------------------------------------------------------

    def sweep(self, now: float) -> None:
        for job in [job for job in self._uncompiled if self._may_run(job.sequence)]:
            self._uncompiled.remove(job)
            self._scheduler.add(job.sequence)
        if now < self._next_tick:
            return
        self._next_tick = now + TICK_SECONDS
        for job in list(self._by_transfer.values()):
            if job.sender is not None:
                self._act(job, job.sender.tick(now), now)

    def lose(self, peer: Peer, now: float) -> None:
        """A dead router reads no tokens; to a dead decode worker nothing can be shipped, and the router is told."""
        for job in list(self._by_transfer.values()):
            if job.router == peer:
                self._drop(job, "the router is gone", now)
            elif job.task.decode == peer:
                self._drop(job, "the decode worker is gone", now)
                self._report(job, "the decode worker is gone", is_retryable=True)

    def _abort(self, job: Job, request_id: RequestId, now: float) -> None:
        job.wanted.discard(request_id)
        if not job.wanted:
            self._drop(job, "aborted by the client", now)

    def _drop(self, job: Job, reason: str, now: float, is_done: bool = False) -> None:
        """End a request here without a word to the router."""
        self._forget(job, now, "" if is_done else reason)
        self._tables.release(job.sequence)
        if job.sender is not None:
            for message in job.sender.cancel(reason).messages:
                self._outbox.send(job.task.decode, message)

    def _forget(self, job: Job, now: float, outcome: str = "") -> None:
        self._outbox.note(job.timeline.ended(now, outcome))
        for choice in job.choices:
            del self._jobs[choice.request_id]
        del self._by_transfer[job.task.transfer_id]
        self._scheduler.remove(job.sequence)
        if job in self._uncompiled:
            self._uncompiled.remove(job)
