"""Buffers of a ring: made late, lent in turn."""

import numpy as np

from crossdock.core.kv_layout import KvLayout
from crossdock.kvtransfer.pool_bytes import PoolBytes
from crossdock.kvtransfer.staging_ring import StagingRing

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4, dtype="float32")


class CountingPool(PoolBytes):
    num_made = 0

    def staging(self) -> np.ndarray:
        self.num_made += 1
        return super().staging()


def test_buffers_are_made_when_they_are_wanted_and_the_one_free_for_longest_is_next() -> None:
    pool = CountingPool(memoryview(bytearray(LAYOUT.block_bytes)), 1, LAYOUT, 1, staging_bytes=64, num_staging=2)
    ring = StagingRing(pool)
    assert (pool.num_made, ring.num_free) == (0, 2)
    first = ring.take()
    ring.give_back(first)
    second = ring.take()
    assert (pool.num_made, ring.num_free, second is first) == (2, 1, False)
    ring.give_back(second)
    assert [ring.take() is first, ring.take() is second, ring.num_free, pool.num_made] == [True, True, 0, 2]
    assert len(second) == LAYOUT.block_bytes == pool.staging_bytes, "a block always fits"
