"""What an offer costs the loop: it brings the hashes, and is not tried again where nothing has changed."""

import pytest
from msgspec.structs import replace

from crossdock.core.sequence import Sequence

from ..parts import name_of, request, tables_of
from .test_arrivals import Bench, offer_of, rejected, reservation


def test_a_waiting_offer_is_tried_again_only_when_something_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, tried = Bench(4), list[str]()
    bench.arrive(request("a", 40), [0, 1, 2])
    reuse = bench.tables.reuse

    def counted(sequence: Sequence, max_tokens: int) -> int:
        tried.append(name_of(sequence))
        return reuse(sequence, max_tokens)

    monkeypatch.setattr(bench.tables, "reuse", counted)
    bench.offer(request("b", 32, first_id=100))
    for _ in range(3):
        bench.arrivals.sweep(0.0)
    assert tried == ["b"]
    bench.num_held_back = 1
    bench.arrivals.sweep(0.0)
    assert tried == ["b", "b"]
    bench.num_held_back = 0
    bench.tables.release(bench.attached[0].sequence)
    bench.arrivals.sweep(0.0)
    assert (tried, len(bench.answers())) == (["b"] * 3, 1)


def test_hashes_of_another_prompt_are_refused_and_those_of_this_one_find_its_prefix() -> None:
    bench = Bench()
    bench.arrive(request("a", 40), [0, 1, 2])
    hashes = tables_of(1).prompt_hashes(Sequence.of(request("b", 40)))
    other = replace(offer_of(request("c", 40, first_id=7)), block_hashes=hashes)
    assert bench.hear(other) == [rejected("c", "the block hashes are not those of the prompt")]
    right = replace(offer_of(request("b", 40)), block_hashes=hashes)
    assert bench.hear(right) == [reservation("b", [3], first_missing=2, lease_id=1)]
