"""The index of hashes, and the router's copy of it, which is built from events alone."""

import pytest

from crossdock.core.block_pool import BlockPool
from crossdock.core.messages import CacheEvents, CacheSnapshot
from crossdock.core.prefix_cache import PrefixCache


def cache_of(num_blocks: int) -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks)
    return pool, PrefixCache(pool, is_enabled=True)


def store(pool: BlockPool, cache: PrefixCache, *hashes: bytes) -> list[int]:
    """One sequence that computes these blocks and leaves."""
    blocks = pool.take(len(hashes))
    cache.publish(blocks, hashes)
    pool.give_back(blocks)
    return blocks


def test_the_longest_held_prefix_is_found() -> None:
    pool, cache = cache_of(4)
    store(pool, cache, b"a", b"ab", b"abc")
    assert cache.match([b"a", b"ab", b"abd"]) == [0, 1]
    assert cache.match([b"x", b"ab"]) == []
    assert cache.match([]) == []


def test_matching_takes_no_reference() -> None:
    pool, cache = cache_of(2)
    store(pool, cache, b"a")
    before = pool.books()
    cache.match([b"a"])
    assert pool.books() == before


def test_a_block_is_found_from_its_publication_on_and_not_before() -> None:
    pool, cache = cache_of(2)
    [block] = pool.take(1)
    assert cache.match([b"a"]) == []
    cache.publish([block], [b"a"])
    assert cache.match([b"a"]) == [block]
    cache.check()


def test_of_two_blocks_with_one_content_the_first_is_found_and_the_second_becomes_free() -> None:
    pool, cache = cache_of(3)
    first, second = pool.take(2)
    cache.publish([first], [b"a"])
    cache.publish([second], [b"a"])
    assert cache.match([b"a"]) == [first]
    pool.give_back([second])
    assert (pool.books().free, pool.books().leased) == (2, 1)
    cache.check()


def test_a_sequence_publishes_what_is_new_and_keeps_copies_of_what_is_held_for_itself() -> None:
    pool, cache = cache_of(6)
    store(pool, cache, b"a", b"ab")
    cache.take_events()
    blocks = pool.take(4)
    cache.publish(blocks, [b"a", b"ab", b"abc", b"abcd"])
    assert cache.match([b"a", b"ab", b"abc", b"abcd"]) == [0, 1, *blocks[2:]]
    assert [pool.hash_of(block) for block in blocks] == [None, None, b"abc", b"abcd"]
    assert cache.take_events() == CacheEvents(number=2, stored=[b"abc", b"abcd"], evicted=[])
    cache.check()


def test_of_many_blocks_the_router_hears_only_what_changed_on_balance() -> None:
    pool, cache = cache_of(3)
    store(pool, cache, b"a", b"b", b"c")
    cache.take_events()
    store(pool, cache, b"x", b"b", b"y")
    assert cache.take_events() == CacheEvents(number=2, stored=[b"x", b"y"], evicted=[b"c", b"a"])
    store(pool, cache, b"b", b"c", b"a")
    assert cache.take_events() == CacheEvents(number=3, stored=[b"c", b"a"], evicted=[b"y", b"x"])


def test_an_evicted_blocks_hash_is_gone_before_its_memory_is_reused() -> None:
    pool, cache = cache_of(2)
    store(pool, cache, b"a", b"ab")
    assert pool.take(1) == [1]
    assert cache.match([b"a", b"ab"]) == [0]
    cache.check()


def test_a_hole_in_a_chain_ends_the_match() -> None:
    pool, cache = cache_of(3)
    store(pool, cache, b"a", b"ab", b"abc")
    pool.share([2])
    assert pool.take(1) == [1]
    assert cache.match([b"a", b"ab", b"abc"]) == [0]


def test_events_tell_what_was_stored_and_what_was_evicted() -> None:
    pool, cache = cache_of(2)
    assert cache.take_events() is None
    store(pool, cache, b"a", b"ab")
    assert cache.take_events() == CacheEvents(number=1, stored=[b"a", b"ab"], evicted=[])
    assert cache.take_events() is None
    store(pool, cache, b"x")
    assert cache.take_events() == CacheEvents(number=2, stored=[b"x"], evicted=[b"ab"])


def test_what_came_and_went_between_two_events_is_not_told() -> None:
    pool, cache = cache_of(1)
    store(pool, cache, b"a")
    cache.take_events()
    store(pool, cache, b"b")
    store(pool, cache, b"a")
    assert cache.take_events() is None
    assert cache.match([b"a"]) == [0]


def test_a_snapshot_is_the_state_after_the_last_event_and_the_next_event_continues_it() -> None:
    pool, cache = cache_of(2)
    store(pool, cache, b"a", b"ab")
    cache.take_events()
    store(pool, cache, b"x")
    assert cache.snapshot() == CacheSnapshot(number=1, hashes=[b"a", b"ab"])
    assert cache.take_events() == CacheEvents(number=2, stored=[b"x"], evicted=[b"ab"])
    assert cache.snapshot() == CacheSnapshot(number=2, hashes=[b"a", b"x"])


def test_a_snapshot_of_an_untouched_cache_is_empty() -> None:
    assert cache_of(2)[1].snapshot() == CacheSnapshot(number=0, hashes=[])


def test_a_cache_that_is_off_holds_nothing() -> None:
    pool = BlockPool(2)
    cache = PrefixCache(pool, is_enabled=False)
    store(pool, cache, b"a", b"ab")
    assert cache.match([b"a"]) == []
    assert cache.take_events() is None
    assert pool.books().free == 2


def test_check_finds_a_hash_that_leads_elsewhere() -> None:
    pool, cache = cache_of(2)
    store(pool, cache, b"a")
    cache._blocks[b"a"] = 1
    with pytest.raises(AssertionError, match="disagree"):
        cache.check()
