"""Staging buffers of a transport, lent in turn, so that whatever a first use of one sets up is soon set up for all."""

from collections import deque

from ..core.part import Payload
from .pool_bytes import PoolMemory


class StagingRing:
    """``num_staging`` of the pool. They are made when they are first wanted: many workers never stage."""

    def __init__(self, pool: PoolMemory) -> None:
        self._pool = pool
        self._num_unmade = pool.num_staging
        self._free: deque[Payload] = deque()

    @property
    def num_free(self) -> int:
        return self._num_unmade + len(self._free)

    def take(self) -> Payload:
        """The one that has been free for longest."""
        assert self.num_free > 0, "whoever takes a buffer has looked before"
        if not self._num_unmade:
            return self._free.popleft()
        self._num_unmade -= 1
        return self._pool.staging()

    def give_back(self, buffer: Payload) -> None:
        self._free.append(buffer)
