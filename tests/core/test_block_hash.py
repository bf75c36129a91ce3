"""A hash names the whole history of a block: nothing that changes the KV, or its owner, may leave it as it was."""

import os
import subprocess
import sys
from dataclasses import replace
from hashlib import blake2b
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.core.block_hash import RUN_BLOCKS, BlockHasher, encode_fields, model_root
from crossdock.core.kv_layout import KvLayout
from crossdock.core.request import pack_ids

KEY = b"cluster"
LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
ROOT = model_root(KEY, "tiny@1", LAYOUT)
HASHER = BlockHasher(KEY, ROOT, 16)
TOKENS = list(range(100, 132))


def hashes(tokens: list[int], salt: bytes = b"", parent: bytes | None = None) -> list[bytes]:
    return HASHER.hashes(pack_ids(tokens), salt, parent)


def test_a_block_hash_is_keyed_blake2b_of_parent_and_tokens() -> None:
    parent, block = bytes(range(16)), pack_ids(TOKENS[:16])
    expected = blake2b(parent + block, digest_size=16, key=KEY, person=b"crossdock block").digest()
    assert hashes(TOKENS[:16], parent=parent) == [expected]


def test_the_hashes_of_this_version_stay_what_they_are() -> None:
    assert [each.hex() for each in hashes(TOKENS)] == [
        "208c503640a469c4e8d7b2dedfcf41ed",
        "7e11b731c8d064d56ba24f9e90adc193",
    ]


def test_only_full_blocks_have_a_hash() -> None:
    assert hashes([]) == []
    assert hashes(TOKENS[:15]) == []
    assert hashes(TOKENS[:31]) == hashes(TOKENS)[:1]


def test_a_sequence_hashed_piece_by_piece_has_the_same_hashes() -> None:
    first, second = hashes(TOKENS, b"tenant")
    assert hashes(TOKENS[:16], b"tenant") == [first]
    assert hashes(TOKENS[16:], b"tenant", parent=first) == [second]


def test_a_prompt_that_begins_like_an_earlier_one_has_the_hashes_of_a_hasher_that_remembers_nothing() -> None:
    whole = list(range(1000, 1000 + 16 * (2 * RUN_BLOCKS + 3)))
    first_of_second_run = 16 * RUN_BLOCKS
    changed = [*whole[:first_of_second_run], 7, *whole[first_of_second_run + 1 :]]
    remembering = BlockHasher(KEY, ROOT, 16)
    for tokens, salt in ((whole, b""), (whole, b"tenant"), (changed, b""), (whole[:-1], b""), (whole, b"")):
        expected: list[bytes] = []
        for block in range(len(tokens) // 16):
            parent = expected[-1] if expected else None
            expected += hashes(tokens[16 * block : 16 * (block + 1)], salt, parent)
        assert remembering.hashes(pack_ids(tokens), salt) == expected


def test_runs_are_told_apart_by_what_stands_before_them() -> None:
    run = TOKENS[:16] * RUN_BLOCKS
    each = hashes(run * 3)
    assert len(set(each)) == 3 * RUN_BLOCKS
    assert hashes(run, parent=each[RUN_BLOCKS - 1]) == each[RUN_BLOCKS : 2 * RUN_BLOCKS]


def test_bytes_and_views_of_them_are_hashed_alike() -> None:
    packed = pack_ids([0, *TOKENS, 0])
    assert HASHER.hashes(memoryview(packed)[4:-4]) == hashes(TOKENS)


def test_one_token_up_31_and_the_next_down_1_changes_the_hash() -> None:
    original = hashes(TOKENS[:16])
    for j in range(15):
        changed = TOKENS[:16]
        changed[j] += 31
        changed[j + 1] -= 1
        assert hashes(changed) != original


def test_the_same_tokens_under_another_parent_have_another_hash() -> None:
    again = TOKENS[:16]
    assert len({*hashes(again + again), *hashes(TOKENS[16:] + again)}) == 4


def test_salts_separate_tenants_in_every_block_and_equal_salts_share() -> None:
    salts = [b"", b"alice", b"bob", b"\0"]
    assert len({each for salt in salts for each in hashes(TOKENS, salt)}) == 2 * len(salts)
    assert hashes(TOKENS, b"alice") == hashes(TOKENS, b"alice")


def test_a_salt_can_not_pose_as_tokens_or_as_a_parent() -> None:
    block = pack_ids(TOKENS[:16])
    assert HASHER.hashes(block, salt=ROOT) != HASHER.hashes(block, parent=ROOT)
    assert HASHER.hashes(block, salt=block) != [HASHER.hashes(block * 2)[1]]


def test_fields_of_different_type_or_border_are_encoded_differently() -> None:
    fields: list[tuple[float | str | bytes, ...]] = [
        (1,), (True,), (1.0,), ("1",), (b"1",), (-1,), (-2,), (0,), (False,), (0.0,), (-0.0,), ("",), (b"",),
        (), ("ab",), ("a", "b"), ("", "ab"), ("ab", ""), (b"a", "b"), (1, 11), (11, 1), (1, "1"),
    ]  # fmt: skip
    for one, other in combinations(fields, 2):
        assert encode_fields(*one) != encode_fields(*other), (one, other)


FIELDS = st.lists(st.integers() | st.booleans() | st.floats(allow_nan=False) | st.text() | st.binary(), max_size=4)


@given(FIELDS, FIELDS)
def test_only_equal_fields_are_encoded_equally(
    one: list[float | str | bytes], other: list[float | str | bytes]
) -> None:
    is_same = [(type(field), repr(field)) for field in one] == [(type(field), repr(field)) for field in other]
    assert (encode_fields(*one) == encode_fields(*other)) == is_same


def test_every_property_of_model_and_layout_changes_the_root() -> None:
    layouts = [
        LAYOUT,
        replace(LAYOUT, num_layers=3),
        replace(LAYOUT, num_kv_heads=3),
        replace(LAYOUT, head_dim=16),
        replace(LAYOUT, block_size=32),
        replace(LAYOUT, dtype="bfloat16"),
        replace(LAYOUT, dtype="float16"),
    ]
    roots = {model_root(KEY, "tiny@1", layout) for layout in layouts}
    roots |= {model_root(KEY, "tiny@2", LAYOUT), model_root(b"other", "tiny@1", LAYOUT)}
    roots |= {model_root(KEY, "tiny@1", LAYOUT, weights) for weights in ("a", "b")}
    assert len(roots) == len(layouts) + 4
    assert {len(root) for root in roots} == {16}


def test_another_root_or_cluster_key_changes_every_hash() -> None:
    other_root = BlockHasher(KEY, model_root(KEY, "tiny@2", LAYOUT), 16)
    other_key = BlockHasher(b"other", ROOT, 16)
    packed = pack_ids(TOKENS)
    assert len({*hashes(TOKENS), *other_root.hashes(packed), *other_key.hashes(packed)}) == 6


@pytest.mark.parametrize("key", [b"", b"k", b"k" * 64, b"k" * 65, b"k" * 1000])
def test_keys_of_any_length_work_and_long_ones_count_to_the_last_byte(key: bytes) -> None:
    packed = pack_ids(TOKENS)
    assert BlockHasher(key, ROOT, 16).hashes(packed) != BlockHasher(key + b"x", ROOT, 16).hashes(packed)


def test_two_processes_with_different_hash_seeds_agree(tmp_path: Path) -> None:
    script = (
        "from crossdock.core.block_hash import BlockHasher, model_root\n"
        "from crossdock.core.kv_layout import KvLayout\n"
        "from crossdock.core.request import pack_ids\n"
        f"root = model_root({KEY!r}, 'tiny@1', {LAYOUT!r})\n"
        f"print([h.hex() for h in BlockHasher({KEY!r}, root, 16).hashes(pack_ids({TOKENS!r}), b'tenant')])\n"
    )
    seen = {hashes_of_process(script, seed, tmp_path) for seed in ("1", "2")}
    assert seen == {str([each.hex() for each in hashes(TOKENS, b"tenant")])}


def hashes_of_process(script: str, seed: str, folder: Path) -> str:
    environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", script]
    ran = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    return ran.stdout.strip()
