"""The numbers that dashboards read."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from crossdock.core.kv_layout import KvLayout
from crossdock.core.messages import (
    CacheEvents,
    Incarnation,
    Link,
    Peer,
    PoolBooks,
    PromptLogprobs,
    Role,
    StageTimes,
    TokenDelta,
    WorkerCard,
    WorkerLoad,
)
from crossdock.core.request import Request, RequestId, SamplingParams, pack_ids
from crossdock.core.sequence import FinishReason
from crossdock.router.fleet import Fleet, Pair, Worker
from crossdock.router.ledger import Entry, Failure, Ledger
from crossdock.router.metrics import EndReason, RouterMetrics
from crossdock.router.prefix_map import PrefixMap

LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
P, D = Peer("tcp://p:1", Incarnation("p")), Peer("tcp://d:2", Incarnation("d"))


class Nowhere:
    def emit(self, entry: Entry, delta: TokenDelta) -> None: ...
    def emit_prompt(self, entry: Entry, part: PromptLogprobs) -> None: ...
    def restart(self, entry: Entry) -> None: ...
    def fail(self, entry: Entry, failure: Failure) -> None: ...


class Exported:
    """A router's numbers, with the objects they come from."""

    def __init__(self) -> None:
        self.metrics = RouterMetrics("toy")
        self.fleet, self.ledger, self.prefixes = Fleet(3.0), Ledger(), PrefixMap()
        self.metrics.watch(self.fleet, self.ledger, self.prefixes, lambda: 7)

    def join(self, peer: Peer, role: Role) -> Worker:
        card = WorkerCard(
            role=role,
            model="m",
            layout=LAYOUT,
            num_blocks=10,
            max_model_len=99,
            max_num_seqs=64,
            vocab_size=9,
            num_layer_groups=1,
        )
        self.fleet.join(peer, card, now=0)
        self.prefixes.add(peer.incarnation, now=0)
        worker = self.fleet.find(peer)
        assert worker is not None
        return worker

    def samples(self) -> dict[tuple[str, ...], float]:
        """Values by name and labels (in the order of their names, without ``model_name``)."""
        families = text_string_to_metric_families(self.metrics.render().decode())
        samples = [sample for family in families for sample in family.samples]
        return {(sample.name, *values_of(sample.labels)): sample.value for sample in samples}


def values_of(labels: dict[str, str]) -> list[str]:
    return [value for label, value in sorted(labels.items()) if label != "model_name"]


def entry(opened_at: float = 0.0) -> Entry:
    params = SamplingParams(max_tokens=5, seed=0)
    request = Request(request_id=RequestId("r"), prompt=pack_ids([1] * 40), params=params)
    return Entry(request, 0, Nowhere(), opened_at)


def play(
    exported: Exported, open_entry: Entry, times: list[float], cached_tokens: int = 0, *stages: StageTimes
) -> None:
    """Emit a token at each time, as the dispatcher does; the first of them bring ``stages``."""
    for index, now in enumerate(times):
        told = stages[index] if index < len(stages) else None
        delta = TokenDelta(request_id=RequestId("r"), index=index, token_id=3, cached_tokens=cached_tokens, times=told)
        open_entry.accept(delta, now)
        exported.metrics.token(open_entry, delta, now)
        open_entry.first_token_at = times[0]
        open_entry.moved_at = now


def test_the_times_of_a_request_are_taken_at_its_tokens() -> None:
    exported, open_entry = Exported(), entry(opened_at=10.0)
    open_entry.moved_at = 10.25
    exported.metrics.placed([open_entry], now=10.25)
    at_prefill, at_decode = StageTimes(0.125, 0.5), StageTimes(0.0625, transfer_seconds=0.25)
    play(exported, open_entry, [11.0, 11.5, 12.0, 13.0], 16, at_prefill, at_decode)
    exported.metrics.ended(open_entry, EndReason.STOP, now=13.0)
    found = exported.samples()
    sums = {
        "crossdock:request_door_time_seconds_sum": 0.25,
        "vllm:request_queue_time_seconds_sum": 0.125,
        "vllm:request_prefill_time_seconds_sum": 0.5,
        "crossdock:request_transfer_time_seconds_sum": 0.25,
        "crossdock:request_decode_queue_time_seconds_sum": 0.0625,
        "vllm:request_inference_time_seconds_sum": 2.5,
        "vllm:time_to_first_token_seconds_sum": 1.0,
        "vllm:inter_token_latency_seconds_sum": 2.0,
        "vllm:inter_token_latency_seconds_count": 3,
        "vllm:request_decode_time_seconds_sum": 2.0,
        "vllm:e2e_request_latency_seconds_sum": 3.0,
        "vllm:prompt_tokens_total": 40,
        "vllm:prompt_tokens_cached_total": 16,
        "vllm:prefix_cache_queries_total": 40,
        "vllm:prefix_cache_hits_total": 16,
        "vllm:generation_tokens_total": 4,
        "vllm:request_prompt_tokens_sum": 40,
        "vllm:request_prefill_kv_computed_tokens_sum": 24,
        "vllm:request_generation_tokens_sum": 4,
        "vllm:request_params_max_tokens_sum": 5,
        "vllm:request_params_n_sum": 1,
    }
    assert {name: found[(name,)] for name in sums} == sums
    assert found[("vllm:request_time_per_output_token_seconds_sum",)] == pytest.approx(2 / 3)
    assert found[("vllm:request_success_total", "stop")] == 1


def test_a_request_that_begins_again_tells_each_token_once() -> None:
    exported, open_entry = Exported(), entry(opened_at=10.0)
    play(exported, open_entry, [11.0, 11.5], cached_tokens=16)
    open_entry.forget_output()
    play(exported, open_entry, [13.0, 13.25, 13.5])
    found = exported.samples()
    told = {
        "vllm:time_to_first_token_seconds_count": 1,
        "vllm:time_to_first_token_seconds_sum": 1.0,
        "vllm:inter_token_latency_seconds_count": 2,
        "vllm:inter_token_latency_seconds_sum": 0.75,
        "vllm:prompt_tokens_total": 40,
        "vllm:prompt_tokens_cached_total": 16,
        "vllm:generation_tokens_total": 3,
    }
    assert {name: found[(name,)] for name in told} == told


@pytest.mark.parametrize("reason", [EndReason.ABORT, EndReason.ERROR])
def test_a_request_that_did_not_finish_tells_nothing_of_latency(reason: EndReason) -> None:
    exported, open_entry = Exported(), entry()
    play(exported, open_entry, [1.0, 2.0])
    exported.metrics.ended(open_entry, reason, now=3.0)
    found = exported.samples()
    assert found[("vllm:e2e_request_latency_seconds_count",)] == 0
    assert found[("vllm:request_success_total", reason.value)] == 1


def test_the_reason_of_the_end_is_the_worker_s() -> None:
    assert EndReason.of(FinishReason.LENGTH) is EndReason.LENGTH
    assert EndReason.of(FinishReason.STOP) is EndReason.STOP


def test_running_requests_have_a_token_and_waiting_ones_have_none() -> None:
    exported = Exported()
    prefill, decode = exported.join(P, Role.PREFILL), exported.join(D, Role.DECODE)
    for name, first_token_at in (("a", None), ("b", 1.0), ("c", 2.0)):
        open_entry = entry()
        open_entry.request = Request(request_id=RequestId(name), prompt=b"1234", params=open_entry.request.params)
        open_entry.first_token_at = first_token_at
        exported.ledger.begin([open_entry], Pair(prefill, decode), now=0)
    found = exported.samples()
    assert (found[("vllm:num_requests_running",)], found[("vllm:num_requests_waiting",)]) == (2, 1)


def test_each_worker_shows_its_last_heartbeat_until_it_is_gone() -> None:
    exported = Exported()
    prefill, decode = exported.join(P, Role.PREFILL), exported.join(D, Role.DECODE)
    exported.fleet.link(prefill, Link(to=D.incarnation, transport="tcp"))
    exported.prefixes.apply(P.incarnation, CacheEvents(number=1, stored=[b"x" * 16]), now=0)
    books = PoolBooks(free=4, cached=1, leased=3, quarantined=2)
    load = WorkerLoad(books=books, num_waiting=6, total_blocks_pushed=20, total_blocks_skipped=5, total_preemptions=1)
    exported.fleet.report(prefill, load)
    found = exported.samples()
    states = {state: found[("crossdock:worker_blocks", "prefill", state, "p:1")] for state in vars_of(books)}
    assert states == vars_of(books)
    assert found[("crossdock:worker_requests_waiting", "prefill", "p:1")] == 6
    assert found[("crossdock:worker_blocks_pushed_total", "prefill", "p:1")] == 20
    assert found[("crossdock:worker_blocks_skipped_total", "prefill", "p:1")] == 5
    assert found[("crossdock:worker_preemptions_total", "prefill", "p:1")] == 1
    assert found[("crossdock:worker_links", "prefill", "p:1")] == 1
    assert found[("crossdock:worker_hashes_known", "prefill", "p:1")] == 1
    assert found[("vllm:kv_cache_usage_perc",)] == 0.25
    assert found[("crossdock:messages_rejected",)] == 7
    exported.fleet.remove(prefill)
    exported.fleet.remove(decode)
    assert not any(name[0].startswith("crossdock:worker_requests") for name in exported.samples())


def test_each_pair_shows_the_transport_that_was_chosen_its_rate_and_its_latency() -> None:
    exported = Exported()
    prefill, _ = exported.join(P, Role.PREFILL), exported.join(D, Role.DECODE)
    exported.fleet.link(prefill, Link(to=D.incarnation, transport="shm", bytes_per_second=5e9, latency_seconds=2e-5))
    found = exported.samples()
    assert found[("crossdock:link_up", "d:2", "shm", "p:1")] == 1
    assert found[("crossdock:link_bytes_per_second", "d:2", "shm", "p:1")] == 5e9
    assert found[("crossdock:link_latency_seconds", "d:2", "shm", "p:1")] == 2e-5
    exported.fleet.link(prefill, Link(to=D.incarnation, transport="", error="torn"))
    names = {name for name in exported.samples() if name[0].startswith("crossdock:link")}
    assert names == {("crossdock:link_up", "d:2", "", "p:1")}
    assert exported.samples()[("crossdock:link_up", "d:2", "", "p:1")] == 0


def vars_of(books: PoolBooks) -> dict[str, int]:
    return {"free": books.free, "cached": books.cached, "leased": books.leased, "quarantined": books.quarantined}


def test_two_routers_in_one_process_count_apart() -> None:
    one, other = Exported(), Exported()
    one.metrics.counts.deaths += 1
    assert one.samples()[("crossdock:worker_deaths_total",)] == 1
    assert other.samples()[("crossdock:worker_deaths_total",)] == 0
