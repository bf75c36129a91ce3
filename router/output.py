"""One choice of one HTTP request: what a worker is asked for, and from its tokens what the client is shown."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ..core.messages import TokenDelta
from ..core.request import Pooling, SamplingParams, TokenLogprobs, pack_ids
from ..core.sequence import FinishReason
from .detokenizer import Detokenizer
from .parsing.deltas import CallDelta, ParsedText, PlainText, TextParser
from .stop_strings import Scanned, StopScanner
from .text import TextModel


@dataclass(frozen=True, slots=True)
class PreparedPrompt:
    """A prompt in tokens, and the text that an echo shows; the first ``num_added`` tokens are the tokenizer's own."""

    token_ids: list[int]
    text: str
    num_added: int = 0

    @property
    def packed(self) -> bytes:
        return pack_ids(self.token_ids)


@dataclass(frozen=True, slots=True)
class OutputSyntax:
    """How the text of an answer is read: ``parser`` makes a reader of one answer.

    ``markers`` are special tokens that it must see and others are not shown. ``ends_in_calls`` says that an answer
    with calls is told by its finish reason, as it is unless the client itself has named the function.
    """

    parser: Callable[[], TextParser] = PlainText
    markers: frozenset[int] = frozenset()
    ends_in_calls: bool = True


PLAIN = OutputSyntax()


@dataclass(frozen=True, slots=True)
class Choice:
    """``params`` is complete, as a worker needs it; ``stop`` are the strings that end the output, watched here.

    Choices of the same prompt share one `PreparedPrompt`. Log-probabilities that are wanted only in order to rank
    choices are not shown. With ``pooling`` the choice is a vector of its prompt.
    """

    index: int
    prompt: PreparedPrompt
    params: SamplingParams
    stop: tuple[str, ...] = ()
    echo: bool = False
    is_stream: bool = False
    syntax: OutputSyntax = PLAIN
    shows_logprobs: bool = True
    shows_prompt_logprobs: bool = False
    pooling: Pooling | None = None

    @property
    def wants_numbers(self) -> bool:
        """Of which there may be millions."""
        params = self.params
        return self.pooling is not None or params.logprobs is not None or params.prompt_logprobs is not None


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """``text`` is for display, ``piece`` the bytes it stands for."""

    text: str
    piece: bytes
    logprob: float


@dataclass(frozen=True, slots=True)
class RankedToken:
    """``rank`` is 1 for the likeliest token, and ``None`` for one that is not among those looked at."""

    token_id: int
    text: str
    logprob: float
    rank: int | None


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One position with its logprob and alternatives; ``logprob`` is ``None`` for the first token of a prompt.

    ``offset`` counts the characters of the choice's text before it.
    """

    text: str
    piece: bytes
    logprob: float | None
    top: tuple[ScoredToken, ...]
    offset: int


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What one token adds for the client: reasoning, then text, then calls.

    ``entries`` is empty unless logprobs were asked for. ``ends_in_calls`` comes with the finish: the answer stopped in
    order to have tools called.
    """

    text: str = ""
    entries: tuple[TokenEntry, ...] = ()
    finish: FinishReason | None = None
    reasoning: str = ""
    calls: tuple[CallDelta, ...] = ()
    ends_in_calls: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.entries or self.reasoning or self.calls) and self.finish is None


class OutputAssembler:
    """Fed with the tokens of one choice in order, each once, until `finish` is set.

    With an echo the prompt is part of the first delta. Stop strings are looked for in all that the model writes,
    before reasoning and calls are told apart from the text. Logprobs come with their token even while its text is held
    back or becomes part of something else, and there is one for each token counted in `num_output`, the one that
    stops included.
    """

    def __init__(self, text: TextModel, choice: Choice) -> None:
        self._text = text
        self._choice = choice
        self._detokenizer = Detokenizer(text.token_bytes, choice.prompt.token_ids, shown=choice.syntax.markers)
        self._scanner = StopScanner(choice.stop)
        self._parser = choice.syntax.parser()
        self._has_calls = False
        self._prompt_logprobs: dict[int, TokenLogprobs] = {}
        self._num_chars = len(choice.prompt.text) if choice.echo else 0
        """Of the text before the next token, shown or held back."""
        self._is_opened = not choice.echo
        self._kept: list[OutputDelta] = []
        self._num_unshown = 0
        """Tokens since the last that showed anything."""
        self.num_output = 0
        self.num_reasoning = 0
        """Of the output: tokens that reasoning was made of, the mark that opens it included."""
        self.cached_tokens = 0
        self.sum_logprobs = 0.0
        """Of all tokens, if they were asked for."""
        self.pooled = b""
        """The vector, where one is wanted instead of text."""
        self.finish: FinishReason | None = None

    @property
    def choice(self) -> Choice:
        return self._choice

    def add_prompt_logprobs(self, start: int, logprobs: Sequence[TokenLogprobs]) -> None:
        """Those of prompt positions ``start`` and following, before the first token."""
        self._prompt_logprobs.update(enumerate(logprobs, start))

    def feed(self, delta: TokenDelta) -> OutputDelta:
        assert self.finish is None, "no token follows the end"
        if delta.index == 0:
            self.cached_tokens, self.pooled = delta.cached_tokens, delta.pooled
        if delta.logprobs is not None:
            self.sum_logprobs += delta.logprobs.token_logprob
        entry = self._entry(delta)
        scanned = self._scan(delta)
        self.finish = FinishReason.STOP if scanned.is_stopped else delta.finish
        output = self._parsed(scanned.text, (entry,) if entry is not None else ())
        if not self._is_opened:
            self._is_opened = True
            text, entries = self._choice.prompt.text + output.text, (*self._echoed_entries(), *output.entries)
            output = replace(output, text=text, entries=entries)
        if not self._choice.is_stream:
            self._kept.append(output)
        return output

    @property
    def deltas(self) -> Sequence[OutputDelta]:
        """What `feed` has returned; kept only for choices that are not streamed."""
        return self._kept

    @property
    def output(self) -> OutputDelta:
        """All of it, once finished; kept only for choices that are not streamed."""
        assert self.finish is not None, "a body is built from whole outputs"
        return OutputDelta(
            text="".join(delta.text for delta in self._kept),
            entries=tuple(entry for delta in self._kept for entry in delta.entries),
            finish=self.finish,
            reasoning="".join(delta.reasoning for delta in self._kept),
            calls=tuple(call for delta in self._kept for call in delta.calls),
            ends_in_calls=self._ends_in_calls,
        )

    def _parsed(self, text: str, entries: tuple[TokenEntry, ...]) -> OutputDelta:
        """Once `finish` is settled."""
        if self._choice.syntax is PLAIN:  # as most are
            return OutputDelta(text, entries, self.finish)
        parsed = self._parser.feed(text) if text else ParsedText()
        if self.finish is not None:
            parsed += self._parser.flush()
        self._has_calls |= bool(parsed.calls)
        self._count_reasoning(parsed)
        return OutputDelta(parsed.content, entries, self.finish, parsed.reasoning, parsed.calls, self._ends_in_calls)

    def _count_reasoning(self, parsed: ParsedText) -> None:
        """A token counts as what it or the next token that shows something has shown."""
        self._num_unshown += 1
        if parsed.reasoning:
            self.num_reasoning += self._num_unshown
        if parsed.reasoning or parsed.content or parsed.calls:
            self._num_unshown = 0

    @property
    def _ends_in_calls(self) -> bool:
        return self.finish is FinishReason.STOP and self._has_calls and self._choice.syntax.ends_in_calls

    def _scan(self, delta: TokenDelta) -> Scanned:
        """Text of one token and, at the end, of everything held back. A stop token's own text is not shown.

        That of one which completes a grammar is.
        """
        token_id = delta.token_id
        text = ""
        if token_id is not None:
            self.num_output += 1
            if delta.finish is not FinishReason.STOP or token_id not in self._choice.params.stop_token_ids:
                text = self._detokenizer.feed(token_id)
        if delta.finish is not None:
            text += self._detokenizer.flush()
        self._num_chars += len(text)
        scanned = self._scanner.feed(text, may_stop=delta.index >= self._choice.params.min_tokens)
        if delta.finish is None or scanned.is_stopped:
            return scanned
        return Scanned(scanned.text + self._scanner.flush())

    def _entry(self, delta: TokenDelta) -> TokenEntry | None:
        """Made before the token's text is counted."""
        if delta.logprobs is None or delta.token_id is None or not self._choice.shows_logprobs:
            return None
        return self._scored(delta.token_id, delta.logprobs, self._num_chars)

    def ranked_prompt(self) -> list[list[RankedToken] | None]:
        """For each position of the prompt the token there, then the likeliest ones; nothing is known of the first."""
        token_ids = self._choice.prompt.token_ids
        return [None, *(self._ranked(token_ids[i], self._prompt_logprobs[i]) for i in range(1, len(token_ids)))]

    def _ranked(self, token_id: int, logprobs: TokenLogprobs) -> list[RankedToken]:
        ranks = {top_id: rank for rank, top_id in enumerate(logprobs.top_ids, 1)}
        own = RankedToken(token_id, self._text.token_text(token_id), logprobs.token_logprob, ranks.get(token_id))
        top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        return [own, *(RankedToken(i, self._text.token_text(i), p, ranks[i]) for i, p in top if i != token_id)]

    def _echoed_entries(self) -> Iterable[TokenEntry]:
        return self.prompt_entries() if self._choice.shows_logprobs else ()

    def prompt_entries(self) -> Iterator[TokenEntry]:
        """One a token of the prompt, if they were asked for; once all `add_prompt_logprobs` have come."""
        if self._choice.params.prompt_logprobs is None:
            return
        prompt = self._choice.prompt
        detokenizer = Detokenizer(self._text.token_bytes, skips_special=False)
        num_chars = 0
        for position, token_id in enumerate(prompt.token_ids):
            offset = min(num_chars, len(prompt.text))
            if position == 0:
                yield TokenEntry(
                    self._text.token_text(token_id), self._text.token_bytes.piece(token_id), None, (), offset
                )
            else:
                yield self._scored(token_id, self._prompt_logprobs[position], offset)
            if position >= prompt.num_added:
                num_chars += len(detokenizer.feed(token_id))

    def _scored(self, token_id: int, logprobs: TokenLogprobs, offset: int) -> TokenEntry:
        tokens, text = self._text.token_bytes, self._text
        top = tuple(
            ScoredToken(text.token_text(i), tokens.piece(i), logprob)
            for i, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        )
        return TokenEntry(text.token_text(token_id), tokens.piece(token_id), logprobs.token_logprob, top, offset)
