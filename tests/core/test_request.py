"""What a request says of itself, and the packed form of its prompt."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crossdock.core.request import Request, RequestId, SamplingParams, pack_ids, unpack_ids


def request_for(max_tokens: int | None) -> Request:
    return Request(request_id=RequestId("r"), prompt=pack_ids([5, 6, 7]), params=SamplingParams(max_tokens=max_tokens))


def test_ids_are_packed_as_little_endian_u32() -> None:
    assert pack_ids([1, 258, 0xFFFFFFFF]) == b"\1\0\0\0\2\1\0\0\xff\xff\xff\xff"


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_unpacking_undoes_packing(token_ids: list[int]) -> None:
    assert unpack_ids(pack_ids(token_ids)).tolist() == token_ids


@pytest.mark.parametrize("token_id", [-1, 2**32])
def test_what_is_no_u32_can_not_be_packed(token_id: int) -> None:
    with pytest.raises(OverflowError):
        pack_ids([token_id])


def test_a_cut_prompt_can_not_be_unpacked() -> None:
    with pytest.raises(ValueError, match="multiple"):
        unpack_ids(b"\0" * 7)


def test_prompt_and_output_bound_the_length() -> None:
    assert (request_for(4).num_prompt_tokens, request_for(4).max_total_tokens) == (3, 7)


def test_a_worker_never_sees_a_request_without_a_limit() -> None:
    with pytest.raises(AssertionError, match="the router resolves max_tokens"):
        _ = request_for(None).max_tokens


def test_a_temperature_next_to_zero_is_greedy() -> None:
    temperatures = (0.0, 0.00009, 0.0001, 1.0)
    assert [SamplingParams(temperature=each).is_greedy for each in temperatures] == [True, True, False, False]


def test_each_penalty_counts_as_one() -> None:
    assert not SamplingParams().has_penalties
    assert SamplingParams(presence_penalty=-0.5).has_penalties
    assert SamplingParams(frequency_penalty=0.5).has_penalties
    assert SamplingParams(repetition_penalty=1.1).has_penalties
