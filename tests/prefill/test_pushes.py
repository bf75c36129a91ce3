"""When KV is pushed: no sooner than it is worth a push, no sooner than the first tokens are told."""

from msgspec.structs import replace

from crossdock.core.messages import Peer, Push
from crossdock.core.request import TransferId

from ..parts import LAYOUT, NUM_GROUPS, Record, request
from .test_part import Bench, commit, reservation


class Headers(Record):
    """Keeps the headers of pushes."""

    def __init__(self) -> None:
        super().__init__()
        self.headers: list[Push] = []

    def push(self, to: Peer, header: Push, source_blocks: list[int]) -> None:
        self.headers.append(header)


class LatePushes(Record):
    """Takes pushes once two first tokens are told."""

    def push(self, to: Peer, header: Push, source_blocks: list[int]) -> None:
        assert len(self.deltas) == 2
        super().push(to, header, source_blocks)


def test_kv_that_is_too_little_for_a_push_waits_until_the_prompt_is_computed() -> None:
    bench = Bench(min_push_bytes=4 * LAYOUT.block_bytes)
    bench.task(request("a", 40))
    (chunk,) = bench.plan()
    bench.answer(reservation([7, 5, 6]))
    for group in range(NUM_GROUPS - 1):
        bench.part.layers_done([chunk], range(group, group + 1), 0.0)
    assert bench.outbox.pushed == []
    bench.finish([chunk])
    assert bench.outbox.pushed == [(group, [0, 1, 2], [7, 5, 6]) for group in range(NUM_GROUPS)]
    assert (bench.outbox.sent[-1], bench.part.num_bytes_pushed) == (commit(6), 3 * LAYOUT.block_bytes)


def test_layer_groups_that_are_told_of_together_travel_together() -> None:
    outbox = Headers()
    bench = Bench(outbox=outbox)
    bench.task(request("a", 40))
    (chunk,) = bench.plan()
    bench.answer(reservation([7, 5, 6]))
    bench.part.layers_done([chunk], range(NUM_GROUPS), 0.0)
    assert [(push.group, push.num_groups, push.blocks) for push in outbox.headers] == [(0, NUM_GROUPS, [7, 5, 6])]


def test_all_first_tokens_of_a_step_are_told_before_any_kv_is_pushed() -> None:
    bench = Bench(outbox=LatePushes())
    for name, first_id in (("a", 0), ("b", 100)):
        bench.task(request(name, 20, first_id=first_id))
    chunks = bench.plan()
    for name in ("a", "b"):
        bench.answer(replace(reservation([1, 2]), transfer_id=TransferId(f"t-{name}")))
    bench.finish(chunks)
    assert len(bench.outbox.pushed) == 2 * NUM_GROUPS
