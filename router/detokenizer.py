"""From token ids back to text, a token at a time.

A tokenizer's decoder is, for the kinds that language models have, a concatenation of bytes: each token stands
for some bytes, which are read as UTF-8 at the end. So a token's bytes are looked up once, an incremental UTF-8
decoder holds back the bytes of an unfinished character, and nothing is ever decoded twice. The deltas of an output
join to ``decode(prompt + output)`` without ``decode(prompt)``, however they are cut. One exception: of a run of
byte-fallback tokens that is no UTF-8 as a whole, `tokenizers` gives U+FFFD for each byte, here the
characters before the fault, having been sent, stay.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from tokenizers import Tokenizer, pre_tokenizers

REPLACEMENT = "\ufffd"
MAX_UTF8_BYTES = 4
"""Of one character; one less may be unfinished."""

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACE_EACH = "crossdock-replace-each-byte"


class UnsupportedTokenizer(ValueError):
    """A tokenizer or chat template that cannot be served faithfully, and what to do about it."""


def _replace_each_byte(error: UnicodeError) -> tuple[str, int]:
    """Like ``replace``, but one U+FFFD for each byte: what the ByteFallback decoder makes of a broken character."""
    assert isinstance(error, UnicodeDecodeError), "registered for decoding only"
    return REPLACEMENT * (error.end - error.start), error.end


codecs.register_error(_REPLACE_EACH, _replace_each_byte)


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """What each token id contributes to a text, and how the whole is read.

    ``strips_space`` says that the very first character of a text is dropped if it is a space;
    ``errors`` is the UTF-8 error handler.
    """

    pieces: tuple[bytes, ...]
    special_ids: frozenset[int]
    strips_space: bool
    errors: str

    @classmethod
    def of(cls, tokenizer: Tokenizer) -> "TokenBytes":
        """Raises `UnsupportedTokenizer` for a decoder that is no concatenation of bytes."""
        steps = _decoder_steps(tokenizer)
        kinds = {str(step["type"]) for step in steps}
        piece = _piece_reader(steps, kinds)
        vocab = tokenizer.get_vocab(with_added_tokens=True)
        pieces = [b""] * (max(vocab.values(), default=-1) + 1)
        for token, token_id in vocab.items():
            pieces[token_id] = piece(token)
        special = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        errors = _REPLACE_EACH if "ByteFallback" in kinds else "replace"
        return cls(tuple(pieces), frozenset(special), not steps or "Strip" in kinds, errors)

    def piece(self, token_id: int) -> bytes:
        """Empty for ids that the model has and the tokenizer has not (rows that pad the embedding)."""
        return self.pieces[token_id] if token_id < len(self.pieces) else b""


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, object]]:
    if tokenizer.decoder is None:
        return []
    state: dict[str, object] = json.loads(tokenizer.decoder.__getstate__())
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    assert isinstance(steps, list), "a Sequence holds a list of decoders"
    return steps


def _piece_reader(steps: list[dict[str, object]], kinds: set[str]) -> Callable[[str], bytes]:
    if not steps:
        return lambda token: b" " + token.encode()
    if kinds == {"ByteLevel"}:
        return _byte_level_piece
    strips = [step for step in steps if step["type"] == "Strip"]
    is_plain = all((step["content"], step["start"], step["stop"]) == (" ", 1, 0) for step in strips)
    if "Fuse" in kinds and kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"} and is_plain:
        replaced = [(_literal(step), str(step["content"])) for step in steps if step["type"] == "Replace"]
        return lambda token: _fallback_piece(token, replaced, "ByteFallback" in kinds)
    raise UnsupportedTokenizer(
        f"the decoder {sorted(kinds)} is neither byte-level nor SentencePiece with byte fallback"
    )


def _literal(step: dict[str, object]) -> str:
    pattern = step["pattern"]
    if not isinstance(pattern, dict) or "String" not in pattern:
        raise UnsupportedTokenizer(f"a decoder that replaces the pattern {pattern!r} is not supported")
    return str(pattern["String"])


def _fallback_piece(token: str, replaced: list[tuple[str, str]], has_bytes: bool) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token) if has_bytes else None
    if byte:
        return bytes.fromhex(byte[1])
    for old, new in replaced:
        token = token.replace(old, new)
    return token.encode()


def byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2's ``bytes_to_unicode``)."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


_ALPHABET = byte_level_alphabet()
assert _ALPHABET.keys() == set(pre_tokenizers.ByteLevel.alphabet()), "tokenizers speaks the same alphabet"


def _byte_level_piece(token: str) -> bytes:
    """A token with any character outside the alphabet (an added one) stands for its own text."""
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:
        return token.encode()


class Detokenizer:
    """The text of one output; ``prompt_ids`` are what it continues, ``shown`` special tokens that are not skipped."""

    def __init__(
        self,
        tokens: TokenBytes,
        prompt_ids: Sequence[int] = (),
        skips_special: bool = True,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        self._tokens = tokens
        self._skipped = tokens.special_ids - shown if skips_special else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(tokens.errors)
        self._num_prompt_bytes = self._read_prompt(prompt_ids)
        """Bytes at the end of the prompt that may still become a character together with the output."""

    def _read_prompt(self, prompt_ids: Sequence[int]) -> int:
        pieces = (self._tokens.piece(i) for i in reversed(prompt_ids) if i not in self._skipped)
        last = list(islice(filter(None, pieces), MAX_UTF8_BYTES - 1))
        self._strips = self._tokens.strips_space and not last
        tail = b"".join(reversed(last))[1 - MAX_UTF8_BYTES :]
        self._utf8.decode(tail)
        return len(self._utf8.getstate()[0])

    def feed(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is unfinished."""
        if token_id in self._skipped:
            return ""
        return self._clean(self._utf8.decode(self._tokens.piece(token_id)))

    def flush(self) -> str:
        """What is left when no token follows: U+FFFD for an unfinished character."""
        return self._clean(self._utf8.decode(b"", final=True))

    def _clean(self, text: str) -> str:
        if not text or not (self._strips or self._num_prompt_bytes):
            return text
        if self._num_prompt_bytes and text.startswith(REPLACEMENT):
            num_marks = self._num_prompt_bytes if self._tokens.errors == _REPLACE_EACH else 1
            text = text[num_marks:]
        if self._strips:
            text = text.removeprefix(" ")
        self._strips, self._num_prompt_bytes = False, 0
        return text
