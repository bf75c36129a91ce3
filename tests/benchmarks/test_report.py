"""What a run of known latencies is summed up to."""

import math

import orjson

from crossdock.benchmarks.report import Latency, Outcome, Targets, as_json, as_table, percentile, summarise

FAST = Outcome(prompt_tokens=10, output_tokens=5, ttft_seconds=0.1, e2e_seconds=0.5, gaps_seconds=(0.1,) * 4)
SLOW = Outcome(prompt_tokens=10, cached_tokens=8, output_tokens=3, ttft_seconds=0.3, e2e_seconds=0.7)
FAILED = Outcome(error="HTTP 503: full")


def test_time_per_output_token_leaves_out_the_first() -> None:
    assert SLOW.tpot_seconds == (0.7 - 0.3) / 2


def test_a_single_token_has_no_time_per_output_token_and_meets_every_target_for_it() -> None:
    single = Outcome(output_tokens=1, ttft_seconds=0.1, e2e_seconds=0.1)
    assert math.isnan(single.tpot_seconds)
    assert Targets(ttft_seconds=0.1, tpot_seconds=0.0).are_met_by(single)


def test_percentiles_lie_between_the_nearest_ranks() -> None:
    assert percentile([0.0, 1.0, 2.0, 3.0, 4.0], 0.9) == 3.6
    assert Latency.of([3.0, 1.0, math.nan, 2.0]) == Latency(mean=2.0, p50=2.0, p90=2.8, p99=2.98)


def test_of_nothing_measured_nothing_is_claimed() -> None:
    assert all(map(math.isnan, (Latency.of([]).mean, Latency.of([math.nan]).p99)))


def test_failed_requests_count_as_misses_and_bring_no_tokens() -> None:
    report = summarise([FAST, SLOW, FAILED, FAILED], 2.0, Targets(), num_gpus=1)
    assert (report.num_requests, report.num_failed, report.errors) == (4, 2, {"HTTP 503: full": 2})
    assert (report.prompt_tokens, report.cached_tokens, report.output_tokens) == (20, 8, 8)
    assert (report.requests_per_second, report.output_tokens_per_second) == (1.0, 4.0)
    assert report.goodput.attainment == 0.5


def test_goodput_is_the_rate_a_gpu_of_requests_that_meet_both_targets() -> None:
    outcomes = [FAST] * 9 + [SLOW]
    report = summarise(outcomes, 3.0, Targets(ttft_seconds=0.2, tpot_seconds=1.0), num_gpus=2)
    assert (report.goodput.attainment, report.goodput.per_gpu) == (0.9, 1.5)


def test_goodput_is_nothing_below_ninety_percent_attainment() -> None:
    outcomes = [FAST] * 8 + [SLOW] * 2
    report = summarise(outcomes, 1.0, Targets(ttft_seconds=1.0, tpot_seconds=0.15), num_gpus=1)
    assert (report.goodput.attainment, report.goodput.per_gpu) == (0.8, 0.0)


def test_the_table_shows_milliseconds_rates_and_failures() -> None:
    assert as_table(summarise([FAST, FAILED], 2.0, Targets(ttft_seconds=0.2), num_gpus=1)) == (
        "requests  1 of 2 in 2.00 s\n"
        "          0.50 requests/s, 2.5 output tokens/s\n"
        "tokens    10 in, of them 0 cached; 5 out\n"
        "ms              mean       p50       p90       p99\n"
        "TTFT           100.0     100.0     100.0     100.0\n"
        "TPOT           100.0     100.0     100.0     100.0\n"
        "ITL            100.0     100.0     100.0     100.0\n"
        "E2E            500.0     500.0     500.0     500.0\n"
        "goodput   0.00 requests/s a GPU; 50.0% met TTFT <= 200 ms and TPOT <= inf ms, 90% must\n"
        "failed    1 x HTTP 503: full"
    )


def test_the_table_of_a_run_that_failed_whole_shows_no_numbers() -> None:
    lines = as_table(summarise([FAILED], 1.0, Targets(), num_gpus=1)).splitlines()
    assert lines[4] == "TTFT               -         -         -         -"
    assert lines[8] == "goodput   no targets given"


def test_json_has_every_field_and_null_for_what_was_not_measured() -> None:
    report = orjson.loads(as_json(summarise([FAILED], 1.0, Targets(), num_gpus=1)))
    assert report["num_failed"] == 1
    assert report["ttft"] == {"mean": None, "p50": None, "p90": None, "p99": None}
    assert report["goodput"]["targets"] == {"ttft_seconds": None, "tpot_seconds": None}
