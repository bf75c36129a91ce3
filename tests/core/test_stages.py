"""How long a request was in each stage of its life on a worker."""

import msgspec

from crossdock.core.request import Request, RequestId, SamplingParams
from crossdock.core.stages import Stage, StageName, Timeline

TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
REQUEST = Request(request_id=RequestId("a"), prompt=b"1234", params=SamplingParams(), trace=TRACE)


def timeline(request: Request) -> Timeline:
    made = Timeline(request, StageName.PREFILL_QUEUE, 10.0)
    made.enter(StageName.PREFILL, 11.0)
    made.count(prompt_tokens=40, cached_tokens=16)
    return made


def test_stages_follow_each_other_without_a_gap_and_the_last_says_what_ended_it() -> None:
    stages = timeline(REQUEST).ended(13.5, "aborted by the client")
    counts = {"prompt_tokens": 40, "cached_tokens": 16}
    assert stages == [
        Stage(StageName.PREFILL_QUEUE, TRACE, RequestId("a"), 10.0, 11.0, {}),
        Stage(StageName.PREFILL, TRACE, RequestId("a"), 11.0, 13.5, counts, "aborted by the client"),
    ]


def test_the_current_stage_lasts_until_now() -> None:
    made = timeline(REQUEST)
    assert (made.seconds(StageName.PREFILL_QUEUE, 12.0), made.seconds(StageName.PREFILL, 12.0)) == (1.0, 1.0)
    made.enter(StageName.TRANSFER, 12.5)
    assert (made.seconds(StageName.PREFILL, 99.0), made.seconds(StageName.TRANSFER, 13.0)) == (1.5, 0.5)


def test_a_request_that_is_not_traced_tells_nothing() -> None:
    assert timeline(msgspec.structs.replace(REQUEST, trace="")).ended(13.5) == []
