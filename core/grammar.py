"""What router and workers must agree on about grammars: the vocabulary they speak of, and how much work one may be.

The text of a grammar is what llguidance takes: its own JSON, ``{"grammars": [...]}``, or Lark in llguidance's dialect
(https://github.com/guidance-ai/llguidance/blob/main/docs/syntax.md). The router compiles one before it is let in, a
worker compiles it again to follow it.
"""

import json
import math
import re
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation, Overflow

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

MAX_GRAMMAR_BYTES = 128 << 10
MAX_LARK_CHARS = 16 << 10
MAX_PATTERN_CHARS = 8 << 10
"""Of all ``pattern`` of a schema together; memory and time grow with the square of a regular expression's length."""
MAX_MULTIPLE = 100_000
"""Of the least common multiple of all ``multipleOf``: an automaton with so many states is built, 10 µs each."""
MAX_DIGITS = 20
MAX_FORCED_CHARS = 512
"""Of text that a grammar leaves no choice about, so many are tokenised to find the next token."""
MAX_MESSAGE_CHARS = 400

MAX_STEP_ITEMS = 10_000
"""Of the parser for one mask, about 3 µs each: a grammar so ambiguous that it needs more would hold others up."""

MAX_LEXER_STATES = 50_000
"""Of one matcher, up to 2 kB each."""

_LIMITS = LLParserLimits(verbose_errors=False, step_max_items=MAX_STEP_ITEMS, max_lexer_states=MAX_LEXER_STATES)
_QUIET = 0
_STACK_BYTES = 256 << 20  # of address space: a chain of rules as long as a grammar may be is followed by recursion
_stack_size_lock = threading.Lock()
_CHOICES = re.compile(r"start: /(?:[a-zA-Z0-9|]|\\x\{[0-9a-f]+\})*/")
_ESCAPE = re.compile(r"\\+u([0-9a-fA-F]{4})")
_MULTIPLE = re.compile(
    r'multipleOf[\\"\s]*:\s*([-+.0-9eE]+)'
)  # its quotes are escaped where the schema is part of Lark
_TEMPERATURE = re.compile(r'\w\[[^]/"]*\btemperature\s*=')


class BadGrammar(Exception):
    """What is wrong with a grammar, in words for its author."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What the tokens of a model stand for.

    ``pieces`` are the bytes that each id adds to a text. No text yields ``special_ids`` or ``eos_ids``, whatever their
    pieces are. ``encode`` is how the model itself would write a text, without special tokens.
    """

    pieces: Sequence[bytes]
    special_ids: frozenset[int]
    eos_ids: frozenset[int]
    encode: Callable[[str], list[int]]


class GrammarCompiler:
    """Compiles grammars over one vocabulary; from any thread, without holding up the others."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int | None = None) -> None:
        """``vocab_size`` is the model's own, where it differs. Raises `BadGrammar` where no output could end."""
        num_tokens = len(vocabulary.pieces) if vocab_size is None else vocab_size
        eos_ids = sorted(token_id for token_id in vocabulary.eos_ids if token_id < num_tokens)
        if not eos_ids:
            raise BadGrammar("this model has no end-of-sequence token, and so knows no end of a grammar")
        tokens = TokenizerWrapper(_Tokens(vocabulary, num_tokens, eos_ids[0]))
        self._tokenizer = LLTokenizer(tokens, eos_token=eos_ids)

    @property
    def eos_ids(self) -> list[int]:
        return list(self._tokenizer.eos_tokens)

    def compile(self, grammar: str) -> LLMatcher:
        """A matcher at the beginning of the grammar, for which there is a first mask. Raises `BadGrammar`."""
        _check(grammar)
        return _on_deep_stack(lambda: self._compile(grammar))

    def _compile(self, grammar: str) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar, log_level=_QUIET, limits=_LIMITS)
        if matcher.is_error():
            raise BadGrammar(in_short(matcher.get_error()))
        first = matcher.deep_copy()
        first.compute_bitmask()
        if first.is_error():
            raise BadGrammar(f"no text conforms to it, or it is too complex: {in_short(first.get_error())}")
        return matcher


def in_short(error: str) -> str:
    """llguidance's words on one line, the beginning and the end of long ones, which quote the grammar between."""
    line = " ".join(error.replace("<non-verbose/>", "").split())
    half = MAX_MESSAGE_CHARS // 2
    return line if len(line) <= MAX_MESSAGE_CHARS else f"{line[:half]} … {line[-half:]}"


def _on_deep_stack(compile: Callable[[], LLMatcher]) -> LLMatcher:
    outcome: Future[LLMatcher] = Future()

    def run() -> None:
        try:
            outcome.set_result(compile())
        except BadGrammar as error:
            outcome.set_exception(error)
        finally:
            if not outcome.done():  # the fault is ours, or a panic of llguidance; its traceback is in the log
                outcome.set_exception(BadGrammar("it could not be compiled"))

    with _stack_size_lock:
        usual = threading.stack_size(_STACK_BYTES)
        try:
            threading.Thread(target=run, name="grammar", daemon=True).start()
        finally:
            threading.stack_size(usual)
    return outcome.result()


def _check(grammar: str) -> None:
    """Raises `BadGrammar` for what llguidance would spend minutes or gigabytes on, and for what it leaves to others."""
    num_bytes = len(grammar.encode())
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise BadGrammar(f"it has {num_bytes} bytes, the most is {MAX_GRAMMAR_BYTES}")
    _check_lengths(grammar)
    plain = _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), grammar)
    if _TEMPERATURE.search(plain):
        raise BadGrammar("a rule's 'temperature' is not supported; that of the request holds for all of its output")
    multiple = 1
    for number in set(_MULTIPLE.findall(plain)):
        multiple = math.lcm(multiple, _digits(number))
        if multiple > MAX_MULTIPLE:
            raise BadGrammar(f"its 'multipleOf' have the common multiple {multiple}, the most is {MAX_MULTIPLE}")


def _check_lengths(grammar: str) -> None:
    """Raises `BadGrammar` for long regular expressions and Lark; literal choices are no trouble at any length."""
    try:
        left = [json.loads(grammar)]
    except (ValueError, RecursionError):
        left = [{"lark_grammar": grammar}]
    num_pattern_chars = 0
    while left:
        part = left.pop()
        if isinstance(part, dict):
            lark, pattern, patterns = (part.get(name) for name in ("lark_grammar", "pattern", "patternProperties"))
            if isinstance(lark, str) and len(lark) > MAX_LARK_CHARS and not _CHOICES.fullmatch(lark):
                raise BadGrammar(
                    f"its Lark or regular expression has {len(lark)} characters, the most is {MAX_LARK_CHARS}"
                )
            num_pattern_chars += len(pattern) if isinstance(pattern, str) else 0
            num_pattern_chars += sum(map(len, patterns)) if isinstance(patterns, dict) else 0
            left += part.values()
        elif isinstance(part, list):
            left += part
    if num_pattern_chars > MAX_PATTERN_CHARS:
        raise BadGrammar(f"its patterns have {num_pattern_chars} characters, the most is {MAX_PATTERN_CHARS}")


def _digits(number: str) -> int:
    """A number without its decimal point: 25 for 0.25. What is no number is left to llguidance's judgement."""
    try:
        _, digits, exponent = Decimal(number).normalize().as_tuple()
    except InvalidOperation:
        return 1
    except Overflow:
        return int(10**MAX_DIGITS)
    assert isinstance(exponent, int), "the digits of a number are finite"
    zeros = "0" * min(max(exponent, 0), MAX_DIGITS)
    return max(1, int("".join(map(str, digits)) + zeros))


class _Tokens:
    """A vocabulary as llguidance wants it; called, it tokenises what a grammar forces."""

    def __init__(self, vocabulary: Vocabulary, num_tokens: int, eos_id: int) -> None:
        self._encode = vocabulary.encode
        self._pieces = vocabulary.pieces
        pieces = list(vocabulary.pieces[:num_tokens])
        self.tokens = pieces + [b""] * (num_tokens - len(pieces))  # an id without bytes is never allowed
        self.eos_token_id = eos_id
        self.bos_token_id = None
        self._special = special = vocabulary.special_ids | vocabulary.eos_ids
        self.special_token_ids = sorted(token_id for token_id in special if token_id < num_tokens)
        self._id_of = {piece: token_id for token_id, piece in enumerate(pieces) if piece and token_id not in special}
        self._longest = max(map(len, self._id_of), default=0)

    def __call__(self, text: bytes) -> list[int]:
        """As the model would, but where that begins with a space of its own, or takes text for a special token."""
        head = text.decode()[:MAX_FORCED_CHARS]
        token_ids = self._encode(head)
        is_same = b"".join(self._pieces[token_id] for token_id in token_ids) == head.encode()
        return token_ids if is_same and self._special.isdisjoint(token_ids) else self._longest_first(head.encode())

    def _longest_first(self, text: bytes) -> list[int]:
        token_ids: list[int] = []
        start = 0
        while start < len(text):
            ends = range(min(len(text), start + self._longest), start, -1)
            end = next((end for end in ends if text[start:end] in self._id_of), None)
            if end is None:
                break
            token_ids.append(self._id_of[text[start:end]])
            start = end
        return token_ids
