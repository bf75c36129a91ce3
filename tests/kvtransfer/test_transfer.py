"""Both sides of a transfer over a network that loses, repeats, delays and reorders, with workers that stall and die."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crossdock.core.block_pool import BlockPool
from crossdock.core.kv_layout import KvLayout
from crossdock.core.messages import Attached, Commit, Incarnation, Offer, Peer, Push
from crossdock.core.part import Delivery
from crossdock.core.request import Request, RequestId, SamplingParams, TransferId, pack_ids
from crossdock.kvtransfer import receiver as receiving
from crossdock.kvtransfer import sender as sending
from crossdock.kvtransfer.lease import LeaseBook
from crossdock.kvtransfer.pool_bytes import PoolBytes
from crossdock.kvtransfer.receiver import Change, Receiver, ReceiverActions
from crossdock.kvtransfer.sender import Failed, Sender, SenderActions

LAYOUT = KvLayout(num_layers=3, num_kv_heads=1, head_dim=1, block_size=2, dtype="bfloat16")
LEASE_SECONDS = 12.0
POOL_BLOCKS = 7
FIRST_TOKEN = 77
PREFILL = Peer("tcp://127.0.0.1:1", Incarnation("p"))
DECODE = Peer("tcp://127.0.0.1:2", Incarnation("d"))
T = TransferId("t1")
OTHERS_BYTE = 0xEE


def memory(num_groups: int) -> PoolBytes:
    return PoolBytes(memoryview(bytearray(POOL_BLOCKS * LAYOUT.block_bytes)), POOL_BLOCKS, LAYOUT, num_groups)


def expected_kv(index: int) -> np.ndarray:
    """``[num_layers, layer_bytes]`` of prompt block ``index``: no two bytes of a prompt are alike."""
    first = 1 + index * LAYOUT.block_bytes
    return np.arange(first, first + LAYOUT.block_bytes, dtype=np.uint8).reshape(LAYOUT.num_layers, LAYOUT.layer_bytes)


class DecodeSide:
    """What a decode part does with one transfer: takes blocks, obeys its receiver, and lets others use what is free."""

    def __init__(self, num_groups: int, num_blocks: int, num_cached: int, post: Callable[[Delivery], None]) -> None:
        self.memory = memory(num_groups)
        self.pool = BlockPool(POOL_BLOCKS)
        self.leases = LeaseBook()
        self.receiver: Receiver | None = None
        self.attached: list[int] = []
        self.num_attached = 0
        self.others: list[int] = []
        self.num_missing = num_blocks - num_cached
        self.num_cached = num_cached
        self._post = post

    @property
    def writable(self) -> set[int]:
        """Blocks that the sender may write to without harm: leased to this transfer or quarantined, not attached."""
        live = self.receiver is not None and self.receiver.state is not receiving.ReceiverState.ATTACHED
        return set(self.receiver.blocks) if live and self.receiver else set()

    def deliver(self, delivery: Delivery, now: float) -> None:
        message = delivery.message
        if isinstance(message, Offer):
            self._offered(now)
        elif self.receiver is not None:
            self.obey(self.receiver.handle(delivery, now), delivery)
        elif answer := receiving.answer_unknown(message):
            self._post(Delivery(DECODE, answer))

    def _offered(self, now: float) -> None:
        if self.receiver is None:
            if self.pool.num_available < self.num_missing:
                return
            blocks = self.pool.take(self.num_missing)
            lease = self.leases.grant(PREFILL.incarnation, LEASE_SECONDS, now)
            self.receiver = Receiver(T, lease, self.num_cached, blocks, self.memory.group_bytes)
        self.obey(self.receiver.offered(now))

    def obey(self, actions: ReceiverActions, delivery: Delivery | None = None) -> None:
        receiver = self.receiver
        assert receiver is not None
        if actions.lands:
            assert delivery is not None and isinstance(delivery.message, Push)
            self.memory.land(delivery.message, delivery.payload)
        for message in actions.messages:
            self._post(Delivery(DECODE, message))
        self._change(receiver, actions.change)
        if receiver.is_ended:
            self.leases.end(receiver.lease)
            self.receiver = None

    def _change(self, receiver: Receiver, change: Change | None) -> None:
        match change:
            case Change.ATTACH:
                assert receiver.first_token_ids == [FIRST_TOKEN]
                self.attached += receiver.blocks
                self.num_attached += 1
                assert self.num_attached == 1, "a transfer attaches once"
                self.check_attached()
            case Change.QUARANTINE:
                self.pool.quarantine(receiver.blocks)
            case Change.GIVE_BACK:
                self.pool.give_back(receiver.blocks)
            case Change.END_QUARANTINE:
                self.pool.end_quarantine(receiver.blocks)
        if change in (Change.GIVE_BACK, Change.END_QUARANTINE):
            self.memory.array[receiver.blocks] = 0

    def check_attached(self) -> None:
        for index, block in enumerate(self.attached[: self.num_missing], self.num_cached):
            assert np.array_equal(self.memory.array[block], expected_kv(index)), "an attached block is not whole"

    def finish_decoding(self) -> None:
        self.pool.give_back(self.attached)
        self.memory.array[self.attached] = 0
        self.attached = []


@dataclass(frozen=True)
class Setup:
    num_blocks: int
    num_cached: int
    num_groups: int
    transport: str


class Crossing:
    """One transfer, with every message in flight in ``packets`` until somebody decides on it."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.now = 0.0
        self.packets: list[Delivery] = []
        self.source = memory(setup.num_groups)
        self.decode = DecodeSide(setup.num_groups, setup.num_blocks, setup.num_cached, self.packets.append)
        request = Request(request_id=RequestId("q"), prompt=pack_ids([1, 2, 3]), params=SamplingParams())
        offer = Offer(transfer_id=T, request=request, router=PREFILL)
        self.sender = Sender(offer, setup.num_blocks, setup.num_groups, PREFILL.incarnation, LEASE_SECONDS)
        self.outcomes: list[Attached | Failed] = []
        self.is_dead = False
        self.is_stalled = False
        self.is_lost = False
        self.obey(self.sender.start(self.now))

    @property
    def is_running(self) -> bool:
        return not self.is_dead and not self.is_stalled

    def post(self, delivery: Delivery) -> None:
        """From the sender; a pair of one host, of which one was declared dead by mistake, loses nothing."""
        if self.is_lost:
            self.decode.deliver(delivery, self.now)
        else:
            self.packets.append(delivery)

    def obey(self, actions: SenderActions) -> None:
        for push in actions.pushes:
            layers = self.source.layers_of(push.header)
            header = replace_transport(push.header, self.setup.transport)
            if self.setup.transport == "shm":
                assert set(header.blocks) <= self.decode.writable, "the sender writes to blocks that are not its own"
                payload = self.source.read(list(push.source), layers)
                self.decode.memory.write(header.blocks, layers, payload)
                self.post(Delivery(PREFILL, header))
                continue
            for source, block in zip(push.source, header.blocks, strict=True):
                payload = self.source.read([source], layers)
                self.post(Delivery(PREFILL, narrow(header, block), memoryview(payload)))
        for message in actions.messages:
            self.post(Delivery(PREFILL, message))
        if actions.outcome:
            self.outcomes.append(actions.outcome)

    def compute(self, group: int, num_blocks: int) -> None:
        layers = self.source.groups[group]
        for index in range(num_blocks):
            self.source.array[index, layers.first : layers.end] = expected_kv(index)[layers.first : layers.end]

    def finish(self) -> None:
        for group in range(self.setup.num_groups):
            self.compute(group, self.setup.num_blocks)
        self.obey(self.sender.finish([FIRST_TOKEN], self.now))

    def deliver(self, packet: Delivery) -> None:
        if packet.sender == PREFILL:
            self.decode.deliver(packet, self.now)
        elif self.is_running:
            self.obey(self.sender.handle(packet.message, self.now))  # type: ignore[arg-type]

    def deliver_all(self) -> None:
        while self.packets:
            self.deliver(self.packets.pop(0))

    def tick_sender(self) -> None:
        if self.is_running:
            self.obey(self.sender.tick(self.now))

    def tick_receiver(self) -> None:
        if self.decode.receiver is not None:
            self.decode.obey(self.decode.receiver.tick(self.now))

    def lose(self) -> None:
        self.is_lost = True
        if self.decode.receiver is not None:
            self.decode.obey(self.decode.receiver.lose(self.now))

    def wake(self) -> None:
        """A worker that stood still finds what came meanwhile in its mailbox."""
        self.is_stalled = False
        mail = [packet for packet in self.packets if packet.sender == DECODE]
        for packet in mail:
            self.packets.remove(packet)
            self.deliver(packet)

    @property
    def is_over(self) -> bool:
        return (self.sender.is_ended or self.is_dead) and self.decode.receiver is None and not self.packets


def replace_transport(header: Push, transport: str) -> Push:
    return Push(**{**fields_of(header), "transport": transport})  # type: ignore[arg-type]


def narrow(header: Push, block: int) -> Push:
    return Push(**{**fields_of(header), "blocks": [block]})  # type: ignore[arg-type]


def fields_of(header: Push) -> dict[str, object]:
    return {name: getattr(header, name) for name in header.__struct_fields__}


SETUPS = [Setup(4, 1, 2, transport) for transport in ("shm", "tcp")]


@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.transport)
def test_without_faults_every_element_arrives_and_both_sides_end(setup: Setup) -> None:
    crossing = Crossing(setup)
    crossing.compute(0, 2)
    crossing.obey(crossing.sender.written(range(1), 2, crossing.now))
    crossing.deliver_all()
    crossing.finish()
    crossing.deliver_all()
    assert crossing.outcomes == [Attached(transfer_id=T)]
    assert crossing.decode.num_attached == 1
    crossing.decode.finish_decoding()
    assert crossing.decode.pool.books().free == POOL_BLOCKS


def test_a_reservation_that_lay_in_the_mailbox_of_a_stalled_worker_is_not_used() -> None:
    crossing = Crossing(SETUPS[0])
    crossing.finish()
    crossing.deliver(crossing.packets.pop(0))
    crossing.is_stalled = True
    crossing.now = 3.0
    crossing.lose()
    crossing.now = 3.0 + LEASE_SECONDS
    crossing.tick_receiver()
    crossing.decode.others = crossing.decode.pool.take(POOL_BLOCKS)
    crossing.now = 60.0
    crossing.wake()
    assert crossing.outcomes == [Failed("the lease expired unused")]


def test_late_messages_of_an_earlier_lease_do_not_count_for_the_next() -> None:
    crossing = Crossing(SETUPS[0])
    offer = crossing.packets.pop(0)
    crossing.finish()
    crossing.deliver(offer)
    crossing.deliver(crossing.packets.pop(0))
    late = list(crossing.packets)
    assert [type(packet.message) for packet in late] == [Push, Commit]
    crossing.obey(crossing.sender.cancel("the client left"))
    crossing.deliver(crossing.packets.pop())
    assert crossing.decode.pool.books().free == POOL_BLOCKS
    crossing.deliver(offer)
    for packet in late:
        crossing.deliver(packet)
    assert crossing.decode.num_attached == 0 and crossing.decode.pool.books().leased == 3


@pytest.mark.parametrize("lost", [Offer, Push, Commit, Attached], ids=lambda lost: lost.__name__)
@pytest.mark.parametrize("setup", SETUPS, ids=lambda setup: setup.transport)
def test_a_message_that_is_always_lost_ends_both_sides_within_bounds(setup: Setup, lost: type) -> None:
    crossing = Crossing(setup)
    crossing.finish()
    for _ in range(4 * sending.MAX_OFFERS):
        kept = [packet for packet in crossing.packets if not isinstance(packet.message, lost)]
        crossing.packets[:] = kept[1:]
        if kept:
            crossing.deliver(kept[0])
        else:
            crossing.now += LEASE_SECONDS / 3
            crossing.tick_sender()
            crossing.tick_receiver()
    assert crossing.is_over
    assert [type(outcome) for outcome in crossing.outcomes] == [Failed]
    assert crossing.decode.num_attached == (1 if lost is Attached else 0)
    crossing.decode.pool.check()


class Fault(Enum):
    """What may go wrong in one run; the others then do not, so that runs get far in different ways."""

    LOSS = "messages get lost"
    REPETITION = "messages arrive again"
    DISORDER = "messages overtake each other"
    CUT = "payloads get cut"
    DELAY = "time jumps"
    STALL = "the sender stands still, and may be declared dead by mistake"
    DEATH = "the sender dies"
    CANCEL = "the sender gives up"
    REVOKE = "the receiver gives up"


class RandomWalk:
    """Takes one random step of a crossing after the other."""

    def __init__(self, crossing: Crossing, faults: frozenset[Fault], random: Random) -> None:
        self.crossing = crossing
        self.random = random
        self.is_ordered = Fault.DISORDER not in faults
        usual = {
            self.deliver: 8,
            self.write: 4,
            self.finish: 1,
            self.crossing.tick_sender: 3,
            self.crossing.tick_receiver: 3,
            self.wait: 2,
            self.others_take: 1,
            self.others_give_back: 2,
            self.crossing.decode.finish_decoding: 1,
        }
        of_faults: dict[Fault, dict[Callable[[], None], int]] = {
            Fault.LOSS: {self.lose_message: 2},
            Fault.REPETITION: {self.repeat: 4},
            Fault.CUT: {self.cut: 1},
            Fault.DELAY: {self.jump: 3},
            Fault.STALL: {self.stall: 1, self.wake: 1, self.declare_dead: 1},
            Fault.DEATH: {self.die: 1, self.declare_dead: 1},
            Fault.CANCEL: {self.cancel: 1},
            Fault.REVOKE: {self.revoke: 1},
        }
        weights = Counter(usual)
        for fault in faults:
            weights.update(of_faults.get(fault, {}))
        self._steps, self._weights = list(weights), list(weights.values())

    def step(self) -> None:
        self.random.choices(self._steps, self._weights)[0]()
        self.check()

    def check(self) -> None:
        crossing, decode = self.crossing, self.crossing.decode
        assert (decode.memory.array[decode.others] == OTHERS_BYTE).all(), "somebody else's blocks were written to"
        decode.check_attached()
        decode.pool.check()
        assert len(crossing.outcomes) == int(crossing.sender.is_ended), "the outcome comes once, at the end"
        assert decode.num_attached or not any(isinstance(outcome, Attached) for outcome in crossing.outcomes)

    def pick(self) -> int:
        """Index of a message in flight."""
        return 0 if self.is_ordered else self.random.randrange(len(self.crossing.packets))

    def deliver(self) -> None:
        if self.crossing.packets and self.crossing.is_running:
            self.crossing.deliver(self.crossing.packets.pop(self.pick()))

    def repeat(self) -> None:
        """A copy stays in flight, behind the others."""
        if self.crossing.packets and self.crossing.is_running:
            packet = self.crossing.packets.pop(self.pick())
            self.crossing.packets.append(packet)
            self.crossing.deliver(packet)

    def lose_message(self) -> None:
        if self.crossing.packets:
            self.crossing.packets.pop(self.pick())

    def cut(self) -> None:
        packets = self.crossing.packets
        for index, packet in enumerate(packets):
            if packet.payload:
                packets[index] = replace(packet, payload=packet.payload[:-1])
                return

    def write(self) -> None:
        setup = self.crossing.setup
        if self.crossing.is_running:
            group, num_blocks = self.random.randrange(setup.num_groups), self.random.randint(1, setup.num_blocks)
            self.crossing.compute(group, num_blocks)
            self.crossing.obey(self.crossing.sender.written(range(group, group + 1), num_blocks, self.crossing.now))

    def finish(self) -> None:
        if self.crossing.is_running:
            self.crossing.finish()

    def wait(self) -> None:
        """A short while, in which both loops come round."""
        self.crossing.now += self.random.uniform(0.0, LEASE_SECONDS / 6)
        self.crossing.tick_sender()
        self.crossing.tick_receiver()

    def jump(self) -> None:
        self.crossing.now += self.random.choice([LEASE_SECONDS / 3, LEASE_SECONDS * 0.8, LEASE_SECONDS * 1.2])

    def cancel(self) -> None:
        if self.crossing.is_running:
            self.crossing.obey(self.crossing.sender.cancel("the client left"))

    def revoke(self) -> None:
        decode = self.crossing.decode
        if decode.receiver is not None:
            decode.obey(decode.receiver.revoke("the client left", self.crossing.now))

    def others_take(self) -> None:
        decode = self.crossing.decode
        taken = decode.pool.take(decode.pool.num_available)
        decode.memory.array[taken] = OTHERS_BYTE
        decode.others += taken

    def others_give_back(self) -> None:
        decode = self.crossing.decode
        decode.pool.give_back(decode.others)
        decode.others = []

    def die(self) -> None:
        self.crossing.is_dead = True

    def stall(self) -> None:
        self.crossing.is_stalled = True

    def wake(self) -> None:
        if self.crossing.is_stalled and not self.crossing.is_dead:
            self.crossing.wake()

    def declare_dead(self) -> None:
        if not self.crossing.is_running:
            self.crossing.lose()


@settings(max_examples=1500, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    faults=st.frozensets(st.sampled_from(Fault)),
    num_blocks=st.integers(1, 4),
    num_cached=st.integers(0, 1),
    num_groups=st.integers(1, 3),
    transport=st.sampled_from(["shm", "tcp"]),
)
def test_whatever_goes_wrong_nothing_but_whole_kv_attaches_no_block_is_lost_and_all_ends(
    seed: int, faults: frozenset[Fault], num_blocks: int, num_cached: int, num_groups: int, transport: str
) -> None:
    crossing = Crossing(Setup(num_blocks, num_cached, num_groups, transport))
    walk = RandomWalk(crossing, faults, Random(seed))
    for _ in range(60):
        walk.step()
    come_to_rest(crossing)
    if not faults:
        assert crossing.decode.num_attached == 1


def come_to_rest(crossing: Crossing) -> None:
    """No more faults: everything ends within the patience of both sides, and every block is free again."""
    crossing.decode.pool.give_back(crossing.decode.others)
    crossing.decode.others = []
    crossing.is_stalled = False
    if crossing.is_dead:
        crossing.packets[:] = []
        crossing.lose()
    else:
        crossing.finish()
    for _ in range(3 * sending.MAX_OFFERS + 6 * receiving.LINGER_LEASES):
        crossing.deliver_all()
        crossing.tick_sender()
        crossing.tick_receiver()
        crossing.now += LEASE_SECONDS / 3
    assert crossing.is_over
    crossing.decode.finish_decoding()
    assert crossing.decode.pool.books().free == POOL_BLOCKS
