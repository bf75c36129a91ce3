"""Offline batches: the engine and the two parts of a worker in this process, without sockets.

from crossdock import LLM, SamplingParams

llm = LLM("demo")
for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
    print(output.outputs[0].text)
"""

import secrets
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, NoReturn, cast

from tqdm import tqdm

from .core.config import ChatConfig, EngineConfig
from .core.messages import (
    Abort,
    Incarnation,
    Message,
    Peer,
    PoolBooks,
    PrefillTask,
    PromptLogprobs,
    Push,
    RequestFailed,
    Role,
    TokenDelta,
    WorkerCard,
)
from .core.part import Delivery, Part, Payload, TransferFailed
from .core.request import Fork, Request, RequestId, SamplingParams, TransferId
from .core.sequence import FinishReason
from .core.stages import Stage
from .decode.part import DecodePart
from .deploy.model_source import resolve
from .model.engine import Engine, Step
from .model.startup import load_model
from .prefill.part import PrefillPart
from .router.chat_template import ChatMessage, ToolOffer
from .router.offline import batch_chat, batch_choices, batch_embeddings, batch_prompt
from .router.openai_api import MAX_CHOICES
from .router.output import Choice, OutputAssembler, PreparedPrompt, TokenEntry
from .router.prepare import Limits
from .router.sampling import SEED_BITS
from .router.text import load_text

HERE = Peer("offline", Incarnation("offline"))
CLUSTER_KEY = b"offline"
NEVER_SECONDS = 1e9


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One answer. ``token_ids`` counts what was generated, the token that stopped it included."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[TokenEntry, ...]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All answers to one prompt, ``n`` of them. ``prompt_logprobs`` are there if asked for, one a token."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenEntry, ...] = ()


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of one prompt."""

    vector: tuple[float, ...]
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int


class LLM:
    """A model ready to generate; ``model`` is what `crossdock serve` takes, ``chat_template`` replaces the model's.

    ``pooling``, ``last`` or ``mean``, is for `embed` with a model whose files do not say how it makes vectors.

    Raises ``ValueError`` if it can't be loaded.
    """

    def __init__(
        self,
        model: str,
        engine: EngineConfig | None = None,
        chat_template: str | None = None,
        pooling: Literal["auto", "last", "mean"] = "auto",
    ) -> None:
        config = engine or EngineConfig()
        source = resolve(model)
        fingerprint = source.fingerprint()
        self._text = load_text(source.path, ChatConfig(chat_template), pooling)
        loaded = load_model(
            source.path, fingerprint, CLUSTER_KEY, config, load_vocabulary=lambda: self._text.vocabulary
        )
        self._card = WorkerCard(
            role=Role.MIXED,
            model=fingerprint.model,
            weights=fingerprint.weights,
            layout=loaded.layout,
            num_blocks=loaded.tables.pool.num_blocks,
            max_model_len=loaded.max_model_len,
            max_num_seqs=config.max_num_seqs,
            vocab_size=loaded.spec.vocab_size,
            num_layer_groups=loaded.executor.num_layer_groups,
        )
        self._limits = Limits(model, loaded.max_model_len, loaded.spec.vocab_size, MAX_CHOICES, (self._card,))
        self._config = config
        self._executor = loaded.executor
        self._may_run = loaded.grammars.may_run_at_once
        self._tables = loaded.tables
        self._chunk_tokens = loaded.chunk_tokens
        self._compose()

    def _compose(self) -> None:
        """The parts and the loop around the executor, as a worker has them."""
        card, tables = self._card, self._tables
        self._collector = _Collector()
        outbox, may_run = self._collector, self._may_run
        decode = DecodePart(card, tables, outbox, (), _nothing_lands, NEVER_SECONDS, may_run)
        prefill = PrefillPart(
            HERE, card, tables, outbox, decode.adopt, lambda: decode.num_held_back, NEVER_SECONDS, may_run
        )
        self._parts: tuple[Part, Part] = (decode, prefill)
        self._engine = Engine(self._executor, tables, self._parts, self._chunk_tokens, self._config.max_num_seqs)

    def _begin_anew(self) -> None:
        """Forget all requests and blocks. A step still on the device is no danger: later ones run after it."""
        self._tables = self._tables.emptied()
        self._compose()

    def generate(
        self,
        prompts: str | Seq[str] | Seq[Seq[int]],
        params: SamplingParams | None = None,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers to all prompts, in their order; a prompt is a text or a list of token ids.

        Without ``params`` the model's own defaults hold; with ``max_tokens`` unset an answer may be as long as the
        longest request. Raises ``ValueError``, before any work, for what the server would refuse: a prompt that is
        empty, too long or holds ids outside the vocabulary, and parameters out of their range. Raises ``RuntimeError``
        where a grammar turns out too complex to be followed to its end.
        """
        several = [prompts] if isinstance(prompts, str) else prompts
        prepared = [batch_prompt(prompt, self._text, self._limits.vocab_size) for prompt in several]
        return self._answer(prepared, params, show_progress)

    def chat(
        self,
        conversations: Seq[ChatMessage] | Seq[Seq[ChatMessage]],
        params: SamplingParams | None = None,
        show_progress: bool = True,
        tools: Seq[ToolOffer] = (),
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or several, through the model's chat template.

        The model is told of ``tools``, given as OpenAI's API has them; its calls are in the text as it writes them.
        """
        is_one = len(conversations) > 0 and isinstance(conversations[0], dict)
        chats = cast(Seq[Seq[ChatMessage]], [conversations] if is_one else conversations)
        return self._answer([batch_chat(chat, self._text, tools) for chat in chats], params, show_progress)

    def embed(
        self,
        prompts: str | Seq[str] | Seq[Seq[int]],
        num_dimensions: int | None = None,
        show_progress: bool = True,
    ) -> list[EmbeddingOutput]:
        """The vectors of all prompts, in their order; a prompt is a text or a list of token ids.

        ``num_dimensions`` cuts them where the model allows it. Raises ``ValueError``, before any work, for what the
        server would refuse, and for a model that makes no embeddings.
        """
        several = [prompts] if isinstance(prompts, str) else prompts
        prepared = [batch_prompt(prompt, self._text, self._limits.vocab_size) for prompt in several]
        model, choices = batch_embeddings(prepared, num_dimensions, self._text, self._limits)
        answers = [_Answer(OutputAssembler(self._text, choice)) for choice in choices]
        self._run([[answer] for answer in answers], show_progress)
        return [
            EmbeddingOutput(
                tuple(model.finished(answer.assembler.pooled, num_dimensions)),
                tuple(answer.assembler.choice.prompt.token_ids),
                answer.assembler.cached_tokens,
            )
            for answer in answers
        ]

    @property
    def books(self) -> PoolBooks:
        """How many blocks of the pool are in which state; between two calls none is leased."""
        return self._tables.pool.books()

    def _answer(
        self, prompts: Seq[PreparedPrompt], params: SamplingParams | None, show_progress: bool
    ) -> list[RequestOutput]:
        choices = batch_choices(prompts, params, self._text, self._limits, partial(secrets.randbits, SEED_BITS))
        answers = [[_Answer(OutputAssembler(self._text, choice)) for choice in of_prompt] for of_prompt in choices]
        self._run(answers, show_progress)
        return [_request_output(prompt, of_prompt) for prompt, of_prompt in zip(prompts, answers, strict=True)]

    def _run(self, answers: Seq[Seq["_Answer"]], show_progress: bool) -> None:
        """Step until every answer has its end. Whatever else ends that leaves an engine without a past."""
        tasks = [_task(number, [answer.assembler.choice for answer in group]) for number, group in enumerate(answers)]
        running = {
            choice.request_id: answer
            for task, group in zip(tasks, answers, strict=True)
            for choice, answer in zip(task.request.choices, group, strict=True)
        }
        is_finished = False
        try:
            with tqdm(total=len(running), desc="requests", disable=not show_progress) as progress:
                self._collector.begin(running, progress)
                for task in tasks:
                    self._tell(task)
                self._step_until_done()
            is_finished = True
        finally:
            if not is_finished:
                self._begin_anew()

    def _step_until_done(self) -> None:
        step: Step | None = None
        while step is not None or self._engine.has_work:
            following = self._engine.step(step, time.monotonic())
            assert step or following or not self._engine.has_work, "a request that fits the pool alone can go on"
            step = following
            for request_id in self._collector.take_stopped():
                self._tell(Abort(request_id=request_id))
        self._tables.prefixes.check()

    def _tell(self, message: Message) -> None:
        for part in self._parts:
            part.handle(Delivery(HERE, message), time.monotonic())


@dataclass(slots=True, eq=False)
class _Answer:
    """One choice while it is generated."""

    assembler: OutputAssembler
    token_ids: list[int] = field(default_factory=list)

    def take(self, delta: TokenDelta) -> bool:
        """True if this token ends the answer; a token that was on its way when a stop string was seen is ignored."""
        if self.assembler.finish is not None:
            return False
        if delta.token_id is not None:
            self.token_ids.append(delta.token_id)
        return self.assembler.feed(delta).finish is not None

    def output(self) -> CompletionOutput:
        whole = self.assembler.output
        assert whole.finish is not None, "an answer is complete"
        index = self.assembler.choice.index
        return CompletionOutput(index, whole.text, tuple(self.token_ids), whole.finish, whole.entries)


class _Collector:
    """The outbox of the parts when there is nobody to send to: tokens go into their answers."""

    def __init__(self) -> None:
        self._answers: Mapping[RequestId, _Answer] = {}
        self._stopped: list[RequestId] = []
        self._progress: tqdm[NoReturn] = tqdm(disable=True)

    def begin(self, answers: Mapping[RequestId, _Answer], progress: "tqdm[NoReturn]") -> None:
        """Collect for these from now on; ``progress`` counts those that have ended."""
        self._answers = answers
        self._progress = progress

    def take_stopped(self) -> list[RequestId]:
        """Requests that a stop string has ended since the last call; the parts don't know yet."""
        stopped, self._stopped = self._stopped, []
        return stopped

    def emit(self, router: Peer, deltas: Seq[TokenDelta]) -> None:
        for delta in deltas:
            if self._answers[delta.request_id].take(delta):
                self._progress.update()
                if delta.finish is None:
                    self._stopped.append(delta.request_id)

    def send(self, to: Peer, message: Message) -> None:
        if isinstance(message, RequestFailed):
            raise RuntimeError(message.reason)
        assert isinstance(message, PromptLogprobs), f"nothing else is sent offline: {message}"
        self._answers[message.request_id].assembler.add_prompt_logprobs(message.start, message.logprobs)

    def push(self, to: Peer, header: Push, source_blocks: list[int]) -> None:
        raise TransferFailed("there is no other worker")

    def note(self, stages: list[Stage]) -> None:
        assert not stages, "nothing is traced offline"


def _request_output(prompt: PreparedPrompt, answers: Seq[_Answer]) -> RequestOutput:
    first = answers[0].assembler
    return RequestOutput(
        prompt.text,
        tuple(prompt.token_ids),
        min(answer.assembler.cached_tokens for answer in answers),
        tuple(answer.output() for answer in answers),
        tuple(first.prompt_entries()),
    )


def _task(number: int, choices: Seq[Choice]) -> PrefillTask:
    """All choices of one prompt: the first with the others as its forks."""
    first, *others = choices
    forks = tuple(Fork(RequestId(f"{number}-{choice.index}"), choice.params.seed or 0) for choice in others)
    request_id = RequestId(f"{number}-{first.index}")
    request = Request(
        request_id=request_id, prompt=first.prompt.packed, params=first.params, forks=forks, pooling=first.pooling
    )
    return PrefillTask(request=request, transfer_id=TransferId(request_id), decode=HERE)


def _nothing_lands(push: Push, payload: Payload) -> NoReturn:
    raise TransferFailed("there is no other worker")
