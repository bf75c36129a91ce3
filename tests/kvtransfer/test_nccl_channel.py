"""One channel between two threads, and its end in every state; the communicator is the stub's."""

import random
import time
from collections.abc import Callable, Iterator
from ctypes import CDLL
from functools import partial
from operator import attrgetter

import numpy as np
import pytest
from numpy.typing import NDArray

from crossdock.kvtransfer.nccl_channel import Carried, Channel, CommunicatorFailed, Rank, _unsafe
from crossdock.kvtransfer.nccl_library import NcclCommunicator, NcclLibrary, NcclNetwork, NoNccl

from .stub_network import stub, stub_network, stub_path

PATIENCE_SECONDS = 0.3
Bytes = NDArray[np.uint8]


@pytest.fixture
def library() -> Iterator[CDLL]:
    made = stub(stub_path())
    yield made
    made.stubNoticesDeath(0)
    made.stubDelaysAbort(0)
    made.stubSetVersion(22700)


@pytest.fixture
def network(library: CDLL) -> NcclNetwork:
    return stub_network(stub_path())


def nothing() -> None: ...


def until(is_true: Callable[[], object], *channels: Channel) -> None:
    end = time.monotonic() + 20.0
    while not is_true():
        assert time.monotonic() < end, "not within 20 s"
        for channel in channels:
            channel.advance()
        time.sleep(0.001)


class Ends:
    """Both sides of one channel."""

    def __init__(self, network: NcclNetwork, patience_seconds: float = 20.0) -> None:
        self.sender = Channel(network, Rank.SENDER, patience_seconds, nothing)
        until(lambda: self.sender.unique_id)
        self.receiver = Channel(network, Rank.RECEIVER, patience_seconds, nothing, self.sender.unique_id)

    def send(self, data: Bytes) -> Carried:
        return self.sender.carry(data, len(data))

    def receive(self, num_bytes: int) -> tuple[Carried, Bytes]:
        into = np.zeros(num_bytes, np.uint8)
        return self.receiver.carry(into, num_bytes), into

    def until(self, is_true: Callable[[], object]) -> None:
        until(is_true, self.sender, self.receiver)

    def go_on_for(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        self.until(lambda: time.monotonic() > end)

    def close(self) -> None:
        self.sender.end("the test is over")
        self.receiver.end("the test is over")
        until(lambda: self.sender.is_gone and self.receiver.is_gone)


@pytest.fixture
def ends(network: NcclNetwork) -> Iterator[Ends]:
    made = Ends(network)
    yield made
    made.close()


def data_of(num_bytes: int, seed: int = 0) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def test_buffers_arrive_whole_and_in_order_however_many_are_started_together(ends: Ends) -> None:
    sizes = [1, 100_000, 7, 3_000_000, 64, 65_536]
    sent = [data_of(size, number) for number, size in enumerate(sizes)]
    sending = [ends.send(data) for data in sent[:4]]
    arriving = [ends.receive(size) for size in sizes[:2]]
    ends.until(lambda: arriving[1][0].is_done)
    arriving += [ends.receive(size) for size in sizes[2:]]
    sending += [ends.send(data) for data in sent[4:]]
    ends.until(lambda: all(carried.is_done for carried in [*sending, *(each for each, _ in arriving)]))
    assert all(np.array_equal(data, into) for data, (_, into) in zip(sent, arriving, strict=True))


def test_nothing_is_done_before_it_is(ends: Ends) -> None:
    sending = ends.send(data_of(1000))
    ends.go_on_for(0.05)
    assert not sending.is_done
    arriving, into = ends.receive(1000)
    ends.until(lambda: sending.is_done and arriving.is_done)
    assert np.array_equal(into, data_of(1000))


def test_an_idle_channel_is_patient(network: NcclNetwork) -> None:
    ends = Ends(network, PATIENCE_SECONDS)
    arriving, _ = ends.receive(10)
    ends.send(data_of(10))
    ends.until(lambda: arriving.is_done)
    time.sleep(2 * PATIENCE_SECONDS)
    arriving, into = ends.receive(10)
    ends.send(data_of(10))
    ends.until(lambda: arriving.is_done)
    assert (ends.sender.failure, ends.receiver.failure, into.tolist()) == (None, None, data_of(10).tolist())
    ends.close()


def test_a_peer_that_never_joins_is_given_up_in_time(network: NcclNetwork) -> None:
    sender = Channel(network, Rank.SENDER, PATIENCE_SECONDS, nothing)
    until(lambda: sender.is_gone)
    assert sender.failure == "no progress for 0.3 s"


def test_bytes_that_never_come_end_the_channel_in_time(network: NcclNetwork) -> None:
    ends = Ends(network, PATIENCE_SECONDS)
    arriving, _ = ends.receive(10)
    ends.until(lambda: ends.receiver.is_gone)
    assert (ends.receiver.failure, arriving.is_done) == ("no progress for 0.3 s", False)
    ends.close()


def test_a_receive_of_another_size_ends_both_sides_in_time(network: NcclNetwork) -> None:
    ends = Ends(network, PATIENCE_SECONDS)
    arriving, _ = ends.receive(10)
    sending = ends.send(data_of(11))
    ends.until(lambda: ends.receiver.is_gone and ends.sender.is_gone)
    assert (arriving.is_done, sending.is_done) == (False, False)


def test_an_error_of_the_library_ends_the_channel_at_once(network: NcclNetwork, library: CDLL) -> None:
    library.stubNoticesDeath(1)
    ends = Ends(network)
    arriving, _ = ends.receive(10)
    ends.go_on_for(0.05)
    ends.sender.end("the test wants it")
    ends.until(lambda: ends.receiver.is_gone)
    assert (ends.sender.failure, ends.receiver.failure) == ("the test wants it", "remote process exited")
    assert not arriving.is_done


def test_an_id_that_is_none_fails(network: NcclNetwork) -> None:
    for unique_id, failure in ((b"x", "an id has 128 bytes, not 1"), (b"x" * 128, "system error")):
        receiver = Channel(network, Rank.RECEIVER, PATIENCE_SECONDS, nothing, unique_id)
        until(partial(attrgetter("is_gone"), receiver))
        assert receiver.failure == failure


def test_a_channel_is_gone_only_when_the_abort_has_returned(network: NcclNetwork, library: CDLL) -> None:
    ends = Ends(network)
    ends.receive(10)
    ends.go_on_for(0.05)
    library.stubDelaysAbort(300_000)
    ends.receiver.end("the test wants it")
    ends.until(lambda: ends.receiver.failure)
    assert not ends.receiver.is_gone
    begun = time.monotonic()
    ends.until(lambda: ends.receiver.is_gone)
    assert time.monotonic() - begun > 0.2
    ends.close()


def test_buffers_whose_abort_has_failed_are_kept_for_ever(
    network: NcclNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: NcclCommunicator) -> None:
        raise CommunicatorFailed("it does not work")

    ends = Ends(network)
    _, into = ends.receive(10)
    ends.go_on_for(0.05)
    with monkeypatch.context() as patched:
        patched.setattr(NcclCommunicator, "abort", fail)
        ends.receiver.end("the test wants it")
        ends.until(lambda: ends.receiver.is_gone)
    assert any(item.buffer is into for item in _unsafe)
    _unsafe.clear()
    ends.sender.end("the test is over")


def test_channels_both_ways_with_random_sizes_and_sudden_ends_bring_only_what_was_sent(network: NcclNetwork) -> None:
    chance = random.Random(4)
    for _ in range(8):
        pairs = [Ends(network), Ends(network)]
        sent: list[list[Bytes]] = [[], []]
        arriving: list[list[tuple[Carried, Bytes]]] = [[], []]
        sizes: list[list[int]] = [[chance.randrange(1, 300_000) for _ in range(30)] for _ in pairs]
        for _ in range(80):
            way = chance.randrange(2)
            if chance.random() < 0.5 and len(sent[way]) < 30:
                sent[way].append(data_of(sizes[way][len(sent[way])], chance.randrange(1000)))
                pairs[way].send(sent[way][-1])
            elif len(arriving[way]) < 30:
                arriving[way].append(pairs[way].receive(sizes[way][len(arriving[way])]))
            for pair in pairs:
                pair.go_on_for(chance.random() * 0.001)
        chance.choice([pairs[0].sender, pairs[0].receiver]).end("the test wants it")
        num_matched = min(len(sent[1]), len(arriving[1]))
        pairs[1].until(lambda: all(carried.is_done for carried, _ in arriving[1][:num_matched]))  # noqa: B023
        for pair in pairs:
            pair.close()
        for way in range(2):
            done = [into for carried, into in arriving[way] if carried.is_done]
            assert all(np.array_equal(into, data) for into, data in zip(done, sent[way], strict=False))


# --- the library -------------------------------------------------------------------------------------


def test_without_the_library_the_reason_is_told() -> None:
    with pytest.raises(NoNccl, match=r"NCCL can't be loaded: libnowhere\.so"):
        NcclLibrary("libnowhere.so")


def test_a_library_whose_abort_may_hang_is_refused(library: CDLL) -> None:
    library.stubSetVersion(21805)
    with pytest.raises(NoNccl, match=r"NCCL 2\.18\.5 is too old, 2\.19\.0 would do"):
        NcclLibrary(stub_path())


def test_the_version_is_told(network: NcclNetwork) -> None:
    assert network.name == "NCCL 2.27.0"
