"""Text from tokens piece by piece, against ``tokenizers``' decoding of the whole, and stop strings."""

import functools
from collections.abc import Sequence
from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE, WordLevel

from crossdock.router.detokenizer import REPLACEMENT, Detokenizer, TokenBytes, UnsupportedTokenizer
from crossdock.router.stop_strings import StopScanner

HARD_TEXT = "삼겹살 👩‍👩‍👧 naïve “q” 🙂🙂"
BLANKS = ["a    b", " a", "\n\n  x", "hello  world "]


@functools.cache
def byte_level() -> Tokenizer:
    """Bytes, a few merges that cut characters in two, and a special and a plain added token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("ì", "Ĥ"), ("Ġ", "Ġ"), ("ĠĠ", "ĠĠ"), ("h", "e"), ("Ġ", "ë"), ("°", "ð")]
    tokens = [*alphabet, *(left + right for left, right in merges)]
    tokenizer = Tokenizer(BPE({token: i for i, token in enumerate(tokens)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return with_added_tokens(tokenizer)


@functools.cache
def byte_fallback() -> Tokenizer:
    """Like Llama's: ▁ for a space, one of them put before a text, whatever is unknown in bytes."""
    pieces = [
        "▁",
        "a",
        "b",
        "x",
        "h",
        "e",
        "l",
        "o",
        "w",
        "r",
        "d",
        "▁▁",
        "▁▁▁▁",
        "▁a",
        "▁h",
        "he",
        "n",
        "v",
        "q",
        "\n",
    ]
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    merges = [("▁", "▁"), ("▁▁", "▁▁"), ("▁", "a"), ("▁", "h"), ("h", "e")]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocab, merges, byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return with_added_tokens(tokenizer)


def with_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    tokenizer.add_tokens([AddedToken("<thínk 한>", normalized=False)])
    return tokenizer


def token(tokenizer: Tokenizer, text: str) -> int:
    token_id = tokenizer.token_to_id(text)
    assert token_id is not None
    return token_id


TOKENIZERS = {"byte-level": byte_level, "byte-fallback": byte_fallback}
each_tokenizer = pytest.mark.parametrize("tokenizer", [make() for make in TOKENIZERS.values()], ids=list(TOKENIZERS))


def deltas(tokenizer: Tokenizer, output: Sequence[int], prompt: Sequence[int] = ()) -> list[str]:
    detokenizer = Detokenizer(TokenBytes.of(tokenizer), prompt)
    return [*map(detokenizer.feed, output), detokenizer.flush()]


def decoded_after(tokenizer: Tokenizer, output: Sequence[int], prompt: Sequence[int]) -> str:
    before = tokenizer.decode(list(prompt))
    whole = tokenizer.decode([*prompt, *output])
    assert whole.startswith(before)
    return whole[len(before) :]


@each_tokenizer
@pytest.mark.parametrize("text", [HARD_TEXT, *BLANKS])
def test_deltas_join_to_the_full_decode_and_hold_no_broken_character(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text).ids
    parts = deltas(tokenizer, ids)
    assert "".join(parts) == tokenizer.decode(ids) == text.removeprefix(" " if tokenizer is byte_fallback() else "")
    assert not any(REPLACEMENT in part for part in parts)


@each_tokenizer
@pytest.mark.parametrize("prompt", ["삼", "tail 👩‍👩‍👧", "ends in a space ", "a", " "])
@pytest.mark.parametrize("text", [HARD_TEXT, *BLANKS])
def test_output_continues_the_prompt_character_for_character(tokenizer: Tokenizer, prompt: str, text: str) -> None:
    before = tokenizer.encode(prompt).ids
    output = tokenizer.encode(prompt + text).ids[len(before) :]
    assert "".join(deltas(tokenizer, output, before)) == decoded_after(tokenizer, output, before)


def test_first_output_token_keeps_its_leading_space_only_after_a_prompt() -> None:
    word = token(byte_fallback(), "▁a")
    special = token(byte_fallback(), "<|end|>")
    before = byte_fallback().encode("hello").ids
    assert deltas(byte_fallback(), [word, word], before) == [" a", " a", ""]
    assert deltas(byte_fallback(), [word, word]) == ["a", " a", ""]
    assert deltas(byte_fallback(), [word, word], [special]) == ["a", " a", ""]


@given(st.lists(st.integers(0, 263), max_size=12), st.integers(0, 12))
def test_any_byte_level_ids_decode_as_a_whole_wherever_the_prompt_ends(ids: list[int], border: int) -> None:
    prompt, output = ids[:border], ids[border:]
    joined = "".join(deltas(byte_level(), output, prompt))
    whole, before = byte_level().decode(ids), byte_level().decode(prompt)
    if whole.startswith(before):
        assert joined == whole[len(before) :]
    else:  # the output completes a character that the prompt began
        assert before[-1] == REPLACEMENT
        assert whole == before[:-1] + joined


@given(st.text(max_size=20), st.text(max_size=20))
def test_any_text_comes_back_from_byte_fallback(prompt: str, text: str) -> None:
    before = byte_fallback().encode(prompt).ids
    output = byte_fallback().encode(text).ids
    assert "".join(deltas(byte_fallback(), output, before)) == decoded_after(byte_fallback(), output, before)


def test_a_character_that_stays_unfinished_is_replaced_at_the_end_and_no_earlier() -> None:
    first, second, _ = byte_fallback().encode("€").ids[1:]
    assert deltas(byte_fallback(), [first, second]) == ["", "", 2 * REPLACEMENT]
    letter = token(byte_fallback(), "b")
    assert deltas(byte_fallback(), [first, second, letter]) == ["", "", 2 * REPLACEMENT + "b", ""]
    assert byte_fallback().decode([first, second, letter]) == 2 * REPLACEMENT + "b"


def test_a_character_cut_by_the_end_of_the_prompt_is_completed_or_left_to_the_prompt() -> None:
    for tokenizer in (byte_level(), byte_fallback()):
        first, second, third = tokenizer.encode("€").ids[-3:]
        letter = token(tokenizer, "b")
        assert deltas(tokenizer, [third, letter], [letter, first, second]) == ["€", "b", ""]
        assert deltas(tokenizer, [letter], [letter, first, second]) == ["b", ""]
        assert deltas(tokenizer, [], [letter, first, second]) == [""]


@each_tokenizer
def test_special_tokens_are_skipped_and_added_ones_shown(tokenizer: Tokenizer) -> None:
    special, plain = token(tokenizer, "<|end|>"), token(tokenizer, "<thínk 한>")
    letter = token(tokenizer, "b")
    unknown_to_the_tokenizer = 10_000
    assert deltas(tokenizer, [special, letter, unknown_to_the_tokenizer, plain]) == ["", "b", "", "<thínk 한>", ""]


def test_words_without_a_decoder_are_joined_by_spaces() -> None:
    tokenizer = Tokenizer(WordLevel({"zero": 0, "one": 1, "[UNK]": 2}, unk_token="[UNK]"))
    assert "".join(deltas(tokenizer, [1, 0, 1])) == tokenizer.decode([1, 0, 1]) == "one zero one"
    assert deltas(tokenizer, [0], [1]) == [" zero", ""]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.Sequence([decoders.Replace(Regex("▁+"), " "), decoders.Fuse()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 0, 1)]),
    ],
)
def test_a_decoder_that_is_no_concatenation_of_bytes_is_refused(decoder: decoders.Decoder) -> None:
    tokenizer = Tokenizer(WordLevel({"zero": 0}, unk_token="zero"))
    tokenizer.decoder = decoder
    with pytest.raises(UnsupportedTokenizer):
        TokenBytes.of(tokenizer)


# --- stop strings ------------------------------------------------------------------------------


def scan(stops: Sequence[str], parts: Sequence[str], floor: int = 0) -> tuple[str, bool]:
    """What is shown of ``parts``, the first ``floor`` of which may not end the text, and whether it was stopped."""
    scanner = StopScanner(stops)
    shown = ""
    for number, part in enumerate(parts):
        scanned = scanner.feed(part, may_stop=number >= floor)
        shown += scanned.text
        if scanned.is_stopped:
            return shown, True
    return shown + scanner.flush(), False


def first_stop(stops: Sequence[str], text: str, floor: int) -> int | None:
    """By definition: of the stop strings that end beyond ``floor``, where the one that ends first begins."""
    found = [(start + len(stop), start) for stop in stops for start in range(len(text)) if text.startswith(stop, start)]
    return min((place for place in found if place[0] > floor), default=(0, None))[1]


texts = st.text("ab<", max_size=12)


@given(st.lists(st.text("ab<", min_size=1, max_size=4), max_size=3), st.lists(texts, max_size=6), st.integers(0, 3))
def test_the_outcome_is_that_of_the_whole_text_however_it_is_cut(
    stops: list[str], parts: list[str], floor: int
) -> None:
    text = "".join(parts)
    start = first_stop(stops, text, len("".join(parts[:floor])))
    assert scan(stops, parts, floor) == ((text, False) if start is None else (text[:start], True))


@given(st.lists(st.text("ab<", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(texts, max_size=6))
def test_no_part_of_a_stop_string_is_shown_and_nothing_else_held_back(stops: list[str], parts: list[str]) -> None:
    scanner = StopScanner(stops)
    shown = [scanner.feed(part, may_stop=False).text for part in parts]
    for text, visible in zip(accumulate(parts), accumulate(shown), strict=True):
        unfinished = [i for i in range(1, 5) if any(stop[:i] == text[-i:] and len(stop) > i for stop in stops)]
        assert text.removeprefix(visible) == text[len(text) - max(unfinished, default=0) :]


def test_a_stop_string_over_token_borders_is_cut_off_whole() -> None:
    scanner = StopScanner(["</answer>"])
    fed = [scanner.feed(part) for part in ["Paris", " <", "/b> <", "/ans", "wer", "> and more"]]
    assert [scanned.text for scanned in fed] == ["Paris", " ", "</b> ", "", "", ""]
    assert [scanned.is_stopped for scanned in fed] == [False, False, False, False, False, True]


def test_stops_that_overlap_end_the_text_at_the_first_one_complete() -> None:
    assert scan(["abcd", "c"], ["abcd"]) == ("ab", True)
    assert scan(["bc", "abc"], ["x", "abc"]) == ("x", True)


def test_without_stop_strings_text_passes_at_once() -> None:
    scanner = StopScanner([])
    assert [scanner.feed(part).text for part in ("a", "", "b")] == ["a", "", "b"]


def test_a_stop_string_complete_below_the_floor_is_text_but_one_begun_there_may_end_it() -> None:
    assert scan(["END"], ["EN", "D and ", "END"], floor=2) == ("END and ", True)
    assert scan(["END"], ["so E", "ND", "x"], floor=1) == ("so ", True)
    assert scan(["END"], ["so E", "ND", "x"], floor=2) == ("so ENDx", False)
