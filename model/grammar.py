"""Which tokens the grammars of a step's requests allow, and when they let nothing follow.

The state of a grammar is a pure function of its text and the output tokens. It is kept from step to step, and made anew
from the tokens wherever it does not stand where the sequence does: after a hand-over, a preemption or a retry.

A mask needs all tokens before it, so a sequence with a grammar takes part in a step only when none of them is still on
the device (`Grammars.may_run`). So no two steps in flight hold the same sequence, and its state is one thread's at a
time.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

import numpy as np
import torch
from llguidance import LLExecutor, LLMatcher
from llguidance.numpy import fill_next_token_bitmask_par
from msgspec.structs import replace
from numpy.typing import NDArray

from ..core.grammar import BadGrammar, GrammarCompiler, Vocabulary, in_short
from ..core.sequence import Chunk, ChunkResult, Sequence
from .sampler import TokenMasks

MAX_KEPT_BYTES = 512 << 10
"""Of the texts of grammars that stay compiled for whoever wants them next; compiled they take a hundred times more."""
NUM_COMPILING = 2
NUM_THREADS = 4

Bits = NDArray[np.int32]


@dataclass(slots=True, eq=False)
class _State:
    """Of one sequence: its grammar, compiled or on the way, and a matcher after ``num_consumed`` output tokens."""

    outcome: "Future[LLMatcher]"
    matcher: LLMatcher | None = None
    num_consumed: int = 0

    def before(self, chunk: Chunk) -> LLMatcher:
        """The matcher after the output tokens before the one that the chunk samples. Raises `BadGrammar`."""
        if self.matcher is None or self.num_consumed != chunk.output_index:
            self.matcher = self.outcome.result().deep_copy()
            consume(self.matcher, chunk.sequence.output_ids[: chunk.output_index])
            self.num_consumed = chunk.output_index
        return self.matcher


class Grammars:
    """The grammars of one engine. ``wake`` is called, from another thread, when one has been compiled."""

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        vocab_size: int,
        wake: Callable[[], None] = lambda: None,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        """The vocabulary is loaded when the first grammar comes; it may raise ``ValueError``."""
        self.vocab_size = vocab_size
        self._load_vocabulary = load_vocabulary
        self._wake = wake
        self._lock = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._compiling = ThreadPoolExecutor(NUM_COMPILING, "grammar")
        self._masking: LLExecutor | None = None
        self._kept: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._num_kept_bytes = 0
        self._max_kept_bytes = max_kept_bytes
        self._states: WeakKeyDictionary[Sequence, _State] = WeakKeyDictionary()

    def may_run(self, sequence: Sequence) -> bool:
        """Whether its grammar is compiled, well or badly, and its tokens are known; begins to compile what is new."""
        if not sequence.request.params.grammar:
            return True
        return sequence.num_pending == 0 and self.state_of(sequence).outcome.done()

    def may_run_at_once(self, sequence: Sequence) -> bool:
        """The same, for who has nothing else to do than to wait for the compilation."""
        if not sequence.request.params.grammar:
            return True
        self.state_of(sequence).outcome.exception()
        return self.may_run(sequence)

    def begin(self, chunks: Iterable[Chunk | None]) -> "ConstrainedStep | None":
        """The rows of a step that have a grammar, if there are any; ``chunks`` are those that sample, row by row."""
        rows = {row: chunk for row, chunk in enumerate(chunks) if chunk and chunk.sequence.request.params.grammar}
        return ConstrainedStep(self, rows) if rows else None

    def close(self) -> None:
        self._compiling.shutdown(wait=True, cancel_futures=True)

    # --- compiling -----------------------------------------------------------------------------

    def state_of(self, sequence: Sequence) -> _State:
        """The sequence's own, for as long as it lives."""
        with self._lock:
            state = self._states.get(sequence)
            if state is None:
                state = self._states[sequence] = _State(self._outcome(sequence.request.params.grammar))
        return state

    def _outcome(self, grammar: str) -> "Future[LLMatcher]":
        outcome = self._kept.get(grammar)
        if outcome is None:
            outcome = self._kept[grammar] = self._compiling.submit(self._compile, grammar)
            outcome.add_done_callback(lambda _: self._wake())
            self._num_kept_bytes += len(grammar)
            while self._num_kept_bytes > self._max_kept_bytes:
                self._num_kept_bytes -= len(self._kept.popitem(last=False)[0])
        else:
            self._kept.move_to_end(grammar)
        return outcome

    def _compile(self, grammar: str) -> LLMatcher:
        compiler = self._compiler
        if compiler is None:
            try:
                compiler = self._compiler = GrammarCompiler(self._load_vocabulary(), self.vocab_size)
            except ValueError as error:
                raise BadGrammar(f"the vocabulary of this model can't be read: {error}") from error
        return compiler.compile(grammar)

    # --- masks ---------------------------------------------------------------------------------------

    def fill(self, matchers: Seq[LLMatcher]) -> Bits:
        """The tokens that each allows next, ``[n, ceil(vocab_size / 32)]``, one bit a token."""
        if self._masking is None:
            self._masking = LLExecutor(NUM_THREADS)
        bits: Bits = np.zeros((len(matchers), -(-self.vocab_size // 32)), dtype=np.int32)
        if matchers:
            fill_next_token_bitmask_par(self._masking, [(matcher, row) for row, matcher in enumerate(matchers)], bits)
        return bits

    def without_barred(self, bits: Bits, chunk: Chunk) -> Bits:
        """What ``min_tokens`` and ``ignore_eos`` leave of one row; all of it if they would leave nothing."""
        params = chunk.sequence.request.params
        barred = set(params.stop_token_ids if chunk.output_index < params.min_tokens else ())
        if params.ignore_eos and self._compiler is not None:
            barred |= set(self._compiler.eos_ids)
        if not barred:
            return bits
        left = bits.copy()
        for token_id in barred:
            left.view(np.uint32)[token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))
        return left if left.any() else bits


def consume(matcher: LLMatcher, token_ids: list[int]) -> bool:
    """Whether nothing may follow these tokens. Raises `BadGrammar` for tokens that the grammar does not allow there."""
    if token_ids and matcher.try_consume_tokens(token_ids) != len(token_ids):
        raise BadGrammar(f"the output left it: {in_short(matcher.get_error())}")
    return matcher.is_stopped()


@dataclass(slots=True, eq=False)
class ConstrainedStep:
    """The rows of one step that have a grammar: `masks` before they are sampled, `settled` after."""

    grammars: Grammars
    rows: dict[int, Chunk]
    matchers: dict[int, LLMatcher] = field(default_factory=dict)
    failures: dict[int, str] = field(default_factory=dict)

    def masks(self) -> TokenMasks:
        """What each row may sample. One whose grammar can't be followed may sample anything, and fails when settled."""
        for row, chunk in self.rows.items():
            try:
                self.matchers[row] = self.grammars.state_of(chunk.sequence).before(chunk)
            except BadGrammar as error:
                self.failures[row] = str(error)
        rows = list(self.matchers)
        bits = self.grammars.fill(list(self.matchers.values()))
        for place, (row, matcher) in enumerate(self.matchers.items()):
            if matcher.is_error():
                self.failures[row] = f"the grammar can't be followed any further: {in_short(matcher.get_error())}"
                bits[place] = -1
            else:
                bits[place] = self.grammars.without_barred(bits[place], self.rows[row])
        return TokenMasks(torch.tensor(rows, dtype=torch.int64), torch.from_numpy(bits))

    def settled(self, chunks: Seq[Chunk], results: Seq[ChunkResult]) -> list[ChunkResult]:
        """The step's results, one a chunk, with what they mean to the grammars."""
        row_of = {id(chunk): row for row, chunk in self.rows.items()}
        return [
            self._settled(row_of[id(chunk)], result) if id(chunk) in row_of else result
            for chunk, result in zip(chunks, results, strict=True)
        ]

    def _settled(self, row: int, result: ChunkResult) -> ChunkResult:
        if result.failure:
            return result
        assert result.token_id is not None, "a constrained row samples"
        if row not in self.failures:
            matcher, state = self.matchers[row], self.grammars.state_of(self.rows[row].sequence)
            try:
                # a fork's own matcher is made when its sequence first runs
                ends = [consume(matcher.deep_copy(), [draw.token_id]) for draw in result.forks]
                is_complete = consume(matcher, [result.token_id])
                state.num_consumed += 1
            except BadGrammar as error:
                self.failures[row] = str(error)
            else:
                forks = tuple(replace(draw, is_complete=end) for draw, end in zip(result.forks, ends, strict=True))
                return replace(result, is_complete=is_complete, forks=forks)
        return ChunkResult(None, failure=self.failures[row])
