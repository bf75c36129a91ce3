"""What a load run found: latencies, throughput and goodput, as a table for people and JSON for machines.

TTFT is the time from a request's arrival to its first token, E2E to its last, ``TPOT = (E2E - TTFT) /
(output tokens - 1)``, ITL the gap between two chunks of a stream. Goodput is the rate, per GPU, of requests
that meet both the TTFT and the TPOT target, and counts only if at least 90 % of all requests do (DistServe,
OSDI 2024); a failed request is a miss.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import orjson

NEEDED_ATTAINMENT = 0.9


@dataclass(frozen=True, slots=True)
class Outcome:
    """One request as its client saw it; times are seconds since its arrival. ``error`` is empty if it went well."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_seconds: float = math.nan
    e2e_seconds: float = math.nan
    gaps_seconds: tuple[float, ...] = ()
    error: str = ""

    @property
    def tpot_seconds(self) -> float:
        """NaN for a request with a single token: it has no time per output token, and misses no target for it."""
        if self.output_tokens < 2:
            return math.nan
        return (self.e2e_seconds - self.ttft_seconds) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Targets:
    ttft_seconds: float = math.inf
    tpot_seconds: float = math.inf

    def are_met_by(self, outcome: Outcome) -> bool:
        is_slow = outcome.ttft_seconds > self.ttft_seconds or outcome.tpot_seconds > self.tpot_seconds
        return not outcome.error and not is_slow


@dataclass(frozen=True, slots=True)
class Latency:
    """Distribution of one latency, in seconds; NaN throughout if nothing was measured."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Iterable[float]) -> "Latency":
        ordered = sorted(value for value in seconds if not math.isnan(value))
        mean = math.fsum(ordered) / len(ordered) if ordered else math.nan
        return cls(mean, *(percentile(ordered, share) for share in (0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class Goodput:
    """``per_gpu`` is 0 if fewer than 90 % of the requests met the targets."""

    targets: Targets
    attainment: float
    per_gpu: float


@dataclass(frozen=True, slots=True)
class LoadReport:
    num_requests: int
    num_failed: int
    errors: dict[str, int]
    duration_seconds: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    requests_per_second: float
    output_tokens_per_second: float
    ttft: Latency
    tpot: Latency
    itl: Latency
    e2e: Latency
    goodput: Goodput


def percentile(ordered: Sequence[float], share: float) -> float:
    """Linear interpolation between the two nearest ranks; NaN of nothing."""
    if not ordered:
        return math.nan
    rank = share * (len(ordered) - 1)
    below = int(rank)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (rank - below)


def summarise(outcomes: Sequence[Outcome], duration_seconds: float, targets: Targets, num_gpus: int) -> LoadReport:
    """``duration_seconds`` runs from the first arrival to the last byte."""
    good = [outcome for outcome in outcomes if not outcome.error]
    num_met = sum(map(targets.are_met_by, outcomes))
    attainment = num_met / len(outcomes) if outcomes else math.nan
    per_gpu = num_met / duration_seconds / num_gpus if attainment >= NEEDED_ATTAINMENT else 0.0
    output_tokens = sum(outcome.output_tokens for outcome in good)
    return LoadReport(
        num_requests=len(outcomes),
        num_failed=len(outcomes) - len(good),
        errors=dict(Counter(outcome.error for outcome in outcomes if outcome.error).most_common()),
        duration_seconds=duration_seconds,
        prompt_tokens=sum(outcome.prompt_tokens for outcome in good),
        cached_tokens=sum(outcome.cached_tokens for outcome in good),
        output_tokens=output_tokens,
        requests_per_second=len(good) / duration_seconds,
        output_tokens_per_second=output_tokens / duration_seconds,
        ttft=Latency.of(outcome.ttft_seconds for outcome in good),
        tpot=Latency.of(outcome.tpot_seconds for outcome in good),
        itl=Latency.of(gap for outcome in good for gap in outcome.gaps_seconds),
        e2e=Latency.of(outcome.e2e_seconds for outcome in good),
        goodput=Goodput(targets, attainment, per_gpu),
    )


def as_json(report: LoadReport) -> bytes:
    """All fields under their names; what is NaN or infinite becomes null."""
    return orjson.dumps(report, option=orjson.OPT_INDENT_2 | orjson.OPT_APPEND_NEWLINE)


def as_table(report: LoadReport) -> str:
    done = report.num_requests - report.num_failed
    lines = [
        f"requests  {done} of {report.num_requests} in {report.duration_seconds:.2f} s",
        f"          {report.requests_per_second:.2f} requests/s, {report.output_tokens_per_second:.1f} output tokens/s",
        f"tokens    {report.prompt_tokens} in, of them {report.cached_tokens} cached; {report.output_tokens} out",
        f"{'ms':<10}{'mean':>10}{'p50':>10}{'p90':>10}{'p99':>10}",
        latency_row("TTFT", report.ttft),
        latency_row("TPOT", report.tpot),
        latency_row("ITL", report.itl),
        latency_row("E2E", report.e2e),
        goodput_row(report.goodput),
    ]
    lines += [f"failed    {count} x {error}" for error, count in report.errors.items()]
    return "\n".join(lines)


def latency_row(name: str, latency: Latency) -> str:
    values = (latency.mean, latency.p50, latency.p90, latency.p99)
    return f"{name:<10}" + "".join(f"{'-' if math.isnan(value) else f'{value * 1000:.1f}':>10}" for value in values)


def goodput_row(goodput: Goodput) -> str:
    targets = goodput.targets
    if targets == Targets():
        return "goodput   no targets given"
    return (
        f"goodput   {goodput.per_gpu:.2f} requests/s a GPU; {goodput.attainment:.1%} met TTFT <= "
        f"{targets.ttft_seconds * 1000:g} ms and TPOT <= {targets.tpot_seconds * 1000:g} ms, "
        f"{NEEDED_ATTAINMENT:.0%} must"
    )
