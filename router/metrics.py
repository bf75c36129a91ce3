"""What Prometheus reads at ``/metrics``.

The router's own counters and times carry the names that vLLM's dashboards know (``vllm:...``, with the label
``model_name``); what the workers report comes as ``crossdock:worker_...``, with the labels ``worker`` and
``role``, from their last heartbeats and is put together only when somebody asks.

The times of tokens are seen from the router, each once, whatever attempts a request takes. How long it queued, was
computed and travelled is what the workers measured and sent with their first token, as durations. In the order of a
request's life: ``crossdock:request_door_time_seconds`` here, then ``vllm:request_queue_time_seconds`` and
``vllm:request_prefill_time_seconds`` of the prefill worker, ``crossdock:request_transfer_time_seconds`` (what the
transfer adds after the last chunk), ``crossdock:request_decode_queue_time_seconds`` of the decode worker.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from ..core.messages import StageTimes, TokenDelta, WorkerLoad
from ..core.sequence import FinishReason
from .fleet import Fleet, Worker
from .history import History, Totals
from .ledger import Entry, Ledger
from .prefix_map import PrefixMap

_LONG = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0)
_SHORT = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_STAGE = (0.0005, *_SHORT)
_TOKENS = tuple(float(step * 10**power) for power in range(6) for step in (1, 2, 5))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0)
_BETWEEN_TOKENS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 10.0, 20.0)


class EndReason(StrEnum):
    """How a request ended, as the label ``finished_reason``."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"

    @classmethod
    def of(cls, finish: FinishReason | None) -> "EndReason":
        return cls.LENGTH if finish is FinishReason.LENGTH else cls.STOP


class Histogram:
    """Observed values by bucket. The router has one thread, and needs none of prometheus_client's locks a token."""

    def __init__(self, text: str, bounds: tuple[float, ...]) -> None:
        self.text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def cumulated(self) -> tuple[list[tuple[str, float]], float]:
        """The number of observations up to each bound, and the sum of all."""
        total, buckets = 0, []
        for bound, count in zip((*map(str, self._bounds), "+Inf"), self._counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets, self._sum


@dataclass(slots=True)
class Counts:
    """Since the start."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    retries: int = 0
    refusals: int = 0
    deaths: int = 0
    refused_workers: int = 0
    preemptions: int = 0
    ended: dict[EndReason, int] = field(default_factory=lambda: dict.fromkeys(EndReason, 0))


class RouterMetrics:
    """Everything counted while requests run; nothing of it is global."""

    def __init__(self, model_name: str) -> None:
        self.model_name = model_name
        self.counts = Counts()
        self.history = History(self._totals)
        self._first_token = Histogram("Arrival to first token", _SHORT)
        self._inter_token = Histogram("Token to token", _BETWEEN_TOKENS)
        self._per_token = Histogram("Mean time a token after the first", _BETWEEN_TOKENS)
        self._whole = Histogram("Arrival to last token", _LONG)
        self._door = Histogram("Arrival to the prefill worker's task: template and tokenizer", _STAGE)
        self._queue = Histogram("On the prefill worker, until its first step", _LONG)
        self._prefill = Histogram("First step to the computed prompt, on the prefill worker", _LONG)
        self._transfer = Histogram("Computed prompt to its whole KV on the decode worker", _STAGE)
        self._decode_queue = Histogram("On the decode worker, until its first step", _STAGE)
        self._inference = Histogram("First step to last token", _LONG)
        self._num_prompt = Histogram("Prompt tokens of finished requests", _TOKENS)
        self._num_computed = Histogram("Prompt tokens that had to be computed, of finished requests", _TOKENS)
        self._num_output = Histogram("Output tokens of finished requests", _TOKENS)
        self._max_tokens = Histogram("What requests allowed as output", _TOKENS)
        self._num_choices = Histogram("Choices of a prompt", _CHOICES)
        self._decode = Histogram("First to last token", _LONG)
        self._registry = CollectorRegistry()

    @property
    def histograms(self) -> dict[str, Histogram]:
        return {
            "vllm:time_to_first_token_seconds": self._first_token,
            "vllm:inter_token_latency_seconds": self._inter_token,
            "vllm:request_time_per_output_token_seconds": self._per_token,
            "vllm:e2e_request_latency_seconds": self._whole,
            "crossdock:request_door_time_seconds": self._door,
            "vllm:request_queue_time_seconds": self._queue,
            "vllm:request_prefill_time_seconds": self._prefill,
            "crossdock:request_transfer_time_seconds": self._transfer,
            "crossdock:request_decode_queue_time_seconds": self._decode_queue,
            "vllm:request_decode_time_seconds": self._decode,
            "vllm:request_inference_time_seconds": self._inference,
            "vllm:request_prompt_tokens": self._num_prompt,
            "vllm:request_prefill_kv_computed_tokens": self._num_computed,
            "vllm:request_generation_tokens": self._num_output,
            "vllm:request_params_max_tokens": self._max_tokens,
            "vllm:request_params_n": self._num_choices,
        }

    def placed(self, entries: Sequence[Entry], now: float) -> None:
        """The first attempt of all choices of a prompt is on its way."""
        self._num_choices.observe(len(entries))
        for entry in entries:
            self._door.observe(now - entry.opened_at)
            self._max_tokens.observe(entry.request.max_tokens)

    def token(self, entry: Entry, delta: TokenDelta, now: float) -> None:
        """A token is about to be emitted; the times of the entry are still those of the one before it."""
        if delta.times is not None:
            self._stages(entry, delta.times)
        if delta.index < entry.num_counted:  # an earlier attempt had come so far
            return
        entry.num_counted += 1
        if delta.index == 0:
            entry.cached_tokens = delta.cached_tokens
            if not entry.is_fork:
                self.counts.prompt_tokens += entry.request.num_prompt_tokens
                self.counts.cached_tokens += delta.cached_tokens
            self._first_token.observe(now - entry.opened_at)
            self.history.ttft.observe(now - entry.opened_at, now)
        else:
            self._inter_token.observe(now - entry.moved_at)
        self.counts.generation_tokens += delta.token_id is not None

    def _stages(self, entry: Entry, times: StageTimes) -> None:
        if times.prefill_seconds is not None:
            entry.prefill_seconds = times.prefill_seconds
            self._queue.observe(times.queue_seconds)
            self._prefill.observe(times.prefill_seconds)
            return
        self._decode_queue.observe(times.queue_seconds)
        if times.transfer_seconds is not None:
            self._transfer.observe(times.transfer_seconds)

    def preempted(self, before: WorkerLoad, load: WorkerLoad) -> None:
        """A worker's heartbeat follows its last one."""
        self.counts.preemptions += load.total_preemptions - before.total_preemptions

    def ended(self, entry: Entry, reason: EndReason, now: float) -> None:
        self.counts.ended[reason] += 1
        if reason in (EndReason.ABORT, EndReason.ERROR) or entry.first_token_at is None:
            return
        self._whole.observe(now - entry.opened_at)
        decode_seconds = now - entry.first_token_at
        self._decode.observe(decode_seconds)
        if entry.prefill_seconds is not None:
            self._inference.observe(entry.prefill_seconds + decode_seconds)
        self._num_prompt.observe(entry.request.num_prompt_tokens)
        self._num_computed.observe(entry.request.num_prompt_tokens - entry.cached_tokens)
        self._num_output.observe(len(entry.output_ids))
        if len(entry.output_ids) > 1:
            self._per_token.observe(decode_seconds / (len(entry.output_ids) - 1))
            self.history.tpot.observe(decode_seconds / (len(entry.output_ids) - 1), now)

    def sample(self, ledger: Ledger, now: float) -> None:
        """Once a second: a point of the history."""
        num_running = ledger.num_running
        self.history.sample(num_running, len(ledger) - num_running, now)

    def _totals(self) -> Totals:
        counts = self.counts
        num_ended = sum(counts.ended.values())
        return Totals(counts.prompt_tokens, counts.cached_tokens, counts.generation_tokens, num_ended)

    def watch(self, fleet: Fleet, ledger: Ledger, prefixes: PrefixMap, num_malformed: Callable[[], int]) -> None:
        """Export, at every scrape from now on, what these hold too; called once."""
        self._registry.register(_RouterScrape(self, fleet, ledger, num_malformed))
        self._registry.register(_WorkerScrape(fleet, prefixes))

    def render(self) -> bytes:
        """The text format 0.0.4 of Prometheus."""
        return generate_latest(self._registry)


_COUNTERS: dict[str, tuple[str, Callable[[Counts], int]]] = {
    "vllm:prompt_tokens": ("Prompt tokens of requests that got a first token", lambda counts: counts.prompt_tokens),
    "vllm:prompt_tokens_cached": ("Prompt tokens that no worker computed", lambda counts: counts.cached_tokens),
    "vllm:prefix_cache_queries": ("Prompt tokens looked up in prefix caches", lambda counts: counts.prompt_tokens),
    "vllm:prefix_cache_hits": ("Prompt tokens found in prefix caches", lambda counts: counts.cached_tokens),
    "vllm:generation_tokens": ("Output tokens", lambda counts: counts.generation_tokens),
    "vllm:num_preemptions": ("Requests that gave their blocks back", lambda counts: counts.preemptions),
    "crossdock:request_retries": ("Attempts after a request's first", lambda counts: counts.retries),
    "crossdock:requests_refused": ("Requests refused for want of capacity", lambda counts: counts.refusals),
    "crossdock:workers_refused": ("Workers that could not join", lambda counts: counts.refused_workers),
    "crossdock:worker_deaths": ("Workers that fell silent or were replaced", lambda counts: counts.deaths),
}


class _RouterScrape(Collector):
    def __init__(self, metrics: RouterMetrics, fleet: Fleet, ledger: Ledger, num_malformed: Callable[[], int]) -> None:
        self._metrics = metrics
        self._fleet = fleet
        self._ledger = ledger
        self._num_malformed = num_malformed
        self._label = (metrics.model_name,)

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        for name, (text, count_of) in _COUNTERS.items():
            counter = CounterMetricFamily(name, text, labels=("model_name",))
            counter.add_metric(self._label, count_of(self._metrics.counts))
            yield counter
        ended = CounterMetricFamily("vllm:request_success", "Ended requests", labels=("model_name", "finished_reason"))
        for reason, count in self._metrics.counts.ended.items():
            ended.add_metric((*self._label, reason.value), count)
        yield ended
        for name, histogram in self._metrics.histograms.items():
            family = HistogramMetricFamily(name, histogram.text, labels=("model_name",))
            family.add_metric(self._label, *histogram.cumulated())
            yield family

    def _gauges(self) -> Iterator[Metric]:
        num_running = self._ledger.num_running
        yield self._gauge("vllm:num_requests_running", "Requests that have their first token", num_running)
        num_waiting = len(self._ledger) - num_running
        yield self._gauge("vllm:num_requests_waiting", "Requests without a token yet", num_waiting)
        num_blocks = sum(worker.card.num_blocks for worker in self._fleet)
        num_used = sum(worker.load.books.leased + worker.load.books.quarantined for worker in self._fleet)
        share = num_used / max(1, num_blocks)
        yield self._gauge("vllm:kv_cache_usage_perc", "Share of all blocks in use, 0 to 1", share)
        text = "Malformed or misaddressed messages since the start"
        yield self._gauge("crossdock:messages_rejected", text, self._num_malformed())

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        gauge = GaugeMetricFamily(name, text, labels=("model_name",))
        gauge.add_metric(self._label, value)
        return gauge


_WORKER_GAUGES: dict[str, tuple[str, Callable[[Worker], float]]] = {
    "accepting": ("1 if it takes new requests", lambda worker: worker.load.is_accepting),
    "blocks_total": ("Size of its pool in blocks", lambda worker: worker.card.num_blocks),
    "requests_running": ("Sequences in its steps", lambda worker: worker.load.num_running),
    "requests_waiting": ("Requests in its queue", lambda worker: worker.load.num_waiting),
    "requests_arriving": ("Requests whose KV is on its way to it", lambda worker: worker.load.num_arriving),
    "requests_kept": ("Computed prompts that wait for a decode worker", lambda worker: worker.load.num_kept_for_decode),
    "prompt_tokens_queued": ("Prompt tokens to compute", lambda worker: worker.load.num_queued_prompt_tokens),
    "resident_bytes": ("Memory of its process", lambda worker: worker.load.resident_bytes),
    "links": ("Decode workers that it reaches", lambda worker: len(worker.reached)),
}

_WORKER_COUNTERS: dict[str, tuple[str, Callable[[WorkerLoad], int]]] = {
    "steps": ("Steps of its engine", lambda load: load.total_steps),
    "preemptions": ("Requests that gave their blocks back", lambda load: load.total_preemptions),
    "prompt_tokens": ("Prompt tokens of its requests", lambda load: load.total_prompt_tokens),
    "cached_tokens": ("Prompt tokens found in its prefix cache", lambda load: load.total_cached_tokens),
    "output_tokens": ("Tokens it sampled", lambda load: load.total_output_tokens),
    "transfers": ("Transfers it began", lambda load: load.total_transfers),
    "transfer_failures": ("Transfers that failed", lambda load: load.total_transfer_failures),
    "blocks_pushed": ("Blocks it sent", lambda load: load.total_blocks_pushed),
    "blocks_skipped": ("Blocks the receiver already had", lambda load: load.total_blocks_skipped),
    "bytes_pushed": ("Bytes of KV it sent", lambda load: load.total_bytes_pushed),
    "messages_rejected": ("Malformed or misaddressed messages", lambda load: load.total_messages_rejected),
}

_BOOKS = ("free", "cached", "leased", "quarantined")
_LABELS = ("worker", "role")


class _WorkerScrape(Collector):
    def __init__(self, fleet: Fleet, prefixes: PrefixMap) -> None:
        self._fleet = fleet
        self._prefixes = prefixes

    def collect(self) -> Iterator[Metric]:
        yield from self._blocks()
        yield from self._links()
        for name, (text, gauge_of) in _WORKER_GAUGES.items():
            gauge = GaugeMetricFamily(f"crossdock:worker_{name}", text, labels=_LABELS)
            for worker in self._fleet:
                gauge.add_metric(_labels(worker), gauge_of(worker))
            yield gauge
        for name, (text, total_of) in _WORKER_COUNTERS.items():
            counter = CounterMetricFamily(f"crossdock:worker_{name}", text, labels=_LABELS)
            for worker in self._fleet:
                counter.add_metric(_labels(worker), total_of(worker.load))
            yield counter

    def _blocks(self) -> Iterator[Metric]:
        blocks = GaugeMetricFamily("crossdock:worker_blocks", "Blocks by state", labels=(*_LABELS, "state"))
        hashes = GaugeMetricFamily("crossdock:worker_hashes_known", "Block hashes in the router's map", labels=_LABELS)
        for worker in self._fleet:
            for state in _BOOKS:
                blocks.add_metric((*_labels(worker), state), getattr(worker.load.books, state))
            hashes.add_metric(_labels(worker), self._prefixes.num_hashes(worker.incarnation))
        yield blocks
        yield hashes

    def _links(self) -> Iterator[Metric]:
        """Of each pair that has been probed; those without a transport have nothing but that."""
        labels = ("worker", "to", "transport")
        up = GaugeMetricFamily("crossdock:link_up", "1 if KV can travel from the worker to the other", labels=labels)
        rate = GaugeMetricFamily("crossdock:link_bytes_per_second", "Of its transport, when probed", labels=labels)
        latency = GaugeMetricFamily("crossdock:link_latency_seconds", "Of one block, when probed", labels=labels)
        for worker, to, link in self._fleet.links():
            ends = (worker.name, to.name, link.transport)
            up.add_metric(ends, not link.error)
            if not link.error:
                rate.add_metric(ends, link.bytes_per_second)
                latency.add_metric(ends, link.latency_seconds)
        yield from (up, rate, latency)


def _labels(worker: Worker) -> tuple[str, str]:
    return (worker.name, worker.card.role.value)
