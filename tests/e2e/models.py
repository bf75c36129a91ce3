"""Small models made on the spot: one that talks nonsense like a chat model, one that recites what it is told to."""

import json
import shutil
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3Model

from crossdock.router.detokenizer import byte_level_alphabet
from crossdock.router.text import load_text

Json = dict[str, object]

SPECIAL_TOKENS = ("<s>", "</s>", "<|end|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }} {{ call.function.arguments | tojson }}){% endfor %}"
    "<|end|>{% endfor %}{{ '[assistant]' if add_generation_prompt }}"
)
_SYMBOL_OF = {byte: symbol for symbol, byte in byte_level_alphabet().items()}


def chat_model(folder: Path) -> Path:
    """A small random Llama with a chat template and special tokens: BOS, put before raw text too, and two that end.

    It has no row of the vocabulary to spare, and its greedy choices have no near ties.
    """
    merges = [(first, second) for first in "abcdefgh" for second in "stuvwxyz"]
    symbols = [*sorted(byte_level_alphabet()), *map("".join, merges)]
    config = LlamaConfig(
        vocab_size=len(symbols) + len(SPECIAL_TOKENS),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.5,
    )
    torch.manual_seed(7)
    _save(config, LlamaForCausalLM(config), folder, symbols, merges)
    return folder


def reciting_model(folder: Path, recitals: Mapping[str, Sequence[bytes]]) -> Path:
    """A Llama that after the (single-byte) key says the pieces, each a token of its own, and then ``<|end|>`` for ever.

    Attention and MLP add nothing to one-hot embeddings, and the head maps each token to the one that follows it.
    No piece may occur twice, since only the last token says what comes next.
    """
    symbols = [_SYMBOL_OF[byte] for byte in range(256)]
    symbols += ["".join(_SYMBOL_OF[byte] for byte in p) for said in recitals.values() for p in said if len(p) > 1]
    assert len(set(symbols)) == len(symbols), "a piece occurs twice"
    end = len(symbols) + SPECIAL_TOKENS.index("<|end|>")
    size = -(-(end + 1) // 32) * 32
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    followers = [end] * size
    for key, said in recitals.items():
        path = [ord(key), *(symbols.index("".join(_SYMBOL_OF[byte] for byte in piece)) for piece in said), end]
        for token, follower in pairwise(path):
            assert followers[token] == end, "a piece occurs twice"
            followers[token] = follower
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        model.lm_head.weight[followers, range(size)] = 2.0  # its logit is 2 sqrt(size), all others are 0
    _save(config, model, folder, symbols, [])
    return folder


def embedding_model(folder: Path, pooling: str = "lasttoken", normalizes: bool = True) -> Path:
    """A small random Qwen3 as sentence-transformers keeps one: the network alone, its pooling, an end behind each text.

    Vectors may be cut to 16 or 32 of their 64 numbers.
    """
    symbols = sorted(byte_level_alphabet())
    torch.manual_seed(3)
    config = Qwen3Config(
        vocab_size=len(symbols) + len(SPECIAL_TOKENS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
        initializer_range=0.2,
        tie_word_embeddings=True,
    )
    Qwen3Model(config).save_pretrained(folder)
    said = {"architectures": ["Qwen3ForCausalLM"], "matryoshka_dimensions": [16, 32]}
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), **said}))
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    end = [("<|end|>", len(symbols) + SPECIAL_TOKENS.index("<|end|>"))]
    tokenizer.post_processor = TemplateProcessing(single="$A <|end|>", special_tokens=end)
    tokenizer.save(str(folder / "tokenizer.json"))
    kinds = ["Transformer", "Pooling", *["Normalize"] * normalizes]
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" * bool(i), "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    modes = {f"pooling_mode_{mode}": mode.startswith(pooling) for mode in ("cls_token", "mean_tokens", "lasttoken")}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
    return folder


def variant(model: Path, folder: Path, generation_config: Json | None) -> Path:
    """The same model with other generation defaults, or none."""
    shutil.copytree(model, folder)
    path = folder / "generation_config.json"
    path.unlink()
    if generation_config is not None:
        path.write_text(json.dumps(generation_config))
    return folder


def ids_by_text(model: Path) -> dict[str, int]:
    """Token ids by how logprob entries show them; no two tokens of these models look the same."""
    text = load_text(model)
    shown = {text.token_text(token_id): token_id for token_id in range(text.tokenizer.get_vocab_size())}
    assert len(shown) == text.tokenizer.get_vocab_size()
    return shown


def _save(
    config: LlamaConfig, model: LlamaForCausalLM, folder: Path, symbols: Sequence[str], merges: list[tuple[str, str]]
) -> None:
    bos, eos, end = (len(symbols) + i for i in range(len(SPECIAL_TOKENS)))
    config.bos_token_id = config.eos_token_id = None
    model.generation_config.bos_token_id = bos
    model.generation_config.eos_token_id = [eos, end]
    model.save_pretrained(folder)
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(symbols)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": CHAT_TEMPLATE}
    config_file = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 2048, **named}
    (folder / "tokenizer_config.json").write_text(json.dumps(config_file))
