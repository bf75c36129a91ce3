"""Everything the router knows of text: the model's tokenizer, chat template and generation defaults in one object.

No transformers here, which would bring torch into the router: ``tokenizers`` and ``jinja2`` do the work.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from tokenizers import Encoding, Tokenizer

from .chat_template import ChatMessage, ChatTemplate, TemplateRefused
from .detokenizer import Detokenizer, TokenBytes
from .gguf_tokenizer import read_gguf
from .tokenizer import GenerationDefaults, TokenizerParts, read_folder


@dataclass(frozen=True, slots=True)
class Encoded:
    """Ids of a text; the first ``num_added`` were put before it by the tokenizer (BOS)."""

    ids: list[int]
    num_added: int = 0


@dataclass(frozen=True, slots=True)
class TextModel:
    """``eos_ids`` end a generation unless the client says otherwise; they are never shown."""

    tokenizer: Tokenizer
    token_bytes: TokenBytes
    template: ChatTemplate | None
    eos_ids: frozenset[int]
    defaults: GenerationDefaults

    @classmethod
    def of(cls, parts: TokenizerParts, now: Callable[[], datetime] = datetime.now) -> "TextModel":
        """Raises `UnsupportedTokenizer`. ``now`` is the date that templates may print."""
        template = parts.chat_template and ChatTemplate(parts.chat_template, parts.special_tokens, now)
        token_bytes = TokenBytes.of(parts.tokenizer)
        return cls(parts.tokenizer, token_bytes, template or None, parts.eos_ids, parts.defaults)

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
    ) -> str:
        """Raises `TemplateRefused`, also where the model has no template."""
        if self.template is None:
            raise TemplateRefused("this model has no chat template; use /v1/completions")
        return self.template.render(messages, add_generation_prompt, continue_final_message, variables)

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


def load_text(source: Path) -> TextModel:
    """The text side of a model: a Hugging Face folder or a GGUF file.

    Raises `UnsupportedTokenizer`, and ``core.gguf_header.MalformedGguf``.
    """
    return TextModel.of(read_folder(source) if source.is_dir() else read_gguf(source))
