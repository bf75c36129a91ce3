"""The fleet: who is alive, who works with whom."""

from dataclasses import replace

import msgspec
import pytest

from crossdock.core.kv_layout import KvLayout
from crossdock.core.messages import (
    Incarnation,
    Link,
    Peer,
    PoolBooks,
    Refused,
    Role,
    WorkerCard,
    WorkerLoad,
)
from crossdock.router.fleet import MAX_REFUSALS, Fleet, Joined, Pair, Refusal, Worker

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=16, dtype="float32")
P, D, M = (Peer(f"tcp://10.0.0.{n}:7000", Incarnation(name)) for n, name in ((1, "p"), (2, "d"), (3, "m")))


def card(role: Role, model: str = "m", layout: KvLayout = LAYOUT, max_model_len: int = 1024) -> WorkerCard:
    return WorkerCard(
        role=role,
        model=model,
        layout=layout,
        num_blocks=64,
        max_model_len=max_model_len,
        max_num_seqs=64,
        vocab_size=256,
        num_layer_groups=2,
    )


def load(is_accepting: bool = True, running: int = 0, free: int = 64) -> WorkerLoad:
    books = PoolBooks(free=free, cached=64 - free, leased=0, quarantined=0)
    return WorkerLoad(books=books, is_accepting=is_accepting, num_running=running)


def join(fleet: Fleet, peer: Peer, role: Role, now: float = 0.0, max_model_len: int = 1024) -> Worker:
    assert fleet.join(peer, card(role, max_model_len=max_model_len), now) == Joined(is_new=True, is_change=True)
    worker = fleet.find(peer)
    assert worker is not None
    return worker


def test_a_prefill_and_a_decode_worker_are_a_pair_once_their_link_works() -> None:
    fleet = Fleet(dead_after_seconds=3)
    prefill, decode = join(fleet, P, Role.PREFILL), join(fleet, D, Role.DECODE)
    assert fleet.pairs() == []
    fleet.link(prefill, Link(to=D.incarnation, transport="shm", error="probe failed"))
    assert fleet.pairs() == []
    fleet.link(prefill, Link(to=D.incarnation, transport="tcp"))
    assert fleet.pairs() == [Pair(prefill, decode)]
    fleet.link(prefill, Link(to=D.incarnation, transport="tcp", error="connection lost"))
    assert fleet.pairs() == []


def test_a_repeated_outcome_of_a_probe_is_no_news() -> None:
    fleet = Fleet(dead_after_seconds=3)
    prefill, _ = join(fleet, P, Role.PREFILL), join(fleet, D, Role.DECODE)
    failed, works = Link(to=D.incarnation, transport="", error="no"), Link(to=D.incarnation, transport="tcp")
    assert [fleet.link(prefill, link) for link in (failed, failed, works, works, failed)] == [
        True,
        False,
        True,
        False,
        True,
    ]
    assert prefill.reached == []


def test_a_mixed_worker_is_a_pair_with_itself_at_once() -> None:
    fleet = Fleet(dead_after_seconds=3)
    mixed = join(fleet, M, Role.MIXED)
    assert fleet.pairs() == [Pair(mixed, mixed)]
    assert fleet.pairs()[0].is_one_worker


def test_a_mixed_worker_also_works_with_others_it_reaches() -> None:
    fleet = Fleet(dead_after_seconds=3)
    mixed, decode = join(fleet, M, Role.MIXED), join(fleet, D, Role.DECODE)
    fleet.link(mixed, Link(to=D.incarnation, transport="shm"))
    assert fleet.pairs() == [Pair(mixed, mixed), Pair(mixed, decode)]


def test_a_link_to_an_unknown_worker_is_not_kept() -> None:
    fleet = Fleet(dead_after_seconds=3)
    prefill = join(fleet, P, Role.PREFILL)
    fleet.link(prefill, Link(to=D.incarnation, transport="shm"))
    join(fleet, D, Role.DECODE)
    assert fleet.pairs() == []


@pytest.mark.parametrize("draining", [P, D])
def test_a_draining_worker_takes_no_new_requests(draining: Peer) -> None:
    fleet = Fleet(dead_after_seconds=3)
    prefill = join(fleet, P, Role.PREFILL)
    join(fleet, D, Role.DECODE)
    fleet.link(prefill, Link(to=D.incarnation, transport="shm"))
    worker = fleet.find(draining)
    assert worker is not None
    fleet.report(worker, load(is_accepting=False))
    assert fleet.pairs() == []
    fleet.report(worker, load())
    assert len(fleet.pairs()) == 1


def test_a_changed_role_changes_the_pairs() -> None:
    fleet = Fleet(dead_after_seconds=3)
    worker = join(fleet, P, Role.PREFILL)
    assert fleet.join(P, card(Role.MIXED), now=1) == Joined(is_new=False, is_change=True)
    assert fleet.pairs() == [Pair(worker, worker)]
    assert fleet.join(P, card(Role.MIXED), now=1) == Joined(is_new=False, is_change=False)


def test_a_worker_of_another_model_is_refused() -> None:
    fleet = Fleet(dead_after_seconds=3)
    join(fleet, P, Role.PREFILL)
    answer = fleet.join(D, card(Role.DECODE, model="other"), now=0)
    assert answer == Refused(reason="model differs: m in the fleet, other at the worker")
    assert len(fleet) == 1


def test_a_worker_of_another_model_than_the_routers_is_refused_though_it_is_the_first() -> None:
    fleet = Fleet(dead_after_seconds=3, model="m")
    answer = fleet.join(D, card(Role.DECODE, model="other"), now=0)
    assert answer == Refused(reason="model differs: m at the router, other at the worker")
    join(fleet, P, Role.PREFILL)


def test_refusals_are_remembered_until_the_worker_joins_and_the_oldest_forgotten() -> None:
    fleet = Fleet(dead_after_seconds=3)
    assert [fleet.refuse(D, reason, now) for now, reason in enumerate(("a", "a", "b"))] == [True, False, True]
    assert list(fleet.refusals) == [Refusal(D, "b", 2)]
    join(fleet, D, Role.DECODE)
    assert list(fleet.refusals) == []
    for number in range(MAX_REFUSALS + 3):
        fleet.refuse(Peer(f"tcp://10.0.0.1:{number}", Incarnation("x")), "why", number)
    assert [refusal.at for refusal in fleet.refusals] == list(range(3, MAX_REFUSALS + 3))


def test_a_worker_of_another_layout_is_refused() -> None:
    fleet = Fleet(dead_after_seconds=3)
    join(fleet, P, Role.PREFILL)
    answer = fleet.join(D, card(Role.DECODE, layout=replace(LAYOUT, block_size=32)), now=0)
    assert answer == Refused(reason="layout.block_size differs: 16 in the fleet, 32 at the worker")


def test_an_empty_fleet_takes_any_model() -> None:
    fleet = Fleet(dead_after_seconds=3)
    fleet.remove(join(fleet, P, Role.PREFILL))
    assert fleet.join(D, card(Role.DECODE, model="other"), now=0) == Joined(is_new=True, is_change=True)


def test_a_new_incarnation_voids_the_old_one_at_its_address() -> None:
    fleet = Fleet(dead_after_seconds=3)
    prefill, old = join(fleet, P, Role.PREFILL), join(fleet, D, Role.DECODE)
    fleet.link(prefill, Link(to=D.incarnation, transport="shm"))
    reborn = Peer(D.address, Incarnation("d2"))
    assert fleet.remove_former(reborn) is old
    assert fleet.find(D) is None
    assert prefill.links == {}
    join(fleet, reborn, Role.DECODE)
    assert fleet.remove_former(reborn) is None


def test_an_incarnation_at_another_address_is_unknown() -> None:
    fleet = Fleet(dead_after_seconds=3)
    join(fleet, P, Role.PREFILL)
    assert fleet.find(Peer("tcp://10.9.9.9:1", P.incarnation)) is None


def test_silence_beyond_the_limit_is_death() -> None:
    fleet = Fleet(dead_after_seconds=3)
    prefill, decode = join(fleet, P, Role.PREFILL), join(fleet, D, Role.DECODE)
    fleet.link(prefill, Link(to=D.incarnation, transport="shm"))
    assert fleet.heard(P, now=2.5) is prefill
    assert fleet.remove_silent(now=3.0) == []
    assert fleet.remove_silent(now=3.1) == [decode]
    assert list(fleet) == [prefill]
    assert fleet.pairs() == []
    assert fleet.heard(D, now=3.2) is None


def test_a_heartbeat_replaces_what_was_assumed_since_the_last_one() -> None:
    fleet = Fleet(dead_after_seconds=3)
    worker = join(fleet, M, Role.MIXED)
    worker.unreported.num_prompt_tokens, worker.unreported.num_sequences, worker.unreported.num_blocks = 100, 2, 8
    assert (worker.num_queued_prompt_tokens, worker.num_sequences, worker.num_available_blocks) == (100, 2, 56)
    fleet.report(worker, load(running=1, free=40))
    assert (worker.num_queued_prompt_tokens, worker.num_sequences, worker.num_available_blocks) == (0, 1, 64)


def test_the_longest_request_is_that_of_the_roomiest_pair() -> None:
    fleet = Fleet(dead_after_seconds=3)
    assert fleet.max_model_len() == 0
    prefill = join(fleet, P, Role.PREFILL, max_model_len=512)
    join(fleet, D, Role.DECODE, max_model_len=2048)
    fleet.link(prefill, Link(to=D.incarnation, transport="shm"))
    assert fleet.max_model_len() == 512
    join(fleet, M, Role.MIXED, max_model_len=1024)
    assert fleet.max_model_len() == 1024


def test_peers_name_every_live_worker() -> None:
    fleet = Fleet(dead_after_seconds=3)
    join(fleet, P, Role.PREFILL)
    join(fleet, D, Role.DECODE)
    assert msgspec.to_builtins([info.peer for info in fleet.peers().workers]) == msgspec.to_builtins([P, D])
