"""Which pair gets a request: exact choices on small fleets."""

from collections import Counter
from itertools import product

from crossdock.core.kv_layout import KvLayout
from crossdock.core.messages import Incarnation, Peer, PoolBooks, Role, WorkerCard, WorkerLoad
from crossdock.router.fleet import Pair, Worker
from crossdock.router.placement import Demand, NoCapacity, Placement, place, record

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")


def worker(
    name: str, role: Role = Role.MIXED, queued: int = 0, running: int = 0, free: int = 1000, max_model_len: int = 4096
) -> Worker:
    card = WorkerCard(
        role=role,
        model="m",
        layout=LAYOUT,
        num_blocks=1000,
        max_model_len=max_model_len,
        max_num_seqs=64,
        vocab_size=9,
        num_layer_groups=1,
    )
    books = PoolBooks(free=free, cached=0, leased=1000 - free, quarantined=0)
    load = WorkerLoad(books=books, num_queued_prompt_tokens=queued, num_running=running)
    return Worker(Peer(f"tcp://{name}:1", Incarnation(name)), card, 0.0, load)


def pairs(prefills: list[Worker], decodes: list[Worker]) -> list[Pair]:
    return [Pair(prefill, decode) for prefill, decode in product(prefills, decodes)]


def chosen(outcome: Placement | NoCapacity) -> tuple[str, str]:
    assert isinstance(outcome, Placement)
    return outcome.pair.prefill.incarnation, outcome.pair.decode.incarnation


DEMAND = Demand(num_prompt_tokens=160, num_total_tokens=200)


def test_without_a_pair_there_is_no_capacity() -> None:
    assert place(DEMAND, [], {}, tie_break=0) == NoCapacity("no pair of workers is ready")


def test_a_request_too_long_for_every_pair_is_told_so() -> None:
    short = worker("a", max_model_len=199)
    assert place(DEMAND, [Pair(short, short)], {}, tie_break=0) == NoCapacity("no worker holds so long a request")


def test_a_request_goes_where_it_fits() -> None:
    short, long = worker("short", max_model_len=199), worker("long", max_model_len=200, queued=5000)
    assert chosen(place(DEMAND, [Pair(short, short), Pair(long, long)], {}, tie_break=0)) == ("long", "long")


def test_the_shorter_prefill_queue_wins() -> None:
    p1, p2, d = worker("p1", queued=300), worker("p2", queued=299), worker("d")
    assert chosen(place(DEMAND, pairs([p1, p2], [d]), {}, tie_break=0)) == ("p2", "d")


def test_a_cached_prefix_outweighs_a_longer_queue_of_fewer_tokens() -> None:
    p1, p2, d = worker("p1", queued=100), worker("p2"), worker("d")
    cached = {p1.incarnation: 7}  # 112 of 160 tokens: 100 + 48 against 160
    outcome = place(DEMAND, pairs([p1, p2], [d]), cached, tie_break=0)
    assert chosen(outcome) == ("p1", "d")
    assert isinstance(outcome, Placement)
    assert outcome.num_uncached == 48
    p1.load = WorkerLoad(books=p1.load.books, num_queued_prompt_tokens=113)
    assert chosen(place(DEMAND, pairs([p1, p2], [d]), cached, tie_break=0)) == ("p2", "d")


def test_the_last_prompt_token_is_always_computed() -> None:
    p, d = worker("p"), worker("d")
    outcome = place(DEMAND, pairs([p], [d]), {p.incarnation: 10}, tie_break=0)
    assert isinstance(outcome, Placement)
    assert outcome.num_uncached == 1


def test_the_decode_worker_with_fewer_sequences_wins() -> None:
    p, d1, d2 = worker("p"), worker("d1", running=5), worker("d2", running=4)
    assert chosen(place(DEMAND, pairs([p], [d1, d2]), {}, tie_break=0)) == ("p", "d2")


def test_a_prefix_on_the_decode_worker_saves_shipping() -> None:
    p, d1, d2 = worker("p"), worker("d1"), worker("d2")
    outcome = place(DEMAND, pairs([p], [d1, d2]), {d2.incarnation: 6}, tie_break=0)
    assert chosen(outcome) == ("p", "d2")
    assert isinstance(outcome, Placement)
    assert outcome.num_decode_blocks == 4


def test_a_decode_worker_without_free_blocks_is_the_last_resort() -> None:
    p, full, busy = worker("p"), worker("full", free=2), worker("busy", running=15)
    assert chosen(place(DEMAND, pairs([p], [full, busy]), {}, tie_break=0)) == ("p", "busy")


def test_a_mixed_worker_needs_no_shipping() -> None:
    m, d = worker("m"), worker("d")
    assert chosen(place(DEMAND, [Pair(m, d), Pair(m, m)], {}, tie_break=0)) == ("m", "m")


def test_a_pair_that_failed_before_is_taken_only_without_another() -> None:
    a, b = worker("a"), worker("b", queued=9999)
    failed = Pair(a, a)
    assert chosen(place(DEMAND, [failed, Pair(b, b)], {}, tie_break=0, avoid=[failed])) == ("b", "b")
    assert chosen(place(DEMAND, [failed], {}, tie_break=0, avoid=[failed])) == ("a", "a")


def test_equal_pairs_take_turns_and_the_choice_is_reproducible() -> None:
    all_pairs = pairs([worker("p1"), worker("p2")], [worker("d1"), worker("d2")])
    turns = [chosen(place(DEMAND, all_pairs, {}, tie_break=n)) for n in range(5)]
    assert turns == [("p1", "d1"), ("p1", "d2"), ("p2", "d1"), ("p2", "d2"), ("p1", "d1")]


def test_a_burst_between_two_heartbeats_spreads_over_all_workers() -> None:
    prefills, decodes = [worker("p1"), worker("p2")], [worker("d1"), worker("d2"), worker("d3")]
    taken: Counter[str] = Counter()
    for n in range(60):
        outcome = place(DEMAND, pairs(prefills, decodes), {}, tie_break=n)
        assert isinstance(outcome, Placement)
        record(outcome, DEMAND)
        taken.update(chosen(outcome))
    assert taken == {"p1": 30, "p2": 30, "d1": 20, "d2": 20, "d3": 20}
    assert prefills[0].num_queued_prompt_tokens == 30 * 160
    assert (decodes[0].num_sequences, decodes[0].num_available_blocks) == (20, 1000 - 20 * 10)


def test_choices_of_one_prompt_share_its_blocks() -> None:
    p, d = worker("p"), worker("d")
    demand = Demand(num_prompt_tokens=160, num_total_tokens=200, num_sequences=4)
    outcome = place(demand, pairs([p], [d]), {}, tie_break=0)
    assert isinstance(outcome, Placement)
    record(outcome, demand)
    assert (p.num_queued_prompt_tokens, d.num_sequences, d.num_available_blocks) == (160, 4, 990)
