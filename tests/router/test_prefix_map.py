"""Which worker holds which block, from numbered events and snapshots."""

from hypothesis import given
from hypothesis import strategies as st

from crossdock.core.block_hash import BlockHasher, model_root
from crossdock.core.kv_layout import KvLayout
from crossdock.core.messages import CacheEvents, CacheSnapshot, Incarnation
from crossdock.core.request import pack_ids
from crossdock.router.prefix_map import PrefixMap

A, B = Incarnation("a"), Incarnation("b")
H = [bytes([n]) * 16 for n in range(8)]


def test_the_longest_held_prefix_counts_for_each_worker() -> None:
    prefixes = PrefixMap()
    prefixes.add(A, now=0)
    prefixes.add(B, now=0)
    assert not prefixes.apply(A, CacheEvents(number=1, stored=[H[0], H[1], H[3]]), now=0)
    assert not prefixes.apply(B, CacheEvents(number=1, stored=[H[1]]), now=0)
    assert prefixes.num_cached(H[:4]) == {A: 2, B: 0}
    assert prefixes.num_cached(H[:1]) == {A: 1, B: 0}
    assert prefixes.num_cached([]) == {A: 0, B: 0}


def test_evicted_blocks_are_forgotten() -> None:
    prefixes = PrefixMap()
    prefixes.add(A, now=0)
    prefixes.apply(A, CacheEvents(number=1, stored=H[:3]), now=0)
    prefixes.apply(A, CacheEvents(number=2, stored=[H[5]], evicted=[H[1]]), now=0)
    assert prefixes.num_cached(H[:3]) == {A: 1}
    assert prefixes.num_hashes(A) == 3


def test_repeated_and_older_events_change_nothing() -> None:
    prefixes = PrefixMap()
    prefixes.add(A, now=0)
    prefixes.apply(A, CacheEvents(number=1, stored=[H[0]]), now=0)
    prefixes.apply(A, CacheEvents(number=2, evicted=[H[0]]), now=0)
    assert not prefixes.apply(A, CacheEvents(number=1, stored=[H[0]]), now=0)
    assert prefixes.num_cached(H[:1]) == {A: 0}


def test_a_gap_asks_for_a_snapshot_once_a_second_until_it_comes() -> None:
    prefixes = PrefixMap()
    prefixes.add(A, now=0)
    prefixes.replace(A, CacheSnapshot(number=1, hashes=[H[0]]))
    assert prefixes.apply(A, CacheEvents(number=3, stored=[H[1]]), now=10.0)
    assert not prefixes.apply(A, CacheEvents(number=4, stored=[H[2]]), now=10.5)
    assert prefixes.apply(A, CacheEvents(number=5, stored=[H[3]]), now=11.0)
    assert prefixes.num_hashes(A) == 1
    prefixes.replace(A, CacheSnapshot(number=5, hashes=H[:4]))
    assert not prefixes.apply(A, CacheEvents(number=6, stored=[H[4]]), now=11.1)
    assert prefixes.num_cached(H) == {A: 5}


def test_a_worker_that_was_here_before_the_router_is_asked_only_once_at_first() -> None:
    prefixes = PrefixMap()
    prefixes.add(A, now=0)  # the caller has sent a SnapshotRequest with it
    assert not prefixes.apply(A, CacheEvents(number=90, stored=[H[1]]), now=0.1)


def test_a_snapshot_older_than_the_events_is_ignored() -> None:
    prefixes = PrefixMap()
    prefixes.add(A, now=0)
    prefixes.apply(A, CacheEvents(number=1, stored=[H[0]]), now=0)
    prefixes.apply(A, CacheEvents(number=2, stored=[H[1]]), now=0)
    prefixes.replace(A, CacheSnapshot(number=1, hashes=[H[0]]))
    assert prefixes.num_cached(H) == {A: 2}


def test_a_dead_worker_holds_nothing_and_its_late_messages_leave_nothing() -> None:
    prefixes = PrefixMap()
    prefixes.add(A, now=0)
    prefixes.apply(A, CacheEvents(number=1, stored=H), now=0)
    prefixes.drop(A)
    prefixes.drop(A)
    assert not prefixes.apply(A, CacheEvents(number=2, stored=H), now=0)
    prefixes.replace(A, CacheSnapshot(number=3, hashes=H))
    assert prefixes.num_cached(H) == {}
    assert prefixes.num_hashes(A) == 0


def test_hashes_computed_here_find_those_computed_by_a_worker() -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")
    worker_side, router_side = (BlockHasher(b"key", model_root(b"key", "m", layout), 4) for _ in range(2))
    prefixes = PrefixMap()
    prefixes.add(A, now=0)
    prefixes.apply(A, CacheEvents(number=1, stored=worker_side.hashes(pack_ids(list(range(12))))), now=0)
    wanted = router_side.hashes(pack_ids([*range(8), 99, 99, 99, 99, 5]))
    assert prefixes.num_cached(wanted) == {A: 2}


@given(st.lists(st.tuples(st.sets(st.integers(0, 7)), st.sets(st.integers(0, 7)), st.booleans()), max_size=30))
def test_lost_events_never_leave_a_wrong_picture_once_the_snapshot_has_come(
    changes: list[tuple[set[int], set[int], bool]],
) -> None:
    prefixes, truth = PrefixMap(), set[bytes]()
    prefixes.add(A, now=0)
    for number, (stored, evicted, is_lost) in enumerate(changes, 1):
        gone = {H[n] for n in evicted} & truth
        new = {H[n] for n in stored} - truth
        truth = truth - gone | new
        if is_lost:
            continue
        now = 2.0 * number
        if prefixes.apply(A, CacheEvents(number=number, stored=list(new), evicted=list(gone)), now):
            prefixes.replace(A, CacheSnapshot(number=number, hashes=list(truth)))
        assert prefixes.num_hashes(A) == len(truth)
        assert prefixes.num_cached(sorted(truth)) == {A: len(truth)}
