"""Channels between two real processes, one of which is stopped or killed in the middle of a push.

On a machine with two GPUs this is NCCL itself: ``pytest tests/kvtransfer/test_nccl_processes.py``.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator

import pytest

from crossdock.core.messages import Peer, TransportCard
from crossdock.kvtransfer.nccl_channel import CommunicatorFailed, Rank
from crossdock.kvtransfer.nccl_library import NcclLibrary, NoNccl
from crossdock.kvtransfer.transport import LinkDown

from .nccl_side import HAS_PAIR, NUM_BLOCKS, PATIENCE_SECONDS, Side, peer_of, side_process

LIMIT_SECONDS = 60.0 if HAS_PAIR else 20.0


def run_until(side: Side, is_done: Callable[[], object], limit_seconds: float = LIMIT_SECONDS) -> float:
    """The seconds that it took."""
    begun = time.monotonic()
    while not is_done():
        assert time.monotonic() - begun < limit_seconds, f"not within {limit_seconds:g} s"
        side.turn()
    return time.monotonic() - begun


@pytest.fixture
def receiver() -> Iterator[Side]:
    side = Side(is_sender=False)
    yield side
    side.transport.close()


@pytest.fixture
def sender() -> Iterator[Side]:
    side = Side(is_sender=True)
    yield side
    side.transport.close()


def sending_to(side: Side) -> tuple[str, str, str]:
    return "send", side.me.incarnation, side.transport.card.address


def test_what_another_process_pushes_for_a_while_is_whole(receiver: Side) -> None:
    with side_process(*sending_to(receiver)):
        run_until(receiver, lambda: receiver.num_landed > 100)
    assert receiver.holds_what_landed()


def test_after_a_sender_killed_in_mid_push_another_one_is_served(receiver: Side) -> None:
    inbox = receiver.transport.inbox
    with side_process(*sending_to(receiver)) as (process, _):
        run_until(receiver, lambda: receiver.num_landed > 20)
        process.kill()
        process.wait()
        run_until(receiver, lambda: not any(source.arriving for source in inbox._sources.values()), 10.0)
        receiver.transport.inbox.forget(peer_of(process, is_sender=True))
    run_until(receiver, lambda: all(channel.is_gone for channel in inbox._ending), 10.0)
    assert receiver.holds_what_landed()
    num_landed = receiver.num_landed
    with side_process(*sending_to(receiver)):
        run_until(receiver, lambda: receiver.num_landed > num_landed + 20)
    assert receiver.holds_what_landed()


def open_and_push(sender: Side, peer: Peer, card: TransportCard) -> None:
    sender.transport.open(peer, card, NUM_BLOCKS)
    sender.push(peer, list(range(NUM_BLOCKS)))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_receiver_that_is_gone_is_given_up_in_time_and_another_one_is_served(sender: Side, number: int) -> None:
    with side_process("receive") as (process, card):
        peer = peer_of(process, is_sender=False)
        open_and_push(sender, peer, card)
        way = sender.transport._ways[peer]
        run_until(sender, lambda: not way.packing and not way.sent)
        os.kill(process.pid, number)
        sender.push(peer, list(range(NUM_BLOCKS)))
        assert run_until(sender, lambda: way.is_down) < PATIENCE_SECONDS + 5.0
        with pytest.raises(LinkDown, match="no progress for"):
            sender.push(peer, [0])
        run_until(sender, lambda: way.channel.is_gone)
        with side_process("receive") as (other, other_card):
            peer = peer_of(other, is_sender=False)
            open_and_push(sender, peer, other_card)
            way = sender.transport._ways[peer]
            run_until(sender, lambda: way.num_pieces and not way.packing and not way.sent)


def real_nccl() -> NcclLibrary | None:
    try:
        return NcclLibrary()
    except NoNccl:
        return None


@pytest.mark.skipif(
    real_nccl() is None, reason="no libnccl.so.2: install torch for CUDA, or nvidia-nccl-cu13 and set LD_LIBRARY_PATH"
)
def test_the_real_library_makes_ids_and_says_why_nothing_can_be_joined() -> None:
    library = NcclLibrary()
    one, other = library.unique_id(), library.unique_id()
    assert (len(one), one != other) == (128, True)
    if not HAS_PAIR:
        with pytest.raises(CommunicatorFailed, match="cuda"):
            library.begin_joining(one, Rank.SENDER)
