"""Token ids in, token ids and times out: the engine and both parts of a worker, as `LLM` has them, without any text."""

import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NoReturn

from crossdock.core.config import EngineConfig
from crossdock.core.messages import (
    Abort,
    Incarnation,
    Message,
    Peer,
    PrefillTask,
    PromptLogprobs,
    Push,
    RequestFailed,
    Role,
    TokenDelta,
    WorkerCard,
)
from crossdock.core.part import Delivery, Payload, TransferFailed
from crossdock.core.request import Fork, Request, RequestId, SamplingParams, TokenLogprobs, TransferId, pack_ids
from crossdock.core.stages import Stage
from crossdock.decode.part import DecodePart
from crossdock.model.engine import Engine, Step
from crossdock.model.startup import LoadedModel
from crossdock.prefill.part import PrefillPart

HERE = Peer("offline", Incarnation("offline"))
NEVER_SECONDS = 1e9


@dataclass(slots=True, eq=False)
class Answer:
    """What one request yielded; ``first_at`` is the time of its first token, ``failure`` why there is no last one."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_cached: int = 0
    first_at: float = 0.0
    is_finished: bool = False
    failure: str = ""


@dataclass(slots=True)
class StepTimes:
    """What the loop's thread did, in seconds: planning and queueing, waiting for the device, giving out results.

    What becomes of emitted tokens is not counted: a worker sends them in one message.
    """

    launch: list[float] = field(default_factory=list)
    wait: list[float] = field(default_factory=list)
    finish: list[float] = field(default_factory=list)

    def clear(self) -> None:
        for each in (self.launch, self.wait, self.finish):
            each.clear()


class _Collector:
    def __init__(self) -> None:
        self.answers: dict[RequestId, Answer] = {}
        self._emitted: list[TokenDelta] = []

    def emit(self, router: Peer, deltas: Seq[TokenDelta]) -> None:
        self._emitted += deltas

    def collect(self) -> None:
        """Give out what was emitted since the last call."""
        now, emitted = time.perf_counter(), self._emitted
        self._emitted = []
        for delta in emitted:
            answer = self.answers[delta.request_id]
            if delta.token_id is not None:
                if not answer.token_ids:
                    answer.first_at, answer.num_cached = now, delta.cached_tokens
                answer.token_ids.append(delta.token_id)
                answer.logprobs.append(delta.logprobs)
            answer.is_finished = answer.is_finished or delta.finish is not None

    def send(self, to: Peer, message: Message) -> None:
        match message:
            case RequestFailed(request_id=request_id, reason=reason):
                self.answers[request_id].failure = reason
            case PromptLogprobs(request_id=request_id, logprobs=logprobs):
                self.answers[request_id].prompt_logprobs += logprobs
            case _:
                raise AssertionError(f"nothing else is sent offline: {message}")

    def push(self, to: Peer, header: Push, source_blocks: list[int]) -> None:
        raise TransferFailed("there is no other worker")

    def note(self, stages: list[Stage]) -> None:
        assert not stages, "nothing is traced offline"


class OfflineEngine:
    """One loaded model. ``times`` grows by an entry a step."""

    def __init__(self, model: LoadedModel, config: EngineConfig) -> None:
        self._model = model
        self._collector = _Collector()
        card = WorkerCard(
            role=Role.MIXED,
            model="m",
            layout=model.layout,
            num_blocks=model.tables.pool.num_blocks,
            max_model_len=model.max_model_len,
            max_num_seqs=config.max_num_seqs,
            vocab_size=model.spec.vocab_size,
            num_layer_groups=model.executor.num_layer_groups,
        )
        tables, outbox, may_run = model.tables, self._collector, model.grammars.may_run_at_once
        decode = DecodePart(card, tables, outbox, (), _nothing_lands, NEVER_SECONDS, may_run)
        prefill = PrefillPart(
            HERE, card, tables, outbox, decode.adopt, lambda: decode.num_held_back, NEVER_SECONDS, may_run
        )
        self._parts = (decode, prefill)
        self._engine = Engine(model.executor, tables, self._parts, model.chunk_tokens, config.max_num_seqs)
        self._num_requests = 0
        self.times = StepTimes()

    @property
    def num_preemptions(self) -> int:
        return self._parts[0].num_preemptions

    def add(self, prompt: Seq[int], params: SamplingParams) -> tuple[RequestId, Answer]:
        """Queue a request; its answer grows while `step` runs."""
        [added] = self.add_choices(prompt, params, ()).items()
        return added

    def add_choices(self, prompt: Seq[int], params: SamplingParams, seeds: Seq[int]) -> dict[RequestId, Answer]:
        """Queue a request and a fork for each of ``seeds``."""
        self._num_requests += 1
        request_id = RequestId(str(self._num_requests))
        forks = tuple(Fork(RequestId(f"{request_id}.{number}"), seed) for number, seed in enumerate(seeds))
        request = Request(request_id=request_id, prompt=pack_ids(list(prompt)), params=params, forks=forks)
        answers = {choice.request_id: Answer() for choice in request.choices}
        self._collector.answers |= answers
        self._tell(PrefillTask(request=request, transfer_id=TransferId(request_id), decode=HERE))
        return answers

    def abort(self, request_id: RequestId) -> None:
        self._tell(Abort(request_id=request_id))

    def step(self, previous: Step | None) -> Step | None:
        """`Engine.step` with its times taken."""
        started_at = time.perf_counter()
        following = self._engine.launch(previous, time.monotonic())
        launched_at = done_at = time.perf_counter()
        if previous is not None:
            previous.launched.results()
            done_at = time.perf_counter()
            self._engine.finish(previous, time.monotonic())
        self.times.launch.append(launched_at - started_at)
        self.times.wait.append(done_at - launched_at)
        self.times.finish.append(time.perf_counter() - done_at)
        self._collector.collect()
        return following

    def run(self, step: Step | None = None) -> None:
        """Go on from ``step`` until there is nothing to do."""
        while step is not None or self._engine.has_work:
            step = self.step(step)

    def generate(self, prompts: Seq[Seq[int]], params: SamplingParams) -> list[Answer]:
        answers = [self.add(prompt, params)[1] for prompt in prompts]
        self.run()
        return answers

    def close(self) -> None:
        """The books must be right; that is looked at here because with 55,000 blocks it takes 10 ms."""
        self._model.tables.prefixes.check()
        self._model.executor.close()

    def _tell(self, message: Message) -> None:
        for part in self._parts:
            part.handle(Delivery(HERE, message), time.monotonic())


def _nothing_lands(push: Push, payload: Payload) -> NoReturn:
    raise TransferFailed("there is no other worker")
