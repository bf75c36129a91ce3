"""The vector of a prompt from what its chunks yield, each of them a sum over those of its positions that count.

A mean needs every position once, in chunks of any size; of the last position alone the sum is the position itself.
"""

from array import array
from math import isfinite
from operator import add

from .request import Pooling, Request


class PooledSum:
    """The sum so far; shares are float64, so that the result does not depend on how a prompt was cut."""

    def __init__(self, request: Request) -> None:
        self._num_positions = request.num_prompt_tokens if request.pooling is Pooling.MEAN else 1
        self._sum = array("d")

    def add(self, share: bytes) -> None:
        """``share  [hidden_size]`` float64 of one chunk; nothing where none of its positions counts."""
        values = array("d", share)
        self._sum = array("d", map(add, self._sum, values)) if self._sum else values

    @property
    def is_sound(self) -> bool:
        """Whether all of it are numbers."""
        return all(map(isfinite, self._sum))

    def vector(self) -> bytes:
        """``[hidden_size]`` as little-endian float32, once all shares are there."""
        return array("f", [value / self._num_positions for value in self._sum]).tobytes()
