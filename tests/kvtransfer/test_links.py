"""Workers that find out which transport leads from one to the other, and push over it."""

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from crossdock.core.block_pool import BlockPool
from crossdock.core.kv_layout import KvLayout
from crossdock.core.mailbox import Mailbox
from crossdock.core.messages import (
    Cancel,
    Commit,
    Incarnation,
    LeaseId,
    Link,
    Message,
    Peer,
    PeerInfo,
    ProbeGrant,
    ProbeRequest,
    ProbeSent,
    Push,
    Renew,
    Role,
    TransportCard,
    TriedTransport,
    WorkerCard,
)
from crossdock.core.part import Delivery, TransferFailed
from crossdock.core.request import TransferId
from crossdock.kvtransfer.links import Links
from crossdock.kvtransfer.nccl import NcclTransport
from crossdock.kvtransfer.pool_bytes import PoolBytes
from crossdock.kvtransfer.shm import SharedPool, ShmTransport, allocate_shared
from crossdock.kvtransfer.tcp import TcpTransport
from crossdock.kvtransfer.transport import BlockCopy, Transport
from crossdock.kvtransfer.ucx import UcxTransport

from .stub_network import stub_network, stub_path

LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=16, block_size=16, dtype="float32")
NUM_BLOCKS = 32
LEASE_SECONDS = 30.0
ROUTER = Peer("tcp://127.0.0.1:1", Incarnation("r"))
T = TransferId("t")


class PostOffice:
    """Control messages between the workers of a test; those to nobody are kept under their address."""

    def __init__(self) -> None:
        self.boxes: dict[Peer, deque[Delivery]] = {}

    def send(self, sender: Peer, to: Peer, message: Message) -> None:
        self.boxes.setdefault(to, deque()).append(Delivery(sender, message))

    def links_told(self, router: Peer = ROUTER) -> list[Link]:
        told = [delivery.message for delivery in self.boxes.get(router, ())]
        assert all(isinstance(message, Link) for message in told)
        return [message for message in told if isinstance(message, Link)]


class DeafTransport:
    """Says that it wrote into the peer's pool, and did not."""

    inbox = None
    is_moving = False
    card = TransportCard("cuda_ipc", "somewhere")

    def open(self, peer: Peer, card: TransportCard, num_blocks: int) -> None:
        assert num_blocks == NUM_BLOCKS

    def push(self, to: Peer, header: Push | ProbeSent, copy: BlockCopy) -> None: ...

    def detail(self, peer: Peer) -> str:
        return "nowhere"

    def forget(self, peer: Peer) -> None: ...

    def close(self) -> None: ...


class LazyCopy:
    """`Copying` that is done when somebody waits for it."""

    def __init__(self, copy: Callable[[], None]) -> None:
        self._copy = copy
        self.is_done = self.wakes = False

    def wait(self) -> None:
        if not self.is_done:
            self._copy()
            self.is_done = True


class LazyTransport:
    """A device that copies by and by, as `CudaIpcTransport` does: `copies` are those that it has begun."""

    inbox = None
    is_moving = False

    def __init__(self, pool: PoolBytes, shared: SharedPool) -> None:
        self._shm = ShmTransport(pool, shared)
        self.card = TransportCard("cuda_ipc", shared.address)
        self.copies: list[LazyCopy] = []

    def open(self, peer: Peer, card: TransportCard, num_blocks: int) -> None:
        self._shm.open(peer, card, num_blocks)

    def push(self, to: Peer, header: Push | ProbeSent, copy: BlockCopy) -> LazyCopy:
        self.copies.append(LazyCopy(lambda: self._shm.push(to, header, copy)))
        return self.copies[-1]

    def detail(self, peer: Peer) -> str:
        return self._shm.detail(peer)

    def forget(self, peer: Peer) -> None:
        self._shm.forget(peer)

    def close(self) -> None:
        self._shm.close()


class Worker:
    """One worker without an engine: its pool, its transports and its links."""

    def __init__(
        self, post: PostOffice, name: str, role: Role, transports: str, layout: KvLayout, claims: dict[str, object]
    ) -> None:
        self.me = Peer(f"control of {name}", Incarnation(name))
        self.post = post
        self.shared = allocate_shared(NUM_BLOCKS * layout.block_bytes)
        self.memory = PoolBytes(self.shared.memory, NUM_BLOCKS, layout, 2)
        self.pool = BlockPool(NUM_BLOCKS)
        self.arrived: list[Delivery] = []
        made = [self.make_transport(transport) for transport in transports.split()]
        card = WorkerCard(
            role=role,
            model="m",
            layout=layout,
            num_blocks=NUM_BLOCKS,
            max_model_len=64,
            max_num_seqs=64,
            vocab_size=100,
            num_layer_groups=2,
            transports=tuple(transport.card for transport in made),
        )
        self.card = msgspec.structs.replace(card, **claims)
        self.links = Links(self.me, self.card, made, self.pool, self.memory, self.send, LEASE_SECONDS)

    def make_transport(self, name: str) -> Transport:
        if name == "shm":
            return ShmTransport(self.memory, self.shared)
        if name == "tcp":
            return TcpTransport(self.memory, Mailbox("127.0.0.1", 0, self.me.incarnation))
        if name == "ucx":
            return UcxTransport(self.memory, self.me, b"key", LEASE_SECONDS)
        if name == "nccl":
            network, mailbox = stub_network(stub_path()), Mailbox("127.0.0.1", 0, self.me.incarnation)
            return NcclTransport(self.memory, network, mailbox, b"key", LEASE_SECONDS / 2, lambda: None)
        if name == "lazy":
            return LazyTransport(self.memory, self.shared)
        return DeafTransport()

    @property
    def info(self) -> PeerInfo:
        return PeerInfo(self.me, self.card)

    def send(self, to: Peer, message: Message) -> None:
        self.post.send(self.me, to, message)

    def turn(self, now: float) -> None:
        """One iteration of the loop."""
        mail = self.post.boxes.setdefault(self.me, deque())
        while mail:
            self.take(mail.popleft(), now)
        for inbox in self.links.inboxes:
            while (delivery := inbox.receive()) is not None:
                self.take(delivery, now)
        self.links.sweep(now)

    def take(self, delivery: Delivery, now: float) -> None:
        if not self.links.handle(delivery, now):
            self.arrived.append(delivery)

    def close(self) -> None:
        self.links.close()


class Cluster:
    """Workers of one process, each getting its turn."""

    def __init__(self) -> None:
        self.post = PostOffice()
        self.workers: list[Worker] = []

    def add(
        self, name: str, role: Role, transports: str = "shm tcp", layout: KvLayout = LAYOUT, **claims: object
    ) -> Worker:
        self.workers.append(Worker(self.post, name, role, transports, layout, claims))
        return self.workers[-1]

    def meet(self, router: Peer = ROUTER) -> None:
        for worker in self.workers:
            worker.links.update(router, [other.info for other in self.workers], time.monotonic())

    def turn(self, seconds_ahead: float = 0.0) -> None:
        for worker in self.workers:
            worker.turn(time.monotonic() + seconds_ahead)

    def run_until(self, is_done: Callable[[], object]) -> None:
        end = time.monotonic() + 20.0
        while not is_done():
            assert time.monotonic() < end, "not within 20 s"
            self.turn()

    def settle(self) -> None:
        """Until no block is lent any more."""
        self.run_until(lambda: all(worker.pool.books().free == NUM_BLOCKS for worker in self.workers))


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    for worker in made.workers:
        worker.close()


def header(group: int, blocks: list[int]) -> Push:
    return Push(transfer_id=T, lease_id=LeaseId(0), generation=0, group=group, blocks=blocks, transport="")


def test_a_pair_on_one_host_tells_the_router_its_rate_and_gives_all_blocks_back(cluster: Cluster) -> None:
    prefill, decode = cluster.add("p", Role.PREFILL), cluster.add("d", Role.DECODE)
    cluster.meet()
    cluster.run_until(cluster.post.links_told)
    (link,) = cluster.post.links_told()
    assert (link.to, link.transport in ("shm", "tcp"), link.error) == ("d", True, "")
    assert link.bytes_per_second > 1e6 and 0 < link.latency_seconds < 1
    cluster.settle()
    for worker in (prefill, decode):
        worker.pool.check()


@pytest.mark.parametrize("transport", ["shm", "tcp", "ucx", "nccl"])
def test_what_is_pushed_over_a_link_lands_at_its_place(cluster: Cluster, transport: str) -> None:
    prefill, decode = cluster.add("p", Role.PREFILL, transport), cluster.add("d", Role.DECODE, transport)
    cluster.meet()
    cluster.run_until(cluster.post.links_told)
    prefill.memory.array[...] = np.frombuffer(os.urandom(prefill.memory.array.size), np.uint8).reshape(
        prefill.memory.array.shape
    )
    decode.memory.array[...] = 0
    prefill.links.push(decode.me, header(1, [9, 4]), [2, 3])
    cluster.run_until(lambda: decode.arrived)
    (delivery,) = decode.arrived
    assert isinstance(delivery.message, Push)
    assert (delivery.message.transport, delivery.message.blocks) == (transport, [9, 4])
    if len(delivery.payload):
        decode.links.land(delivery.message, delivery.payload)
    expected = np.zeros_like(decode.memory.array)
    expected[[9, 4], 2:] = prefill.memory.array[[2, 3], 2:]
    assert np.array_equal(decode.memory.array, expected)


def test_a_link_that_broke_is_told_with_that_alone_and_found_again(cluster: Cluster) -> None:
    prefill, decode = cluster.add("p", Role.PREFILL, "shm ucx"), cluster.add("d", Role.DECODE, "shm ucx")
    cluster.meet()
    cluster.run_until(cluster.post.links_told)
    (link,) = cluster.post.links_told()
    assert {tried.name: bool(tried.detail) for tried in link.tried} == {"shm": False, "ucx": True}
    probe = prefill.links._probes[decode.me]
    prefill.links._act(probe, probe.broken("torn", time.monotonic()))
    assert cluster.post.links_told()[1].tried == (TriedTransport(link.transport, error="torn"),)
    cluster.run_until(lambda: len(cluster.post.links_told()) == 3)
    assert cluster.post.links_told()[2].error == ""


def test_what_is_said_to_a_peer_waits_for_the_copies_to_it_and_for_no_others(cluster: Cluster) -> None:
    prefill, decode = cluster.add("p", Role.PREFILL, "lazy"), cluster.add("d", Role.DECODE, "lazy")
    other = cluster.add("e", Role.DECODE, "lazy")
    cluster.meet()
    cluster.run_until(lambda: len(cluster.post.links_told()) == 2)
    cluster.settle()
    (transport,) = (made for made in prefill.links._transports.values() if isinstance(made, LazyTransport))
    transport.copies.clear()
    cancel = Cancel(transfer_id=T, reason="enough")
    prefill.links.push(decode.me, header(0, [9]), [2])
    prefill.links.push(decode.me, header(1, [9]), [2])
    prefill.links.send(decode.me, cancel)
    prefill.links.send(other.me, cancel)
    cluster.turn()
    assert [delivery.message for delivery in other.arrived] == [cancel]
    assert decode.arrived == []
    transport.copies[0].wait()
    cluster.turn()
    cluster.turn()
    assert [type(delivery.message) for delivery in decode.arrived] == [Push]
    transport.copies[1].wait()
    cluster.turn()
    cluster.turn()
    assert [type(delivery.message) for delivery in decode.arrived] == [Push, Push, Cancel]
    prefill.links.send(decode.me, cancel)
    cluster.turn()
    assert len(decode.arrived) == 4


def test_a_commit_that_waited_for_a_copy_counts_the_wait_as_exposed(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefill, decode = cluster.add("p", Role.PREFILL, "lazy"), cluster.add("d", Role.DECODE, "lazy")
    cluster.meet()
    cluster.run_until(cluster.post.links_told)
    now = 100.0
    monkeypatch.setattr(prefill.links, "_clock", lambda: now)
    (transport,) = (made for made in prefill.links._transports.values() if isinstance(made, LazyTransport))
    transport.copies.clear()
    commit = Commit(
        transfer_id=T,
        lease_id=LeaseId(0),
        generation=0,
        num_block_groups=1,
        first_token_ids=[1],
        exposed_seconds=0.25,
    )
    prefill.links.push(decode.me, header(0, [9]), [2])
    prefill.links.send(decode.me, commit)
    was_copying = prefill.links.is_copying
    now = 100.5
    transport.copies[0].wait()
    cluster.turn()
    prefill.links.send(decode.me, commit)
    cluster.turn()
    assert (was_copying, prefill.links.is_copying) == (True, False)
    told = [delivery.message for delivery in decode.arrived if isinstance(delivery.message, Commit)]
    assert [message.exposed_seconds for message in told] == [0.75, 0.25]


class NotedPoller(zmq.Poller):
    """Notes for how many milliseconds it was to wait, and waits for nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[float | None] = []

    def poll(self, timeout: float | None = None) -> list[tuple[Any, int]]:
        self.waits.append(timeout)
        return []


def test_the_loop_sleeps_for_a_moment_only_while_it_has_to_look_for_the_end_of_a_copy(cluster: Cluster) -> None:
    prefill, decode = cluster.add("p", Role.PREFILL, "lazy"), cluster.add("d", Role.DECODE, "lazy")
    cluster.meet()
    cluster.run_until(cluster.post.links_told)
    (transport,) = (made for made in prefill.links._transports.values() if isinstance(made, LazyTransport))
    transport.copies.clear()
    poller = NotedPoller()
    prefill.links.wait(poller, 0.5)
    prefill.links.push(decode.me, header(0, [9]), [2])
    prefill.links.wait(poller, 0.5)
    transport.copies[0].wakes = True
    prefill.links.wait(poller, 0.5)
    transport.copies[0].wait()
    cluster.turn()
    prefill.links.wait(poller, 0.5)
    transport.is_moving = True
    prefill.links.wait(poller, 0.5)
    assert poller.waits == [500, 0, 500, 500, 0]


def test_a_peer_on_another_host_is_reached_by_tcp(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.add("d", Role.DECODE)
    monkeypatch.setattr("crossdock.kvtransfer.shm.host_identity", lambda: "another host")
    cluster.add("p", Role.PREFILL)
    cluster.meet()
    cluster.run_until(cluster.post.links_told)
    assert [(link.transport, link.error) for link in cluster.post.links_told()] == [("tcp", "")]


def test_a_transport_that_brings_wrong_bytes_is_not_used(cluster: Cluster) -> None:
    cluster.add("p", Role.PREFILL, "cuda_ipc tcp")
    cluster.add("d", Role.DECODE, "tcp cuda_ipc")
    cluster.meet()
    cluster.run_until(cluster.post.links_told)
    assert [link.transport for link in cluster.post.links_told()] == ["tcp"]


def test_without_a_correct_transport_there_is_no_link_but_another_try(cluster: Cluster) -> None:
    prefill, decode = cluster.add("p", Role.PREFILL, "cuda_ipc"), cluster.add("d", Role.DECODE, "cuda_ipc")
    cluster.meet()
    cluster.run_until(lambda: len(cluster.post.links_told()) == 2)
    assert {link.error for link in cluster.post.links_told()} == {"cuda_ipc: wrong bytes arrived"}
    with pytest.raises(TransferFailed, match="no link to d"):
        prefill.links.push(decode.me, header(0, [1]), [1])
    cluster.settle()


@pytest.mark.parametrize("full", ["p", "d"])
def test_a_full_pool_delays_the_probe_until_a_block_is_free(cluster: Cluster, full: str) -> None:
    workers = {"p": cluster.add("p", Role.PREFILL), "d": cluster.add("d", Role.DECODE)}
    taken = workers[full].pool.take(NUM_BLOCKS)
    cluster.meet()
    for _ in range(50):
        cluster.turn()
    assert cluster.post.links_told() == []
    workers[full].pool.give_back(taken[:1] if full == "d" else taken)
    cluster.run_until(cluster.post.links_told)
    assert [link.error for link in cluster.post.links_told()] == [""]


def test_a_probe_takes_no_block_from_a_full_prefill_pool_for_longer_than_a_trial(cluster: Cluster) -> None:
    prefill, _ = cluster.add("p", Role.PREFILL), cluster.add("d", Role.DECODE)
    cluster.meet()
    while not cluster.post.links_told():
        cluster.turn()
        assert prefill.pool.books().free == NUM_BLOCKS


def test_workers_of_another_layout_are_refused_by_name_of_the_field(cluster: Cluster) -> None:
    other = KvLayout(num_layers=4, num_kv_heads=2, head_dim=16, block_size=32, dtype="float32")
    prefill, decode = cluster.add("p", Role.PREFILL), cluster.add("d", Role.DECODE, layout=other)
    cluster.meet()
    for _ in range(5):
        cluster.turn()
    told = cluster.post.links_told()
    assert told == [Link(to=decode.me.incarnation, transport="", error="layout.block_size differs: 16 here, 32 there")]
    with pytest.raises(TransferFailed):
        prefill.links.push(decode.me, header(0, [1]), [1])


def test_workers_without_a_common_transport_are_told_apart(cluster: Cluster) -> None:
    cluster.add("p", Role.PREFILL, "shm")
    cluster.add("d", Role.DECODE, "tcp")
    cluster.meet()
    assert [link.error for link in cluster.post.links_told()] == ["no transport in common"]


def test_only_who_prefills_probes_and_only_who_decodes_and_nobody_probes_itself(cluster: Cluster) -> None:
    for name, role in (("p", Role.PREFILL), ("d", Role.DECODE), ("m", Role.MIXED), ("n", Role.MIXED)):
        cluster.add(name, role)
    cluster.meet()
    cluster.run_until(lambda: len(cluster.post.links_told()) == 7)
    told = [(delivery.sender.incarnation, delivery.message) for delivery in cluster.post.boxes[ROUTER]]
    pairs = {f"{source} {link.to}" for source, link in told if isinstance(link, Link)}
    assert pairs == {"p d", "p m", "p n", "m d", "m n", "n d", "n m"}
    cluster.settle()


def test_a_new_router_is_told_of_all_links_again(cluster: Cluster) -> None:
    cluster.add("p", Role.PREFILL)
    cluster.add("d", Role.DECODE)
    cluster.meet()
    cluster.run_until(cluster.post.links_told)
    new = Peer(ROUTER.address, Incarnation("r after a restart"))
    cluster.meet(new)
    assert cluster.post.links_told(new) == cluster.post.links_told()


def test_a_dead_decode_worker_has_no_link_any_more(cluster: Cluster) -> None:
    prefill, decode = cluster.add("p", Role.PREFILL), cluster.add("d", Role.DECODE)
    cluster.meet()
    cluster.run_until(cluster.post.links_told)
    prefill.links.update(ROUTER, [prefill.info], time.monotonic())
    with pytest.raises(TransferFailed, match="no link to d"):
        prefill.links.push(decode.me, header(0, [1]), [1])


def test_blocks_lent_to_a_dead_worker_come_back_and_its_late_wishes_are_ignored(cluster: Cluster) -> None:
    prefill, decode = cluster.add("p", Role.PREFILL), cluster.add("d", Role.DECODE)
    cluster.meet()
    now = time.monotonic()
    decode.take(Delivery(prefill.me, ProbeRequest(probe_id="x", card=prefill.card, num_blocks=2)), now)
    decode.links.sweep(now)
    assert decode.pool.books().leased == 2
    decode.links.update(ROUTER, [decode.info], now)
    assert decode.pool.books().quarantined == 2
    decode.take(Delivery(prefill.me, ProbeRequest(probe_id="y", card=prefill.card, num_blocks=2)), now)
    decode.links.sweep(now + LEASE_SECONDS)
    assert decode.pool.books().free == NUM_BLOCKS


def test_a_probe_message_of_a_stranger_harms_nobody(cluster: Cluster) -> None:
    decode = cluster.add("d", Role.DECODE)
    stranger = Peer("tcp://127.0.0.1:9", Incarnation("x"))
    sent = ProbeSent(probe_id="x", trial=0, transport="tcp", num_blocks=1, digest=b"")
    for message in (sent, ProbeGrant(probe_id="x", blocks=[0])):
        assert decode.links.handle(Delivery(stranger, message), 0.0)
    assert not decode.links.handle(Delivery(stranger, Renew(transfer_id=T, lease_id=LeaseId(0), generation=0)), 0.0)
    assert decode.pool.books().free == NUM_BLOCKS
