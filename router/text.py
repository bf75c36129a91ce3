"""Everything the router knows of text: the model's tokenizer, chat template and generation defaults in one object.

No transformers here, which would bring torch into the router: ``tokenizers`` and ``jinja2`` do the work.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from functools import partial
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from ..core.config import ChatConfig
from ..core.grammar import Vocabulary
from .chat_syntax import ChatSyntax, chat_syntax
from .chat_template import ChatMessage, ChatTemplate, TemplateRefused, ToolOffer
from .detokenizer import Detokenizer, TokenBytes, UnsupportedTokenizer
from .embedding import EmbeddingModel, NoEmbedding, read_embedding
from .gguf_tokenizer import read_gguf
from .grammar import GrammarDoor
from .tokenizer import GenerationDefaults, TokenizerParts, read_folder

DEFAULT_CHAT = ChatConfig()


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids of a text; the first ``num_added`` were put before it by the tokenizer (BOS)."""

    ids: list[int]
    num_added: int = 0


@dataclass(frozen=True, slots=True)
class TextModel:
    """``eos_ids`` end a generation unless the client says otherwise; they are never shown.

    ``vocabulary`` is what grammars are written over, ``grammars`` the door that they pass.
    """

    tokenizer: Tokenizer
    token_bytes: TokenBytes
    template: ChatTemplate | None
    eos_ids: frozenset[int]
    defaults: GenerationDefaults
    syntax: ChatSyntax
    vocabulary: Vocabulary
    grammars: GrammarDoor
    embedding: EmbeddingModel | NoEmbedding

    @classmethod
    def of(
        cls, parts: TokenizerParts, now: Callable[[], datetime] = datetime.now, chat: ChatConfig = DEFAULT_CHAT
    ) -> "TextModel":
        """Raises `UnsupportedTokenizer` or `UnknownFamily`. ``now`` is the date that templates may print."""
        source = parts.chat_template if chat.chat_template is None else _read_template(chat.chat_template)
        template = ChatTemplate(source, parts.special_tokens, now) if source else None
        syntax = chat_syntax(chat, template, parts.tokenizer.get_vocab(with_added_tokens=True))
        token_bytes = TokenBytes.of(parts.tokenizer)
        vocabulary = _vocabulary(parts, token_bytes)
        grammars = GrammarDoor(vocabulary)
        return cls(
            parts.tokenizer,
            token_bytes,
            template,
            parts.eos_ids,
            parts.defaults,
            syntax,
            vocabulary,
            grammars,
            NoEmbedding("its files say nothing of it"),
        )

    def encode(self, text: str) -> Encoded:
        """With the special tokens that the tokenizer puts around a text. The text has no lone surrogates."""
        encoding = self._encoding(text, adds_special=True)
        mask = encoding.special_tokens_mask
        num_added = next((i for i, is_added in enumerate(mask) if not is_added), len(mask))
        return Encoded(encoding.ids, num_added)

    def render_chat(
        self,
        messages: Sequence[ChatMessage],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] = {},
        tools: Sequence[ToolOffer] | None = None,
    ) -> str:
        """Raises `TemplateRefused`, also where the model has no template."""
        if self.template is None:
            raise TemplateRefused("this model has no chat template; use /v1/completions")
        return self.template.render(messages, add_generation_prompt, continue_final_message, variables, tools)

    def ids_of(self, texts: Iterable[str]) -> frozenset[int]:
        """Of those that are one token of their own."""
        return frozenset(i for text in texts if (i := self.tokenizer.token_to_id(text)) is not None)

    def encode_chat(self, rendered: str) -> Encoded:
        """A rendered chat, whose special tokens the template has written itself."""
        return Encoded(self._encoding(rendered, adds_special=False).ids)

    def _encoding(self, text: str, adds_special: bool) -> Encoding:
        """As a batch of one, for which `tokenizers` lets other threads run meanwhile."""
        return self.tokenizer.encode_batch_fast([text], add_special_tokens=adds_special)[0]

    def decode(self, token_ids: Sequence[int], skips_special: bool = True) -> str:
        """A whole text at once."""
        detokenizer = Detokenizer(self.token_bytes, skips_special=skips_special)
        return "".join(map(detokenizer.feed, token_ids)) + detokenizer.flush()

    def token_text(self, token_id: int) -> str:
        """One token for display; ``bytes:\\xe2\\x80`` (OpenAI's spelling) where it is no whole character."""
        piece = self.token_bytes.piece(token_id)
        try:
            return piece.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


def _vocabulary(parts: TokenizerParts, tokens: TokenBytes) -> Vocabulary:
    plain = partial(parts.tokenizer.encode, add_special_tokens=False)
    return Vocabulary(tokens.pieces, tokens.special_ids, parts.eos_ids, lambda text: plain(text).ids)


def load_text(source: Path, chat: ChatConfig = DEFAULT_CHAT, pooling: str = "auto") -> TextModel:
    """The text side of a model: a Hugging Face folder or a GGUF file.

    ``pooling`` is ``last``, ``mean`` or ``auto``, what the model's files say.

    Raises `UnsupportedTokenizer`, `UnknownFamily` and ``core.gguf_header.MalformedGguf``.
    """
    text = TextModel.of(read_folder(source) if source.is_dir() else read_gguf(source), chat=chat)
    return replace(text, embedding=read_embedding(source, pooling))


def _read_template(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnsupportedTokenizer(f"the chat template {path} cannot be read: {error}") from None
