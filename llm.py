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
from typing import NoReturn, cast

import msgspec
from tqdm import tqdm

from .core.config import EngineConfig
from .core.messages import (
    Abort,
    Incarnation,
    Message,
    Peer,
    PrefillTask,
    PromptLogprobs,
    Push,
    Role,
    TokenDelta,
    WorkerCard,
)
from .core.part import Delivery, Part, TransferFailed, refuse_unfit
from .core.request import Request, RequestId, SamplingParams, TransferId
from .core.sequence import FinishReason
from .decode.part import DecodePart
from .deploy.model_source import resolve
from .model.engine import Engine, Step
from .model.startup import load_model
from .prefill.part import PrefillPart
from .router.chat_template import ChatMessage
from .router.output import Choice, OutputAssembler, PreparedPrompt, TokenEntry
from .router.sampling import choice_seed
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
    """All answers to one prompt, ``n`` of them."""

    prompt: str
    prompt_token_ids: tuple[int, ...]
    num_cached_tokens: int
    outputs: tuple[CompletionOutput, ...]


class LLM:
    """A model ready to generate; ``model`` is what `crossdock serve` takes.

    Raises ``ValueError`` if it can't be loaded.
    """

    def __init__(self, model: str, engine: EngineConfig | None = None) -> None:
        config = engine or EngineConfig()
        source = resolve(model)
        fingerprint = source.fingerprint()
        self._text = load_text(source.path)
        loaded = load_model(source.path, fingerprint, CLUSTER_KEY, config)
        card = WorkerCard(
            role=Role.MIXED,
            model=fingerprint,
            layout=loaded.layout,
            num_blocks=loaded.tables.pool.num_blocks,
            max_model_len=loaded.max_model_len,
            vocab_size=loaded.spec.vocab_size,
            num_layer_groups=loaded.executor.num_layer_groups,
        )
        self._collector = _Collector()
        decode = DecodePart(card, loaded.tables, self._collector, (), _nothing_lands, NEVER_SECONDS)
        prefill = PrefillPart(
            HERE, card, loaded.tables, self._collector, decode.adopt, lambda: decode.num_held_back, NEVER_SECONDS
        )
        self._parts: tuple[Part, Part] = (decode, prefill)
        self._engine = Engine(loaded.executor, loaded.tables, self._parts, config.chunk_tokens, config.max_num_seqs)
        self._card = card

    def generate(
        self,
        prompts: str | Seq[str] | Seq[Seq[int]],
        params: SamplingParams | None = None,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Answers to all prompts, in their order; a prompt is a text or a list of token ids.

        Without ``params`` the model's own defaults hold; with ``max_tokens`` unset an answer may be as long as the
        longest request. Raises ``ValueError`` for a prompt that is empty, too long or holds ids outside the vocabulary,
        before any work.
        """
        prepared = [self._prepare(prompt) for prompt in ([prompts] if isinstance(prompts, str) else prompts)]
        return self._answer(prepared, params, show_progress)

    def chat(
        self,
        conversations: Seq[ChatMessage] | Seq[Seq[ChatMessage]],
        params: SamplingParams | None = None,
        show_progress: bool = True,
    ) -> list[RequestOutput]:
        """Like `generate`, for one conversation or several, through the model's chat template."""
        is_one = len(conversations) > 0 and isinstance(conversations[0], dict)
        chats = cast(Seq[Seq[ChatMessage]], [conversations] if is_one else conversations)
        rendered = [self._text.render_chat(chat) for chat in chats]
        prepared = [PreparedPrompt(self._text.encode_chat(text).ids, text) for text in rendered]
        return self._answer(prepared, params, show_progress)

    def _prepare(self, prompt: str | Seq[int]) -> PreparedPrompt:
        if isinstance(prompt, str):
            encoded = self._text.encode(prompt)
            return PreparedPrompt(encoded.ids, prompt, encoded.num_added)
        return PreparedPrompt(list(prompt), self._text.decode(prompt, skips_special=False))

    def _answer(
        self, prompts: Seq[PreparedPrompt], params: SamplingParams | None, show_progress: bool
    ) -> list[RequestOutput]:
        wanted = params or self._default_params()
        choices = [self._choice(prompt, wanted, index) for prompt in prompts for index in range(wanted.n)]
        for choice in choices:
            self._check(choice)
        answers = [_Answer(OutputAssembler(self._text, choice)) for choice in choices]
        self._run(answers, show_progress)
        outputs = [answer.output() for answer in answers]
        results = []
        for number, prompt in enumerate(prompts):
            own = slice(number * wanted.n, (number + 1) * wanted.n)
            num_cached = answers[own][0].assembler.cached_tokens
            results.append(RequestOutput(prompt.text, tuple(prompt.token_ids), num_cached, tuple(outputs[own])))
        return results

    def _default_params(self) -> SamplingParams:
        """What the model's authors advise."""
        advice = self._text.defaults
        return SamplingParams(
            temperature=advice.temperature,
            top_p=advice.top_p,
            top_k=advice.top_k,
            min_p=advice.min_p,
            repetition_penalty=advice.repetition_penalty,
        )

    def _choice(self, prompt: PreparedPrompt, params: SamplingParams, index: int) -> Choice:
        """The request as the router would resolve it: seed, limit and stop tokens are set, stop strings stay here."""
        seed = secrets.randbits(63) if params.seed is None else params.seed
        room = self._card.max_model_len - len(prompt.token_ids)
        end_ids = () if params.ignore_eos else self._text.eos_ids
        resolved = msgspec.structs.replace(
            params,
            n=1,
            stop=(),
            seed=choice_seed(seed, index),
            max_tokens=room if params.max_tokens is None else params.max_tokens,
            stop_token_ids=tuple(sorted({*params.stop_token_ids, *end_ids})),
        )
        return Choice(index, prompt, resolved, params.stop)

    def _check(self, choice: Choice) -> None:
        request = Request(request_id=RequestId(""), prompt=choice.prompt.packed, params=choice.params)
        if reason := refuse_unfit(request, self._card.vocab_size, self._card.max_model_len):
            raise ValueError(reason)

    def _run(self, answers: Seq["_Answer"], show_progress: bool) -> None:
        """Step until every answer has its end; whatever interrupts that leaves nothing behind."""
        running = {RequestId(str(number)): answer for number, answer in enumerate(answers)}
        with tqdm(total=len(answers), desc="requests", disable=not show_progress) as progress:
            self._collector.begin(running, progress)
            try:
                for request_id, answer in running.items():
                    self._tell(_task(request_id, answer.assembler.choice))
                step: Step | None = None
                while step is not None or self._engine.has_work:
                    step = self._engine.step(step, time.monotonic())
                    for request_id in self._collector.take_stopped():
                        self._tell(Abort(request_id=request_id))
            finally:
                for request_id in running:
                    self._tell(Abort(request_id=request_id))

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

    def emit(self, router: Peer, delta: TokenDelta) -> None:
        if self._answers[delta.request_id].take(delta):
            self._progress.update()
            if delta.finish is None:
                self._stopped.append(delta.request_id)

    def send(self, to: Peer, message: Message) -> None:
        assert isinstance(message, PromptLogprobs), f"nothing else is sent offline: {message}"
        self._answers[message.request_id].assembler.add_prompt_logprobs(message.start, message.logprobs)

    def push(self, to: Peer, header: Push, source_blocks: list[int]) -> None:
        raise TransferFailed("there is no other worker")


def _task(request_id: RequestId, choice: Choice) -> PrefillTask:
    request = Request(request_id=request_id, prompt=choice.prompt.packed, params=choice.params)
    return PrefillTask(request=request, transfer_id=TransferId(request_id), decode=HERE)


def _nothing_lands(push: Push, payload: memoryview) -> None:
    raise TransferFailed("there is no other worker")
