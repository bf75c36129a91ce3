"""A block is free, cached, leased or quarantined; exact ids show which one comes next."""

import pytest

from crossdock.core.block_pool import BlockPool, OutOfBlocks
from crossdock.core.messages import PoolBooks


def books(free: int = 0, cached: int = 0, leased: int = 0, quarantined: int = 0) -> PoolBooks:
    return PoolBooks(free, cached, leased, quarantined)


def pool_with_cached(num_blocks: int, hashes: list[bytes]) -> BlockPool:
    """Blocks ``0 ..`` carry these hashes and are cached, as left by one sequence."""
    pool = BlockPool(num_blocks)
    blocks = pool.take(len(hashes))
    pool.set_hashes(blocks, hashes)
    pool.give_back(blocks)
    return pool


def test_a_fresh_pool_gives_its_lowest_blocks() -> None:
    pool = BlockPool(4)
    assert pool.take(3) == [0, 1, 2]
    assert pool.take(0) == []
    assert pool.books() == books(free=1, leased=3)
    assert pool.num_available == 1
    pool.check()


def test_asking_for_more_than_there_is_takes_nothing() -> None:
    pool = BlockPool(3)
    pool.take(1)
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 2 of 3 available"):
        pool.take(3)
    assert pool.books() == books(free=2, leased=1)
    assert pool.take(2) == [1, 2]


def test_blocks_without_a_hash_are_free_again_and_come_back_in_the_same_order() -> None:
    pool = BlockPool(4)
    pool.give_back(pool.take(3))
    assert pool.books() == books(free=4)
    assert pool.take(4) == [0, 1, 2, 3]


def test_blocks_with_a_hash_are_kept_as_long_as_free_ones_last() -> None:
    pool = pool_with_cached(4, [b"a", b"b"])
    assert pool.books() == books(free=2, cached=2)
    assert pool.take(2) == [2, 3]
    assert [pool.hash_of(block) for block in range(4)] == [b"a", b"b", None, None]
    pool.check()


def test_the_deepest_block_of_a_sequence_is_evicted_first() -> None:
    pool = pool_with_cached(3, [b"a", b"ab", b"abc"])
    assert pool.take(1) == [2]
    assert pool.take(1) == [1]
    assert pool.take(1) == [0]


def test_the_least_recently_used_sequence_is_evicted_first() -> None:
    pool = BlockPool(3)
    blocks = pool.take(3)
    pool.set_hashes(blocks, [b"a", b"b", b"c"])
    for block in (1, 2, 0):
        pool.give_back([block])
    pool.share([1])
    pool.give_back([1])
    assert [pool.take(1) for _ in range(3)] == [[2], [0], [1]]


def test_a_hash_is_gone_before_its_block_is_used_for_anything_else() -> None:
    pool = pool_with_cached(3, [b"a", b"b", b"c"])
    evicted: list[tuple[list[int], list[bytes], list[bytes | None]]] = []
    pool.on_evict = lambda blocks, hashes: evicted.append((blocks, hashes, [pool.hash_of(block) for block in blocks]))
    assert pool.take(2) == [1, 2]
    assert evicted == [([2, 1], [b"c", b"b"], [None, None])]
    pool.give_back([1])
    assert pool.books() == books(free=1, cached=1, leased=1)


def test_sharing_a_cached_block_saves_it_from_eviction() -> None:
    pool = pool_with_cached(2, [b"a", b"b"])
    pool.share([1])
    assert pool.books() == books(cached=1, leased=1)
    assert pool.take(1) == [0]
    with pytest.raises(OutOfBlocks):
        pool.take(1)
    assert pool.hash_of(1) == b"b"


def test_a_shared_block_stays_leased_until_its_last_user_is_gone() -> None:
    pool = BlockPool(2)
    [block] = pool.take(1)
    pool.share([block])
    pool.give_back([block])
    assert pool.books() == books(free=1, leased=1)
    pool.give_back([block])
    assert pool.books() == books(free=2)


def test_references_of_one_caller_to_one_block_add_up() -> None:
    pool = BlockPool(1)
    [block] = pool.take(1)
    pool.share([block])
    pool.give_back([block, block])
    assert pool.books() == books(free=1)


def test_quarantined_blocks_are_out_of_reach_until_the_writer_is_done() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    pool.quarantine(blocks[:2])
    assert pool.books() == books(free=1, leased=1, quarantined=2)
    assert pool.num_available == 1
    with pytest.raises(OutOfBlocks):
        pool.take(2)
    pool.check()
    pool.end_quarantine([0, 1])
    assert pool.books() == books(free=3, leased=1)
    assert pool.take(3) == [0, 1, 3]


def test_what_a_transfer_may_still_write_to_can_not_be_given_back_shared_or_released_twice() -> None:
    pool = BlockPool(1)
    blocks = pool.take(1)
    pool.quarantine(blocks)
    with pytest.raises(AssertionError, match="block 0 is given back but not leased"):
        pool.give_back(blocks)
    with pytest.raises(AssertionError, match="block 0 is neither cached nor leased"):
        pool.share([0])
    pool.end_quarantine(blocks)
    with pytest.raises(AssertionError, match="block 0 is not quarantined"):
        pool.end_quarantine(blocks)
    assert pool.books() == books(free=1)


def test_a_block_that_others_read_is_never_quarantined() -> None:
    pool = BlockPool(2)
    shared, published = pool.take(2)
    pool.share([shared])
    pool.set_hashes([published], [b"a"])
    with pytest.raises(AssertionError, match="block 0 is quarantined with other users"):
        pool.quarantine([shared])
    with pytest.raises(AssertionError, match="block 1 is published, so nobody may write to it"):
        pool.quarantine([published])


def test_a_free_block_is_nobodys() -> None:
    pool = BlockPool(1)
    with pytest.raises(AssertionError, match="given back but not leased"):
        pool.give_back([0])
    with pytest.raises(AssertionError, match="neither cached nor leased"):
        pool.share([0])
    with pytest.raises(AssertionError, match="nobody holds it"):
        pool.set_hashes([0], [b"a"])


def test_a_block_has_one_hash_until_it_is_evicted() -> None:
    pool = BlockPool(1)
    pool.set_hashes(pool.take(1), [b"a"])
    with pytest.raises(AssertionError, match="already carries a hash"):
        pool.set_hashes([0], [b"b"])


def test_check_finds_a_block_that_is_lost_or_in_two_states() -> None:
    lost, doubled, unhashed = BlockPool(2), BlockPool(2), pool_with_cached(2, [b"a"])
    lost._free.pop()
    doubled._quarantined.add(0)
    del unhashed._hashes[0]
    for pool in (lost, doubled, unhashed):
        with pytest.raises(AssertionError):
            pool.check()


def test_a_pool_without_blocks_gives_none() -> None:
    pool = BlockPool(0)
    pool.check()
    with pytest.raises(OutOfBlocks):
        pool.take(1)
