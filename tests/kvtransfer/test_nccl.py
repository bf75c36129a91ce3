"""Pieces over channels: rings of buffers, headers that lie, come late or not at all, and peers that leave."""

import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import numpy as np
import pytest

from crossdock.core.kv_layout import KvLayout
from crossdock.core.mailbox import Mailbox
from crossdock.core.messages import (
    Abort,
    ChannelEnded,
    ChannelInvite,
    Incarnation,
    LeaseId,
    Message,
    Peer,
    PieceSent,
    Push,
)
from crossdock.core.part import Delivery, TransferFailed
from crossdock.core.request import RequestId, TransferId
from crossdock.kvtransfer.nccl import NcclTransport
from crossdock.kvtransfer.nccl_inbox import MAX_AHEAD, MAX_CHANNELS, invitation_code
from crossdock.kvtransfer.pool_bytes import NUM_STAGING, PoolBytes
from crossdock.kvtransfer.transport import BlockCopy, LinkDown, NotReachable

from ..parts import Clock, turn_until
from .stub_network import stub_network, stub_path

LAYOUT = KvLayout(num_layers=2, num_kv_heads=4, head_dim=16, block_size=64, dtype="float32")
BLOCK_WORDS = LAYOUT.block_bytes // 4
NUM_BLOCKS = 80
STAGING_BYTES = 4 * LAYOUT.block_bytes
NUM_PIECES = NUM_BLOCKS // 4
PATIENCE_SECONDS = 1.0
KEY = b"key"


class Post(Mailbox):
    """A mailbox whose outgoing messages a test may hold up, double or lose."""

    def __init__(self, incarnation: str) -> None:
        super().__init__("127.0.0.1", 0, Incarnation(incarnation))
        self.deliver: Callable[[Peer, Message], None] | None = None

    def send(self, to: Peer, message: Message, payload: bytes | bytearray | memoryview | None = None) -> None:
        if self.deliver is None:
            self.send_now(to, message)
        else:
            self.deliver(to, message)

    def send_now(self, to: Peer, message: Message) -> None:
        super().send(to, message)


class Side:
    """A pool with its transport; that of ``p`` has numbered elements."""

    def __init__(self, name: str, clock: Clock) -> None:
        self.me = Peer(f"control of {name}", Incarnation(name))
        memory = bytearray(NUM_BLOCKS * LAYOUT.block_bytes)
        self.memory = np.frombuffer(memory, np.float32)
        if name == "p":
            self.memory[:] = np.arange(1, self.memory.size + 1)
        self.pool = PoolBytes(memoryview(memory), NUM_BLOCKS, LAYOUT, 1, STAGING_BYTES)
        self.post = Post(name)
        network = stub_network(stub_path())
        self.transport = NcclTransport(self.pool, network, self.post, KEY, PATIENCE_SECONDS, lambda: None, clock)
        self.arrived: list[Delivery] = []

    def open(self, other: "Side") -> None:
        self.transport.open(other.me, other.transport.card, NUM_BLOCKS)

    def push(self, to: "Side", sources: list[int], destinations: list[int]) -> bool:
        copy = BlockCopy(sources, destinations, self.pool.all_layers)
        return self.transport.push(to.me, header(destinations), copy).is_done

    def turn(self) -> None:
        while (delivery := self.transport.inbox.receive()) is not None:
            assert isinstance(delivery.message, Push)
            self.pool.land(delivery.message, delivery.payload)
            self.arrived.append(delivery)

    @property
    def landed(self) -> list[list[int]]:
        return [delivery.message.blocks for delivery in self.arrived if isinstance(delivery.message, Push)]


class Pair:
    def __init__(self) -> None:
        self.clock = Clock()
        self.prefill, self.decode = Side("p", self.clock), Side("d", self.clock)
        self.prefill.open(self.decode)

    def run_until(self, is_done: Callable[[], object]) -> None:
        turn_until(is_done, self.prefill.turn, self.decode.turn)

    def run_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.run_until(lambda: time.monotonic() > end)

    def run_until_down(self) -> str:
        """The reason that the prefill side has for it."""
        self.run_until(lambda: self.prefill.transport._ways[self.decode.me].is_down)
        return str(self.prefill.transport._ways[self.decode.me].channel.failure)

    def holds(self, source: int, destination: int) -> bool:
        there = self.decode.pool.array[destination]
        return bool(np.array_equal(self.prefill.pool.array[source], there))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.prefill.transport.close()
    made.decode.transport.close()


def header(blocks: list[int]) -> Push:
    return Push(
        transfer_id=TransferId("t"), lease_id=LeaseId(0), generation=0, group=0, blocks=blocks, transport="nccl"
    )


def test_a_push_of_more_bytes_than_all_buffers_hold_arrives_piece_by_piece(pair: Pair) -> None:
    blocks = list(range(NUM_BLOCKS))
    assert NUM_PIECES > 2 * NUM_STAGING
    assert not pair.prefill.push(pair.decode, blocks, blocks[::-1])  # the sources are not free yet
    pair.run_until(lambda: len(pair.decode.arrived) == NUM_PIECES)
    assert np.array_equal(pair.decode.pool.array, pair.prefill.pool.array[::-1])
    assert [block for piece in pair.decode.landed for block in piece] == blocks[::-1]
    assert {delivery.sender.incarnation for delivery in pair.decode.arrived} == {"p"}


def test_what_fits_the_buffers_is_packed_at_once_even_before_the_peer_has_joined(pair: Pair) -> None:
    assert pair.prefill.push(pair.decode, [3, 5], [0, 1])
    pair.prefill.memory[:] = -1.0
    pair.run_until(lambda: pair.decode.arrived)
    assert pair.decode.memory[[0, BLOCK_WORDS]].tolist() == [3.0 * BLOCK_WORDS + 1, 5.0 * BLOCK_WORDS + 1]


def test_a_peer_that_is_not_open_gets_nothing(pair: Pair) -> None:
    pair.prefill.transport.forget(pair.decode.me)
    with pytest.raises(TransferFailed, match="no channel"):
        pair.prefill.push(pair.decode, [0], [0])


def test_bulk_goes_both_ways_at_once(pair: Pair) -> None:
    pair.decode.open(pair.prefill)
    pair.decode.memory[:] = -np.arange(1, pair.decode.memory.size + 1)
    here, there = pair.prefill.pool.array.copy(), pair.decode.pool.array.copy()
    half = NUM_BLOCKS // 2
    for first in range(0, half, 8):
        low, high = list(range(first, first + 8)), list(range(half + first, half + first + 8))
        pair.prefill.push(pair.decode, low, high)
        pair.decode.push(pair.prefill, low, high)
    pair.run_until(lambda: len(pair.decode.arrived) == len(pair.prefill.arrived) == half // 4)
    assert np.array_equal(pair.decode.pool.array[half:], here[:half])
    assert np.array_equal(pair.prefill.pool.array[half:], there[:half])


def test_the_library_is_named_where_the_link_is_told(pair: Pair) -> None:
    assert pair.prefill.transport.detail(pair.decode.me) == "NCCL 2.27.0"


# --- headers that are late, repeated, out of order or lost ---------------------------------------------


def test_headers_in_any_order_and_repeated_bring_every_piece_to_its_place(pair: Pair) -> None:
    chance, held = random.Random(2), list[tuple[Peer, Message]]()

    def is_done() -> bool:
        for to, message in chance.sample(held, len(held)):
            for _ in range(chance.randrange(1, 3)):
                pair.prefill.post.send_now(to, message)
        held.clear()
        return len(pair.decode.arrived) == 61

    pair.prefill.push(pair.decode, [0], [0])
    pair.run_until(lambda: pair.decode.arrived)
    pair.prefill.post.deliver = lambda to, message: held.append((to, message))
    blocks = list(range(NUM_BLOCKS))
    for block in blocks[:60]:
        pair.prefill.push(pair.decode, [block], [block])
    pair.run_until(is_done)
    assert pair.decode.landed[1:] == [[block] for block in blocks[:60]]
    assert np.array_equal(pair.decode.pool.array[:60], pair.prefill.pool.array[:60])


def test_a_lost_header_ends_the_channel_and_the_next_one_works(pair: Pair) -> None:
    pair.prefill.push(pair.decode, [0], [0])
    pair.run_until(lambda: pair.decode.arrived)
    pair.prefill.post.deliver = lambda to, message: None
    pair.prefill.push(pair.decode, [1], [1])
    pair.prefill.post.deliver = None
    pair.prefill.push(pair.decode, [2], [2])
    assert pair.run_until_down() == "no progress for 1 s"
    with pytest.raises(LinkDown, match=r"the channel has failed: no progress for 1 s"):
        pair.prefill.push(pair.decode, [3], [3])
    pair.prefill.open(pair.decode)
    pair.prefill.push(pair.decode, [4], [4])
    pair.run_until(lambda: len(pair.decode.arrived) == 2)
    assert pair.decode.landed == [[0], [4]]
    assert pair.holds(4, 4) and not pair.decode.pool.array[1:4].any()


def test_a_header_that_is_missing_while_later_ones_are_here_is_lost_after_a_while(pair: Pair) -> None:
    pair.prefill.push(pair.decode, [0], [0])
    pair.run_until(lambda: pair.decode.arrived)
    inbox = pair.decode.transport.inbox
    source = inbox._sources[Incarnation("p")]
    inbox._announced(PieceSent(channel=1, number=2, num_bytes=8, message=header([0])), source.sender)
    for now, is_known in ((0.0, True), (0.9, True), (1.1, False)):
        pair.clock.now = now
        pair.decode.turn()
        assert (Incarnation("p") in inbox._sources) is is_known
    assert pair.run_until_down() == "header 1 was lost"


def test_a_lost_invitation_is_noticed_in_time(pair: Pair) -> None:
    pair.prefill.post.deliver = lambda to, message: None
    pair.prefill.push(pair.decode, [0], [0])
    assert pair.run_until_down() == "no progress for 1 s"
    pair.prefill.post.deliver = None
    pair.prefill.open(pair.decode)
    pair.prefill.push(pair.decode, [1], [1])
    pair.run_until(lambda: pair.decode.arrived)
    assert pair.decode.landed == [[1]]


# --- peers that leave ----------------------------------------------------------------------------------


def test_a_peer_that_lets_go_is_heard_at_once_and_what_was_under_way_ends(pair: Pair) -> None:
    pair.prefill.push(pair.decode, [0], [0])
    pair.run_until(lambda: pair.decode.arrived)
    blocks = list(range(NUM_BLOCKS))
    copy = BlockCopy(blocks, blocks, pair.prefill.pool.all_layers)
    packing = pair.prefill.transport.push(pair.decode.me, header(blocks), copy)
    source = pair.decode.transport.inbox._sources[Incarnation("p")]
    pair.decode.transport.inbox._fail(source, "the test wants it")
    assert pair.run_until_down() == "the test wants it"
    assert packing.is_done  # nobody waits for the rest of it any more


def test_a_sender_that_lets_go_ends_the_other_side_which_keeps_no_buffers(pair: Pair) -> None:
    pair.prefill.push(pair.decode, [0], [0])
    pair.run_until(lambda: pair.decode.arrived)
    pair.prefill.transport.forget(pair.decode.me)
    inbox = pair.decode.transport.inbox
    pair.run_until(lambda: not inbox._sources)
    pair.run_until(lambda: all(channel.is_gone for channel in inbox._ending))


def test_a_forgotten_peer_may_come_again(pair: Pair) -> None:
    blocks = list(range(NUM_BLOCKS))
    pair.prefill.push(pair.decode, blocks, blocks)
    pair.run_until(lambda: pair.decode.arrived)
    pair.prefill.transport.forget(pair.decode.me)
    pair.decode.transport.inbox.forget(pair.prefill.me)
    pair.prefill.open(pair.decode)
    pair.decode.arrived.clear()
    pair.prefill.push(pair.decode, [1], [39])
    pair.run_until(lambda: [39] in pair.decode.landed)
    assert pair.holds(1, 39)


def test_a_dead_sender_in_mid_push_leaves_the_others_alone(pair: Pair) -> None:
    third = Side("q", pair.clock)
    third.open(pair.decode)
    third.memory[:] = 7.0
    third.push(pair.decode, [0], [1])
    pair.prefill.push(pair.decode, [0], [0])
    pair.run_until(lambda: third.turn() or len(pair.decode.arrived) == 2)  # type: ignore[func-returns-value]
    pair.prefill.post.deliver = lambda to, message: None
    pair.prefill.push(pair.decode, [2], [2])
    pair.decode.transport.inbox.forget(pair.prefill.me)
    third.push(pair.decode, [0], [3])
    pair.run_until(lambda: third.turn() or len(pair.decode.arrived) == 3)  # type: ignore[func-returns-value]
    assert pair.decode.memory[3 * BLOCK_WORDS] == 7.0
    third.transport.close()


def test_random_pushes_with_sudden_ends_bring_right_bytes_or_none(pair: Pair) -> None:
    chance = random.Random(6)
    is_landed = np.zeros(NUM_BLOCKS, bool)
    for _ in range(150):
        block, count = chance.randrange(NUM_BLOCKS - 12), chance.randrange(1, 12)
        with suppress(LinkDown):
            blocks = list(range(block, block + count))
            pair.prefill.push(pair.decode, blocks, blocks)
        pair.run_for(chance.random() * 0.015)
        event = chance.random()
        if event < 0.03:
            pair.prefill.transport.forget(pair.decode.me)
        elif event < 0.06:
            pair.decode.transport.inbox.forget(pair.prefill.me)
        elif event < 0.09:
            pair.prefill.transport._ways[pair.decode.me].channel.end("the test wants it")
        with suppress(NotReachable):
            pair.prefill.open(pair.decode)
    pair.run_until(lambda: all(channel.is_gone for channel in pair.prefill.transport._ending))
    for blocks in pair.decode.landed:
        is_landed[blocks] = True
    assert is_landed.sum() > NUM_BLOCKS // 2
    assert np.array_equal(pair.decode.pool.array[is_landed], pair.prefill.pool.array[is_landed])
    assert not pair.decode.pool.array[~is_landed].any()


# --- messages that lie -----------------------------------------------------------------------------------


class Rogue:
    """Somebody with a mailbox."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        self.mailbox = Mailbox("127.0.0.1", 0, Incarnation("rogue"))
        self.to = Peer(pair.decode.post.peer.address, Incarnation("d"))
        self.heard: list[Message] = []

    def say(self, message: Message) -> None:
        self.mailbox.send(self.to, message)

    def invite(self, channel: int = 1, key: bytes = KEY) -> None:
        unique_id = bytes(128)
        self.say(ChannelInvite(channel=channel, unique_id=unique_id, code=invitation_code(key, unique_id)))

    def hear(self, count: int = 1) -> list[Message]:
        def is_heard() -> bool:
            while (delivery := self.mailbox.receive()) is not None:
                self.heard.append(delivery.message)
            return len(self.heard) >= count

        self.pair.run_until(is_heard)
        return self.heard


@pytest.fixture
def rogue(pair: Pair) -> Iterator[Rogue]:
    made = Rogue(pair)
    yield made
    made.mailbox.close()


def ended(channel: int, reason: str) -> ChannelEnded:
    return ChannelEnded(channel=channel, inviter=Incarnation("rogue"), reason=reason)


def assert_still_served(pair: Pair) -> None:
    pair.decode.arrived.clear()
    pair.prefill.push(pair.decode, [1], [2])
    pair.run_until(lambda: pair.decode.arrived)
    assert (pair.decode.landed, pair.holds(1, 2)) == ([[2]], True)


def test_an_invitation_of_another_cluster_is_counted_and_nobody_joins(pair: Pair, rogue: Rogue) -> None:
    rogue.invite(key=b"another")
    pair.run_until(lambda: pair.decode.transport.inbox.num_rejected == 1)
    assert Incarnation("rogue") not in pair.decode.transport.inbox._sources
    assert_still_served(pair)


def test_an_invitation_to_nowhere_is_answered(pair: Pair, rogue: Rogue) -> None:
    rogue.invite()
    assert rogue.hear() == [ended(1, "system error")]
    assert_still_served(pair)


def test_a_piece_of_an_unknown_channel_is_answered(pair: Pair, rogue: Rogue) -> None:
    rogue.say(PieceSent(channel=3, number=0, num_bytes=8, message=header([0])))
    assert rogue.hear() == [ended(3, "the peer does not know this channel")]
    assert_still_served(pair)


@pytest.mark.parametrize(
    ("number", "num_bytes"), [(0, 0), (0, -1), (0, STAGING_BYTES + 1), (0, 1 << 40), (MAX_AHEAD, 8)], ids=str
)
def test_a_header_that_makes_no_sense_ends_its_channel(pair: Pair, rogue: Rogue, number: int, num_bytes: int) -> None:
    rogue.invite()
    rogue.say(PieceSent(channel=1, number=number, num_bytes=num_bytes, message=header([0])))
    assert rogue.hear() == [ended(1, f"piece {number} of {num_bytes} bytes makes no sense here")]
    assert pair.decode.transport.inbox.num_rejected == 1
    assert_still_served(pair)


def test_other_messages_are_counted(pair: Pair, rogue: Rogue) -> None:
    rogue.say(Abort(request_id=RequestId("r")))
    pair.run_until(lambda: pair.decode.transport.inbox.num_rejected == 1)
    assert_still_served(pair)


def test_nobody_ends_the_channel_of_another(pair: Pair, rogue: Rogue) -> None:
    assert_still_served(pair)
    rogue.say(ChannelEnded(channel=1, inviter=Incarnation("p"), reason="because"))
    rogue.say(ChannelEnded(channel=1, inviter=Incarnation("d"), reason="because"))
    rogue.say(PieceSent(channel=3, number=0, num_bytes=8, message=header([0])))
    rogue.hear()
    assert_still_served(pair)


def test_announced_bytes_that_never_come_end_the_channel_in_time(pair: Pair, rogue: Rogue) -> None:
    network = stub_network(stub_path())
    unique_id = network.new_id()
    rogue.say(ChannelInvite(channel=1, unique_id=unique_id, code=invitation_code(KEY, unique_id)))
    rogue.say(PieceSent(channel=1, number=0, num_bytes=8, message=header([0])))
    assert rogue.hear() == [ended(1, "no progress for 1 s")]
    assert_still_served(pair)


def test_there_are_no_more_channels_than_rings_may_exist(
    pair: Pair, rogue: Rogue, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert MAX_CHANNELS == 8
    monkeypatch.setattr("crossdock.kvtransfer.nccl_inbox.MAX_CHANNELS", 1)
    assert_still_served(pair)
    rogue.invite()
    assert rogue.hear() == [ended(1, "the peer has its 1 channels")]
    monkeypatch.setattr("crossdock.kvtransfer.nccl.MAX_CHANNELS", 1)
    with pytest.raises(NotReachable, match="1 channels"):
        pair.prefill.transport.open(Peer("x", Incarnation("x")), pair.decode.transport.card, NUM_BLOCKS)
