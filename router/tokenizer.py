"""What a checkpoint says about its text: tokenizer, special tokens, chat template, generation defaults.

`read_folder` reads a Hugging Face folder as ``AutoTokenizer.from_pretrained`` does where a ``tokenizer.json`` is there:
that file alone says what is put around a text (BOS), whatever ``add_bos_token`` in the config says. GGUF files are
read by `gguf_tokenizer`.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from .detokenizer import UnsupportedTokenizer

NAMED_SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

Json = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What a request leaves open, from ``generation_config.json``; neutral where the model's authors say nothing."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


@dataclass(frozen=True, slots=True)
class TokenizerParts:
    """``special_tokens`` maps names such as ``bos_token`` to token texts; ``eos_ids`` all end generation."""

    tokenizer: Tokenizer
    special_tokens: Mapping[str, str]
    eos_ids: frozenset[int]
    chat_template: str | None
    defaults: GenerationDefaults = field(default_factory=GenerationDefaults)


def read_folder(folder: Path) -> TokenizerParts:
    """Raises `UnsupportedTokenizer` where there is no ``tokenizer.json``."""
    config = _json(folder / "tokenizer_config.json")
    named = {**_named(_json(folder / "special_tokens_map.json")), **_named(config)}
    tokenizer = _backend(folder)
    _add_tokens(tokenizer, config, named.values())
    named = {name: token for name, token in named.items() if tokenizer.token_to_id(token) is not None}
    generation = _json(folder / "generation_config.json")
    eos_ids = _ids(generation) or _ids(_json(folder / "config.json"))
    eos_id = tokenizer.token_to_id(named.get("eos_token", ""))
    eos_ids |= set() if eos_id is None else {eos_id}
    return TokenizerParts(tokenizer, named, eos_ids, _chat_template(folder, config), _defaults(generation))


def _json(path: Path) -> Json:
    """Empty where the file is missing."""
    if not path.exists():
        return {}
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UnsupportedTokenizer(f"{path} holds no JSON object")
    return content


def _backend(folder: Path) -> Tokenizer:
    path = folder / "tokenizer.json"
    if not path.exists():
        raise UnsupportedTokenizer(
            f"{folder} has no tokenizer.json. If it has its tokenizer in another form (tokenizer.model, vocab.json), "
            f"convert it once: AutoTokenizer.from_pretrained({str(folder)!r}).save_pretrained({str(folder)!r})"
        )
    tokenizer = Tokenizer.from_file(str(path))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _named(config: Json) -> dict[str, str]:
    texts = {name: _token_text(config[name]) for name in NAMED_SPECIAL_TOKENS if config.get(name) is not None}
    return {name: text for name, text in texts.items() if text is not None}


def _token_text(token: object) -> str | None:
    """Of ``"</s>"`` or ``{"content": "</s>", …}``."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None


def _add_tokens(tokenizer: Tokenizer, config: Json, named: Iterable[str]) -> None:
    """Tokens of the config that ``tokenizer.json`` does not list as added; none of them may be a new id for nothing."""
    decoder = config.get("added_tokens_decoder")
    listed = decoder if isinstance(decoder, dict) else {}
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    for _, token in sorted(listed.items(), key=lambda item: int(item[0])):
        if token["content"] not in known:
            flags = {key: token[key] for key in ("single_word", "lstrip", "rstrip", "normalized") if key in token}
            tokenizer.add_tokens([AddedToken(token["content"], special=bool(token.get("special")), **flags)])
    extra = [config.get("additional_special_tokens"), config.get("extra_special_tokens")]
    texts = [
        *named,
        *(text for tokens in extra if isinstance(tokens, list) for text in map(_token_text, tokens) if text),
    ]
    tokenizer.add_special_tokens([text for text in texts if tokenizer.token_to_id(text) is not None])


def _ids(config: Json) -> frozenset[int]:
    """``eos_token_id`` is an int or a list of them."""
    ids = config.get("eos_token_id")
    return frozenset(i for i in (ids if isinstance(ids, list) else [ids]) if isinstance(i, int))


def _chat_template(folder: Path, config: Json) -> str | None:
    """A file of its own wins over the config, where several may be listed under names."""
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template if isinstance(template, str) else None


def _defaults(generation: Json) -> GenerationDefaults:
    def number(name: str, neutral: float) -> float:
        value = generation.get(name)
        return value if isinstance(value, int | float) else neutral

    return GenerationDefaults(
        temperature=number("temperature", 1.0),
        top_p=number("top_p", 1.0),
        top_k=int(number("top_k", 0)),
        min_p=number("min_p", 0.0),
        repetition_penalty=number("repetition_penalty", 1.0),
    )
