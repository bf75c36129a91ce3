"""A tokenizer from the metadata of a GGUF file, equal to the one that the file was converted from.

Sources: llama.cpp's gguf-py/gguf/constants.py for the keys, src/llama-vocab.cpp for what a ``pre`` kind means, and the
``tokenizer.json`` of the models named for the pre-tokenizers themselves.
"""

import mmap
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing

from ..core.gguf_header import read_header
from .detokenizer import UnsupportedTokenizer, byte_level_alphabet
from .tokenizer import TokenizerParts

_SPECIAL = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
"""End of sequence, of turn and of message: all end a generation."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


class TokenType(IntEnum):
    """``tokenizer.ggml.token_type``."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a byte-level vocabulary cuts text before its merges. ``split`` ``None`` is GPT-2's own pattern."""

    split: str | None = None
    splits_digits: bool = False
    composes: bool = False
    """Text is brought into Unicode's form NFC first."""
    ignores_merges: bool = False
    """A whole piece that is in the vocabulary is that token, whatever the merges would make of it."""
    adds_bos: bool = False
    """Where ``add_bos_token`` does not say."""


_GPT2 = PreTokenizer()
_DIGITS = PreTokenizer(splits_digits=True)
_LLAMA3 = PreTokenizer(_LLAMA3_SPLIT, ignores_merges=True, adds_bos=True)
_QWEN2 = PreTokenizer(_QWEN2_SPLIT, composes=True)
PRE_TOKENIZERS = {
    **dict.fromkeys(("default", "gpt-2", "phi-2", "olmo"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
}


def read_gguf(path: Path) -> TokenizerParts:
    """Raises `UnsupportedTokenizer` for another kind of tokenizer, ``MalformedGguf`` for another kind of file."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return parts_of(read_header(data).metadata)


def parts_of(metadata: Mapping[str, object]) -> TokenizerParts:
    """What `read_gguf` promises, from the metadata of the file's header."""
    return _Metadata(metadata).parts()


class _Metadata:
    """The keys below ``tokenizer.``, and what they say together."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self._metadata = metadata
        self._tokens = [str(token) for token in self._array("tokens")]
        if not self._tokens:
            raise UnsupportedTokenizer("the GGUF file has no tokenizer.ggml.tokens")
        types = [TokenType(kind) for kind in self._array("token_type") if isinstance(kind, int)]
        self._types = types or [TokenType.NORMAL] * len(self._tokens)

    def parts(self) -> TokenizerParts:
        kind = self._get("model")
        if kind == "gpt2":
            tokenizer, adds_bos = self._byte_level()
        elif kind == "llama":
            tokenizer, adds_bos = self._sentencepiece(), True
        else:
            raise UnsupportedTokenizer(f"tokenizer.ggml.model {kind!r} is not supported, only 'gpt2' and 'llama' are")
        tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in self._of(TokenType.CONTROL)])
        tokenizer.add_tokens([AddedToken(t, normalized=False) for t in self._of(TokenType.USER_DEFINED)])
        named = {name: self._tokens[i] for name, key in _SPECIAL.items() if (i := self._id(key)) is not None}
        bos = named.get("bos_token") if self._get("add_bos_token", adds_bos) else None
        eos = named.get("eos_token") if self._get("add_eos_token", False) else None
        _frame(tokenizer, bos, eos)
        ends = frozenset(i for key in _ENDS if (i := self._id(key)) is not None)
        template = self._metadata.get("tokenizer.chat_template")
        return TokenizerParts(tokenizer, named, ends, template if isinstance(template, str) else None)

    def _get(self, key: str, default: object = None) -> object:
        return self._metadata.get(f"tokenizer.ggml.{key}", default)

    def _array(self, key: str) -> Sequence[object]:
        values = self._get(key, [])
        assert isinstance(values, list), f"tokenizer.ggml.{key} is an array"
        return values

    def _id(self, key: str) -> int | None:
        token_id = self._get(key)
        return token_id if isinstance(token_id, int) and 0 <= token_id < len(self._tokens) else None

    def _of(self, *kinds: TokenType) -> list[str]:
        return [token for token, kind in zip(self._tokens, self._types, strict=True) if kind in kinds]

    def _byte_level(self) -> tuple[Tokenizer, bool]:
        name = str(self._get("pre", "default"))
        pre = PRE_TOKENIZERS.get(name)
        if pre is None:
            raise UnsupportedTokenizer(f"tokenizer.ggml.pre {name!r} is not one of {sorted(PRE_TOKENIZERS)}")
        vocab = {token: token_id for token_id, token in enumerate(self._spelled_in_bytes())}
        merges = [_pair(str(merge)) for merge in self._array("merges")]
        tokenizer = Tokenizer(BPE(vocab, merges, ignore_merges=pre.ignores_merges))
        if pre.composes:
            tokenizer.normalizer = normalizers.NFC()
        steps: list[pre_tokenizers.PreTokenizer] = []
        if pre.splits_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        if pre.split is not None:
            steps.append(pre_tokenizers.Split(Regex(pre.split), behavior="isolated"))
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre.split is None))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer, pre.adds_bos

    def _spelled_in_bytes(self) -> Iterator[str]:
        """The vocabulary in the byte-level alphabet; some files hold a normal token as plain text."""
        letters = byte_level_alphabet()
        spelling = {byte: letter for letter, byte in letters.items()}
        for token, kind in zip(self._tokens, self._types, strict=True):
            is_plain = kind is TokenType.NORMAL and not all(char in letters for char in token)
            yield "".join(spelling[byte] for byte in token.encode()) if is_plain else token

    def _sentencepiece(self) -> Tokenizer:
        architecture = str(self._metadata.get("general.architecture"))
        if architecture.startswith(("gemma", "phi3")):
            raise UnsupportedTokenizer(
                f"the SentencePiece variant of {architecture} is not read from GGUF; use its folder"
            )
        vocab = {token: token_id for token_id, token in enumerate(self._tokens)}
        merges = [_pair(str(merge)) for merge in self._array("merges")] or self._merges_by_score(vocab)
        unk = self._id("unknown_token_id")
        tokenizer = Tokenizer(
            BPE(vocab, merges, fuse_unk=True, byte_fallback=True, unk_token=None if unk is None else self._tokens[unk])
        )
        prefixes = bool(self._get("add_space_prefix", True))
        scheme = "first" if prefixes else "never"
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefixes else steps)
        return tokenizer

    def _merges_by_score(self, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
        """All ways to join two tokens into a third, the third's score deciding the rank, then the longer left half.

        SentencePiece's BPE joins, of all neighbours, the pair that makes the token of the highest score.
        """
        scores = [score for score in self._array("scores") if isinstance(score, float)]
        if len(scores) != len(self._tokens):
            raise UnsupportedTokenizer("the GGUF file has neither tokenizer.ggml.merges nor a score for each token")
        joinable = dict.fromkeys(self._of(TokenType.NORMAL, TokenType.USER_DEFINED))
        pairs = [pair for token in joinable for pair in _halves(token, vocab, joinable)]
        return sorted(pairs, key=lambda pair: (-scores[vocab[pair[0] + pair[1]]], -len(pair[0]), -len(pair[1])))


def _frame(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    """From now on texts encoded with special tokens begin with ``bos`` and end with ``eos``."""
    pieces = [piece for piece in (bos, "$A", eos) if piece is not None]
    special = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token is not None]
    tokenizer.post_processor = TemplateProcessing(single=pieces, pair=[*pieces, "$B:1"], special_tokens=special)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _halves(token: str, vocab: Mapping[str, int], joinable: Container[str]) -> list[tuple[str, str]]:
    cuts = ((token[:i], token[i:]) for i in range(1, len(token)))
    pairs = [(left, right) for left, right in cuts if left in joinable and right in joinable]
    return sorted(pairs, key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
