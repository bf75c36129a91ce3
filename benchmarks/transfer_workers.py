"""What transfers cost those who compute: two real workers, their engines busy, told what to do by a played router.

For every work (so many prompts of so many random tokens at once) the same prompts' sizes are run two ways, in turn:

* **alone**: a single token is wanted, so that nothing is shipped;
* **shipping**: three tokens are wanted, so that the KV goes to the decode worker, which makes the other two.

Times are seen by the router, in its own clock, where nothing else is said:

* TTFT is from sending a prompt to the coming of its first token.
* Exposed time is what the decode worker tells with a request's second token (`StageTimes.transfer_seconds`): from the
  moment at which the loop of the prefill worker had the first token to the moment at which the decode worker had the
  commit and all KV: durations on either side, without the way of the commit and what a loop takes to look.
* Exposed time as *seen* leaves nothing out: from the coming of the first token to that of the second, less what the
  decode worker tells of waiting for a step, less a step (from the second token to the third).
* Shares are over TTFT, request by request. Of all these the median is told.
* Speed of prefill is all prompt tokens over the time from the first prompt sent to the last first token.
* ITL are the gaps between tokens of a batch that the decode worker runs all the while, in steps ``quiet`` and ``busy``
  (with the shipping work going on, a new prompt for each that has ended). Both windows begin behind the same
  prompts, one right after the other, and have as many steps, and the batch with a guest is as large as a graph of the
  engine (32 rows), so that nothing but the arrivals differs.
"""

import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import numpy as np

from crossdock.benchmarks.played_router import PlayedRouter, Watched, fleet, random_prompt
from crossdock.benchmarks.report import percentile
from crossdock.benchmarks.transfer_shapes import BLOCK_SIZE, SHAPES, Work, write_model
from crossdock.core.messages import Role

MAX_SECONDS = 120.0
WARM_STEPS = 8
ROUND_TOKENS = {"cpu": 2048, "cuda": 65_536}
"""Short works are measured more often: up to so many tokens, within `MIN_ROUNDS` and `MAX_ROUNDS`."""
MIN_ROUNDS, MAX_ROUNDS = 3, 9
PAUSE_SECONDS = 0.05
"""Before each timed work: a GPU that was idle a moment ago may take more power, and computes faster for a while."""


@dataclass(frozen=True, slots=True)
class Load:
    """What the workers are made of, and what the decode worker does beside."""

    device: str
    shape: str
    transport: str
    max_tokens: int
    batch: int
    context: int
    num_steps: int

    @property
    def flags(self) -> list[str]:
        longest = self.max_tokens + self.batch * (self.context + self.num_steps + 2 * WARM_STEPS)
        common = [
            f"--device={self.device}",
            f"--transports={self.transport}",
            "--load-format=dummy",
            "--max-num-seqs=128",
        ]
        if self.device == "cpu":
            return [*common, f"--num-blocks={2 * longest // BLOCK_SIZE}", "--chunk-tokens=512", "--threads=1"]
        return [*common, "--chunk-tokens=8192"]


@dataclass(frozen=True, slots=True)
class Gaps:
    """Inter-token latency of the batch, in ms. The mean stays where a token is late once, and the next one is not."""

    p50: float
    p99: float
    mean: float


@dataclass(frozen=True, slots=True)
class WorkerRow:
    """Rates in prompt tokens a second; ITL is ``None`` where it was not measured."""

    transport: str
    num_tokens: int
    num_at_once: int
    ttft_ms: float
    exposed_ms: float
    seen_ms: float
    exposed_share: float
    seen_share: float
    rate_alone: float
    rate_shipping: float
    quiet: Gaps | None
    busy: Gaps | None

    @property
    def slowed(self) -> float:
        """By how much of its speed prefill is slower while it ships."""
        return 1 - self.rate_shipping / self.rate_alone

    @property
    def itl_rise(self) -> float | None:
        """Of the 99th percentile."""
        return self.busy.p99 / self.quiet.p99 - 1 if self.quiet and self.busy else None


class Bench:
    """One pair of workers."""

    def __init__(self, router: PlayedRouter, load: Load, seed: int = 0) -> None:
        self._router = router
        self._load = load
        self._draw = np.random.default_rng(seed)
        self._prefill, self._decode = router.worker(Role.PREFILL), router.worker(Role.DECODE)
        vocab = SHAPES[load.shape]["vocab_size"]
        assert isinstance(vocab, int), "a shape has a vocabulary"
        self._vocab_size = vocab
        self._batch_prompts = [self._prompt(load.context) for _ in range(load.batch)]

    def warm_up(self, works: Sequence[Work]) -> None:
        """Both sides have run every kind of step once, and the prompts of the batch are in their prefix caches."""
        for num_tokens in sorted({work.num_tokens for work in works}):
            self._run(Work(num_tokens, 1), num_tokens=3)
        self._router.finish(self._start_batch(self._load.batch, WARM_STEPS), MAX_SECONDS)

    def row(self, work: Work) -> WorkerRow:
        alone, shipping, sent = [], [], []
        most = ROUND_TOKENS[self._load.device]
        for _ in range(min(MAX_ROUNDS, max(MIN_ROUNDS, most // work.total_tokens))):
            alone.append(self._rate(work, self._run(work, num_tokens=1)))
            requests = self._run(work, num_tokens=3)
            shipping.append(self._rate(work, requests))
            sent += requests
        quiet, busy = self._gaps(work) if self._load.num_steps else (None, None)
        return WorkerRow(
            self._load.transport,
            work.num_tokens,
            work.num_at_once,
            1e3 * median(request.first_token_seconds for request in sent),
            1e3 * median(request.transfer_seconds for request in sent),
            1e3 * median(map(_seen_seconds, sent)),
            median(request.transfer_seconds / request.first_token_seconds for request in sent),
            median(_seen_seconds(request) / request.first_token_seconds for request in sent),
            median(alone),
            median(shipping),
            quiet,
            busy,
        )

    def _run(self, work: Work, num_tokens: int) -> list[Watched]:
        time.sleep(PAUSE_SECONDS)
        requests = self._ship(work, num_tokens)
        self._router.finish(requests, MAX_SECONDS)
        return requests

    def _ship(self, work: Work, num_tokens: int) -> list[Watched]:
        prompts = [self._prompt(work.num_tokens) for _ in range(work.num_at_once)]
        return [self._router.submit(prompt, num_tokens, self._prefill, self._decode) for prompt in prompts]

    def _rate(self, work: Work, requests: Sequence[Watched]) -> float:
        begun, ended = requests[0].sent_at, max(request.came_at[0] for request in requests)
        return work.total_tokens / (ended - begun)

    def _gaps(self, work: Work) -> tuple[Gaps, Gaps]:
        """Quiet and busy; the batch leaves room in its graph for the guests, as long as they are few."""
        batch = max(1, self._load.batch - 6, self._load.batch + 1 - work.num_at_once)
        return self._window(batch, None), self._window(batch, work)

    def _window(self, batch: int, guests: Work | None) -> Gaps:
        running = self._start_batch(batch, 2 * WARM_STEPS + self._load.num_steps)
        self._router.run_until(lambda: all(len(r.token_ids) > WARM_STEPS for r in running), MAX_SECONDS)
        begun = [len(request.token_ids) for request in running]
        visiting: list[Watched] = []

        def is_over() -> bool:
            if guests is not None and not any(request.is_finished for request in running):
                visiting[:] = [request for request in visiting if not request.is_finished]
                visiting.extend(self._ship(Work(guests.num_tokens, guests.num_at_once - len(visiting)), num_tokens=2))
            return all(request.is_finished for request in running)

        self._router.run_until(is_over, MAX_SECONDS)
        self._router.finish(visiting, MAX_SECONDS)
        gaps = sorted(
            1e3 * (later - sooner)
            for request, first in zip(running, begun, strict=True)
            for sooner, later in pairwise(request.came_at[first : first + self._load.num_steps])
        )
        return Gaps(percentile(gaps, 0.5), percentile(gaps, 0.99), mean(gaps))

    def _start_batch(self, batch: int, num_steps: int) -> list[Watched]:
        prompts = self._batch_prompts[:batch]
        return [self._router.submit(prompt, num_steps, self._prefill, self._decode) for prompt in prompts]

    def _prompt(self, num_tokens: int) -> bytes:
        return random_prompt(self._draw, num_tokens, self._vocab_size)


def _seen_seconds(request: Watched) -> float:
    """Exposed time as seen by the router."""
    first, second, third = request.came_at
    return (second - first) - request.decode_queue_seconds - (third - second)


def measure_workers(load: Load, works: Sequence[Work]) -> Iterator[WorkerRow]:
    """A row a work. Raises `WorkersFailed`."""
    with tempfile.TemporaryDirectory() as folder:
        model = write_model(load.shape, Path(folder))
        with fleet(model, (Role.PREFILL, Role.DECODE), load.flags, Path(folder)) as router:
            bench = Bench(router, load)
            bench.warm_up(works)
            yield from (bench.row(work) for work in works)
