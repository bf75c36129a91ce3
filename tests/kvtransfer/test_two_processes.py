"""A prefill process pushes numbered KV into the pool of this one, over shared memory, TCP, UCX, and NCCL's stand-in.

This file is also that process; its arguments are ``shm|tcp|ucx|LIBRARY ADDRESS once|forever|short``: push each layer
group once, then either wait, or go on pushing the first one for ever, or do it with too few bytes.
"""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from crossdock.core.kv_layout import KvLayout
from crossdock.core.mailbox import Mailbox
from crossdock.core.messages import Cancel, Commit, Incarnation, LeaseId, Peer, PieceSent, Push, TransportCard
from crossdock.core.part import Delivery, TransferFailed
from crossdock.core.request import TransferId
from crossdock.kvtransfer.lease import Lease
from crossdock.kvtransfer.nccl import NcclTransport
from crossdock.kvtransfer.pool_bytes import PoolBytes
from crossdock.kvtransfer.receiver import Change, Receiver, ReceiverState
from crossdock.kvtransfer.shm import ShmTransport, allocate_shared
from crossdock.kvtransfer.tcp import TcpTransport
from crossdock.kvtransfer.transport import BlockCopy, Inbox, NotReachable, Transport
from crossdock.kvtransfer.ucx import UcxTransport

from .stub_network import stub_network, stub_path

ROOT = Path(__file__).resolve().parents[2]
LAYOUT = KvLayout(num_layers=4, num_kv_heads=2, head_dim=64, block_size=16, dtype="float32")
NUM_BLOCKS = 64
NUM_GROUPS = 3
SOURCES = [0, 1, 2, 10, 11, 3]
DESTINATIONS = [40, 41, 42, 43, 7, 60]
DECODE = Peer("tcp://127.0.0.1:1", Incarnation("d"))
PREFILL = Peer("tcp://127.0.0.1:2", Incarnation("p"))
T = TransferId("t")


def numbered() -> np.ndarray:
    """``[block, layer, K or V, kv head, token, head dim]``, all elements different."""
    shape = (NUM_BLOCKS, *LAYOUT.block_shape)
    return np.arange(1, np.prod(shape) + 1, dtype=np.float32).reshape(shape)


def elements(pool: PoolBytes) -> np.ndarray:
    return pool.array.view(np.float32).reshape(NUM_BLOCKS, *LAYOUT.block_shape)


def header(group: int, transport: str) -> Push:
    return Push(transfer_id=T, lease_id=LeaseId(4), generation=2, group=group, blocks=DESTINATIONS, transport=transport)


def make_receiver(pool: PoolBytes, generation: int = 2) -> Receiver:
    lease = Lease(LeaseId(4), generation, PREFILL.incarnation, 10.0, 10.0)
    return Receiver(T, lease, 0, DESTINATIONS, pool.group_bytes)


COMMIT = Commit(
    transfer_id=T,
    lease_id=LeaseId(4),
    generation=2,
    num_block_groups=len(DESTINATIONS) * NUM_GROUPS,
    first_token_ids=[77],
)


class SharedSide:
    """The decode side over shared memory; the sender's standard output stands for the control mailbox."""

    name = "shm"

    def __init__(self) -> None:
        self.shared = allocate_shared(NUM_BLOCKS * LAYOUT.block_bytes)
        self.pool = PoolBytes(self.shared.memory, NUM_BLOCKS, LAYOUT, NUM_GROUPS)
        self.address = self.shared.address

    def pushes(self, child: "subprocess.Popen[str]") -> Iterator[Delivery]:
        assert child.stdout is not None
        while (line := child.stdout.readline()).startswith("pushed"):
            yield Delivery(PREFILL, header(int(line.split()[1]), "shm"))

    def close(self) -> None:
        del self.pool
        self.shared.close()


class TcpSide:
    name = "tcp"

    def __init__(self) -> None:
        self.pool = PoolBytes(memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes)), NUM_BLOCKS, LAYOUT, NUM_GROUPS)
        self.inbox = Mailbox("127.0.0.1", 0, DECODE.incarnation)
        self.address = self.inbox.peer.address

    def pushes(self, child: "subprocess.Popen[str]") -> Iterator[Delivery]:
        """Nothing for so long means that nothing will come."""
        while self.inbox.poll_socket.poll(30_000):
            delivery = self.inbox.receive()
            if delivery is not None:
                yield delivery

    def close(self) -> None:
        self.inbox.close()


def deliveries(inbox: Inbox, longest_sleep: float) -> Iterator[Delivery]:
    """Nothing for so long means that nothing will come."""
    end = time.monotonic() + 30.0
    while time.monotonic() < end:
        delivery = inbox.receive()
        if delivery is not None:
            yield delivery
        else:
            select.select([inbox.poll_socket], [], [], longest_sleep)


class UcxSide:
    name = "ucx"

    def __init__(self) -> None:
        self.pool = PoolBytes(memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes)), NUM_BLOCKS, LAYOUT, NUM_GROUPS)
        self.transport = UcxTransport(self.pool, DECODE, b"key", patience_seconds=30.0)
        self.address = self.transport.card.address

    def pushes(self, child: "subprocess.Popen[str]") -> Iterator[Delivery]:
        return deliveries(self.transport.inbox, 1.0)

    def close(self) -> None:
        self.transport.close()


class NcclSide:
    """The name is the library's."""

    def __init__(self) -> None:
        self.name = stub_path()
        self.pool = PoolBytes(memoryview(bytearray(NUM_BLOCKS * LAYOUT.block_bytes)), NUM_BLOCKS, LAYOUT, NUM_GROUPS)
        self.transport = nccl_over(self.name, self.pool, DECODE)
        self.address = self.transport.card.address

    def pushes(self, child: "subprocess.Popen[str]") -> Iterator[Delivery]:
        return deliveries(self.transport.inbox, 0.01)  # pieces end on a thread, which wakes no socket

    def close(self) -> None:
        self.transport.close()


def nccl_over(library: str, pool: PoolBytes, me: Peer) -> NcclTransport:
    mailbox = Mailbox("127.0.0.1", 0, me.incarnation)
    return NcclTransport(pool, stub_network(library), mailbox, b"key", 1.0, lambda: None)


Side = SharedSide | TcpSide | UcxSide | NcclSide


@pytest.fixture
def shared_side() -> Iterator[SharedSide]:
    side = SharedSide()
    yield side
    side.close()


@pytest.fixture
def tcp_side() -> Iterator[TcpSide]:
    side = TcpSide()
    yield side
    side.close()


@pytest.fixture
def ucx_side() -> Iterator[UcxSide]:
    side = UcxSide()
    yield side
    side.close()


@pytest.fixture
def nccl_side() -> Iterator[NcclSide]:
    side = NcclSide()
    yield side
    side.close()


@pytest.fixture(params=["shared_side", "tcp_side", "ucx_side", "nccl_side"])
def side(request: pytest.FixtureRequest) -> Side:
    made: Side = request.getfixturevalue(request.param)
    return made


@pytest.fixture(params=["tcp_side", "ucx_side", "nccl_side"])
def staged_side(request: pytest.FixtureRequest) -> TcpSide | UcxSide | NcclSide:
    """Bytes travel beside their headers."""
    made: TcpSide | UcxSide | NcclSide = request.getfixturevalue(request.param)
    return made


@contextmanager
def pushing_process(name: str, address: str, how: str) -> Iterator["subprocess.Popen[str]"]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    program = f"import sys; sys.path.append({str(ROOT)!r}); from {__name__} import push_as_told; push_as_told()"
    command = [sys.executable, "-P", "-c", program, name, address, how]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as child:
        try:
            yield child
        finally:
            child.kill()


def receive(side: Side, child: "subprocess.Popen[str]", receiver: Receiver, num_pushes: int) -> list[Change | None]:
    changes = []
    for delivery in side.pushes(child):
        actions = receiver.handle(delivery, 1.0)
        if actions.lands:
            assert isinstance(delivery.message, Push)
            side.pool.land(delivery.message, delivery.payload)
        changes.append(actions.change)
        if len(changes) == num_pushes:
            break
    return changes


def test_every_element_of_the_prompt_arrives_at_its_place(side: Side) -> None:
    receiver = make_receiver(side.pool)
    with pushing_process(side.name, side.address, "once") as child:
        assert receive(side, child, receiver, NUM_GROUPS) == [None] * NUM_GROUPS
    assert receiver.handle(Delivery(PREFILL, COMMIT), 1.1).change is Change.ATTACH
    expected = np.zeros_like(numbered())
    expected[DESTINATIONS] = numbered()[SOURCES]
    assert np.array_equal(elements(side.pool), expected)


def test_a_sender_killed_in_mid_copy_never_attaches_and_its_blocks_wait_in_quarantine(side: Side) -> None:
    receiver = make_receiver(side.pool)
    with pushing_process(side.name, side.address, "forever") as child:
        receive(side, child, receiver, 1)
        child.kill()
        child.wait()
    assert receiver.handle(Delivery(PREFILL, COMMIT), 1.1).change is None
    assert receiver.lose(3.0).change is Change.QUARANTINE
    assert (receiver.tick(12.9).change, receiver.tick(13.0).change) == (None, Change.END_QUARANTINE)


def test_a_sender_killed_in_mid_push_is_given_up_in_time_and_the_next_one_is_served(nccl_side: NcclSide) -> None:
    side, inbox = nccl_side, nccl_side.transport.inbox
    with pushing_process(side.name, side.address, "forever") as child:
        receive(side, child, make_receiver(side.pool), 20)
        child.kill()
        child.wait()
    (source,) = inbox._sources.values()
    number = source.next_number
    source.announced[number] = PieceSent(channel=1, number=number, num_bytes=8, message=header(0, "nccl"))
    begun = time.monotonic()
    while inbox._sources:
        inbox.receive()
    assert time.monotonic() - begun < 3.0
    assert source.channel.failure == "no progress for 1 s"
    with pushing_process(side.name, side.address, "once") as child:
        assert receive(side, child, make_receiver(side.pool), NUM_GROUPS) == [None] * NUM_GROUPS


def test_a_push_with_too_few_bytes_ends_the_transfer(staged_side: TcpSide | UcxSide | NcclSide) -> None:
    side = staged_side
    receiver = make_receiver(side.pool)
    with pushing_process(side.name, side.address, "short") as child:
        assert receive(side, child, receiver, NUM_GROUPS) == [None, None, Change.QUARANTINE]
    assert receiver.handle(Delivery(PREFILL, COMMIT), 1.1).change is None
    cancel = Cancel(transfer_id=T, reason="as you wish")
    assert receiver.handle(Delivery(PREFILL, cancel), 1.2).change is Change.END_QUARANTINE


def test_pushes_of_a_stale_generation_touch_nothing(staged_side: TcpSide | UcxSide | NcclSide) -> None:
    side = staged_side
    receiver = make_receiver(side.pool, generation=3)
    with pushing_process(side.name, side.address, "once") as child:
        assert receive(side, child, receiver, NUM_GROUPS) == [None] * NUM_GROUPS
    assert not side.pool.array.any()
    assert receiver.handle(Delivery(PREFILL, COMMIT), 1.1).change is None
    assert receiver.state is ReceiverState.RESERVED


def test_killed_processes_leave_no_shared_memory_behind(shared_side: SharedSide) -> None:
    names = set(Path("/dev/shm").iterdir())
    with pushing_process("shm", shared_side.address, "forever") as child:
        receive(shared_side, child, make_receiver(shared_side.pool), 1)
        assert set(Path("/dev/shm").iterdir()) <= names
        child.kill()
        child.wait()
    assert set(Path("/dev/shm").iterdir()) <= names


def test_the_pool_of_a_killed_process_can_still_be_written_but_not_found_again() -> None:
    script = (
        "import sys\nfrom crossdock.kvtransfer.shm import allocate_shared\n"
        f"print(allocate_shared({NUM_BLOCKS * LAYOUT.block_bytes}).address, flush=True)\nsys.stdin.read()"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-P", "-c", script]
    pool = PoolBytes(memoryview(numbered().tobytes()), NUM_BLOCKS, LAYOUT, NUM_GROUPS)
    shared = allocate_shared(1)
    transport = ShmTransport(pool, shared)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as owner:
        assert owner.stdout is not None
        card = TransportCard("shm", owner.stdout.readline().strip())
        transport.open(DECODE, card, NUM_BLOCKS)
        owner.kill()
        owner.wait()
    transport.push(DECODE, header(0, "shm"), BlockCopy(SOURCES, DESTINATIONS, pool.groups[0]))
    transport.forget(DECODE)
    with pytest.raises(TransferFailed, match="not mapped"):
        transport.push(DECODE, header(0, "shm"), BlockCopy(SOURCES, DESTINATIONS, pool.groups[0]))
    with pytest.raises(NotReachable, match="can't be opened"):
        transport.open(DECODE, card, NUM_BLOCKS)
    shared.close()


def say_pushed(group: int) -> None:
    sys.stdout.write(f"pushed {group}\n")
    sys.stdout.flush()


def open_transport(name: str, address: str, pool: PoolBytes) -> Transport:
    transport: Transport
    if name == "shm":
        transport = ShmTransport(pool, allocate_shared(1))
    elif name == "ucx":
        transport = UcxTransport(pool, PREFILL, b"key", patience_seconds=30.0)
    elif name == "tcp":
        transport = TcpTransport(pool, Mailbox("127.0.0.1", 0, PREFILL.incarnation))
    else:
        transport = nccl_over(name, pool, PREFILL)
    transport.open(DECODE, TransportCard(name, address), NUM_BLOCKS)
    return transport


def push_as_told() -> None:
    name, address, how = sys.argv[1:]
    pool = PoolBytes(memoryview(numbered().tobytes()), NUM_BLOCKS, LAYOUT, NUM_GROUPS)
    transport = open_transport(name, address, pool)
    for group in range(NUM_GROUPS):
        layers = pool.groups[0 if how == "short" else group]
        transport.push(DECODE, header(group, name), BlockCopy(SOURCES, DESTINATIONS, layers))
        say_pushed(group)
    while how == "forever":
        transport.push(DECODE, header(0, name), BlockCopy(SOURCES, DESTINATIONS, pool.groups[0]))
        say_pushed(0)
        time.sleep(0.0 if name == "shm" else 0.001)
        transport.inbox and transport.inbox.receive()
    while not select.select([sys.stdin], [], [], 0.001)[0]:
        transport.inbox and transport.inbox.receive()
