"""The last minutes of the router's numbers, a point a second, for the status page's charts.

Bounded, and made of what is counted anyway: nothing happens a token. Percentiles and the hit rate are over a sliding
window, so that a line is drawn where requests are few.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from itertools import islice

NUM_POINTS = 600
WINDOW_SECONDS = 10.0
MAX_OBSERVATIONS = 2000
"""In one window; at a higher rate the newest of it stand for all."""


@dataclass(frozen=True, slots=True)
class Totals:
    """Since the start: prompt tokens, those of them that were cached, output tokens, and requests ended."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    requests: int = 0


@dataclass(frozen=True, slots=True)
class Point:
    """``at`` is on the clock of `History.sample`. Seconds and shares are ``None`` where the window saw no request."""

    at: float
    output_tokens_per_second: float
    prompt_tokens_per_second: float
    requests_per_second: float
    num_running: int
    num_waiting: int
    ttft_p50: float | None
    ttft_p95: float | None
    tpot_p50: float | None
    tpot_p95: float | None
    hit_rate: float | None


FIELDS = tuple(field.name for field in fields(Point))


class Window:
    """Observations of the last `WINDOW_SECONDS`."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, float]] = deque(maxlen=MAX_OBSERVATIONS)

    def observe(self, value: float, now: float) -> None:
        self._seen.append((now, value))

    def percentiles(self, now: float, *shares: float) -> list[float | None]:
        """The nearest observation to each share of them."""
        while self._seen and self._seen[0][0] <= now - WINDOW_SECONDS:
            self._seen.popleft()
        values = sorted(value for _, value in self._seen)
        return [values[round(share * (len(values) - 1))] if values else None for share in shares]


class History:
    """``totals`` reads the counters. Points are numbered from 0 on; the oldest are forgotten."""

    def __init__(self, totals: Callable[[], Totals]) -> None:
        self.ttft = Window()
        self.tpot = Window()
        self.num_points = 0
        self._totals = totals
        self._points: deque[Point] = deque(maxlen=NUM_POINTS)
        self._marks: deque[tuple[float, Totals]] = deque()

    def sample(self, num_running: int, num_waiting: int, now: float) -> None:
        """Once a second; the first call only begins."""
        totals = self._totals()
        self._marks.append((now, totals))
        if len(self._marks) == 1:
            return
        (before_at, before), (_, oldest) = self._marks[-2], self._marks[0]
        num_prompt = totals.prompt_tokens - oldest.prompt_tokens
        ttft_p50, ttft_p95 = self.ttft.percentiles(now, 0.5, 0.95)
        tpot_p50, tpot_p95 = self.tpot.percentiles(now, 0.5, 0.95)
        point = Point(
            now,
            (totals.output_tokens - before.output_tokens) / (now - before_at),
            (totals.prompt_tokens - before.prompt_tokens) / (now - before_at),
            (totals.requests - before.requests) / (now - before_at),
            num_running,
            num_waiting,
            ttft_p50,
            ttft_p95,
            tpot_p50,
            tpot_p95,
            (totals.cached_tokens - oldest.cached_tokens) / num_prompt if num_prompt else None,
        )
        self._points.append(point)
        self.num_points += 1
        while self._marks[0][0] <= now - WINDOW_SECONDS:
            self._marks.popleft()

    def since(self, number: int) -> Iterator[Point]:
        """The points with this number and higher that are still here, in order."""
        first = self.num_points - len(self._points)
        return islice(self._points, min(max(0, number - first), len(self._points)), None)
