"""Every field in which two workers must agree is named, with both values, when they do not."""

from dataclasses import fields, replace

import msgspec
import pytest

from crossdock.core.compatibility import MUST_BE_EQUAL, mismatch, protocol_mismatch
from crossdock.core.kv_layout import KvLayout
from crossdock.core.messages import PROTOCOL_VERSION, Role, TransportCard, WorkerCard

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=8, block_size=16, dtype="float32")
CARD = WorkerCard(
    role=Role.MIXED,
    model="llama-1",
    layout=LAYOUT,
    num_blocks=8,
    max_model_len=64,
    max_num_seqs=64,
    vocab_size=100,
    num_layer_groups=2,
    weights="a",
)
DIFFERENCES: dict[str, tuple[object, str]] = {
    "model": ("qwen3-2", "model differs: llama-1 here, qwen3-2 there"),
    "weights": ("b", "weights differs: a here, b there"),
    "num_layer_groups": (4, "num_layer_groups differs: 2 here, 4 there"),
    "layout.num_layers": (5, "layout.num_layers differs: 4 here, 5 there"),
    "layout.num_kv_heads": (1, "layout.num_kv_heads differs: 2 here, 1 there"),
    "layout.head_dim": (16, "layout.head_dim differs: 8 here, 16 there"),
    "layout.block_size": (32, "layout.block_size differs: 16 here, 32 there"),
    "layout.dtype": ("bfloat16", "layout.dtype differs: float32 here, bfloat16 there"),
}


def changed(name: str, value: object) -> WorkerCard:
    outer, _, inner = name.partition(".")
    if not inner:
        return msgspec.structs.replace(CARD, **{name: value})
    assert outer == "layout"
    return msgspec.structs.replace(CARD, layout=replace(LAYOUT, **{inner: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", DIFFERENCES)
def test_the_field_that_differs_is_named_with_both_values(name: str) -> None:
    value, message = DIFFERENCES[name]
    assert mismatch(CARD, changed(name, value)) == message


def test_every_field_of_the_layout_counts_and_each_is_tried_here() -> None:
    assert {name for name in MUST_BE_EQUAL if name.startswith("layout.")} == {
        f"layout.{field.name}" for field in fields(KvLayout)
    }
    assert set(DIFFERENCES) == set(MUST_BE_EQUAL)


def test_all_differences_are_told_at_once_and_sides_may_have_names() -> None:
    other = msgspec.structs.replace(changed("layout.block_size", 32), weights="b")
    assert mismatch(CARD, other, ("in the fleet", "at the worker")) == (
        "weights differs: a in the fleet, b at the worker; layout.block_size differs: 16 in the fleet, 32 at the worker"
    )


def test_workers_may_differ_in_what_is_their_own() -> None:
    own: dict[str, object] = {"role": Role.DECODE, "num_blocks": 9, "max_model_len": 8, "max_num_seqs": 1}
    assert mismatch(CARD, msgspec.structs.replace(CARD, **own, transports=(TransportCard("tcp", "x"),))) == ""


def test_another_version_of_the_protocol_is_named() -> None:
    assert protocol_mismatch(999) == f"protocol version differs: {PROTOCOL_VERSION} here, 999 there"
