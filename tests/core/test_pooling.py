"""A prompt's vector from the sums of its chunks."""

from array import array

import pytest

from crossdock.core.pooling import PooledSum
from crossdock.core.request import Pooling, Request, RequestId, SamplingParams, pack_ids


def vector_of(pooling: Pooling, num_tokens: int, shares: list[list[float]]) -> list[float]:
    params = SamplingParams(max_tokens=0, seed=0)
    prompt = pack_ids([7] * num_tokens)
    pooled = PooledSum(Request(request_id=RequestId("r"), prompt=prompt, params=params, pooling=pooling))
    for share in shares:
        pooled.add(array("d", share).tobytes())
    return array("f", pooled.vector()).tolist()


@pytest.mark.parametrize("shares", [[[6.0, 3.0]], [[1.0, 2.0], [5.0, 1.0]], [[5.0, 1.0], [0.5, 1.0], [0.5, 1.0]]])
def test_a_mean_is_the_same_however_the_prompt_was_cut(shares: list[list[float]]) -> None:
    assert vector_of(Pooling.MEAN, 4, shares) == [1.5, 0.75]


def test_of_the_last_position_nothing_is_divided() -> None:
    assert vector_of(Pooling.LAST, 4, [[6.0, 3.0]]) == [6.0, 3.0]
