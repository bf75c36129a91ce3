"""Links over channels that break, and channels that only one side still wants."""

import time
from collections.abc import Iterator

import pytest

from crossdock.core.messages import Role
from crossdock.core.part import TransferFailed
from crossdock.kvtransfer.nccl import NcclTransport
from crossdock.kvtransfer.transport import LinkDown

from .test_links import ROUTER, Cluster, header


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    for worker in made.workers:
        worker.close()


def test_a_link_whose_transport_broke_is_told_and_another_probe_finds_a_way(cluster: Cluster) -> None:
    prefill, decode = cluster.add("p", Role.PREFILL, "nccl"), cluster.add("d", Role.DECODE, "nccl")
    cluster.meet()
    cluster.run_until(cluster.post.links_told)
    cluster.settle()
    (transport,) = prefill.links._transports.values()
    assert isinstance(transport, NcclTransport)
    channel = transport._ways[decode.me].channel
    channel.end("no progress for 5 s")
    cluster.run_until(lambda: channel.is_gone)
    with pytest.raises(LinkDown):
        prefill.links.push(decode.me, header(0, [1]), [1])
    with pytest.raises(TransferFailed, match="there is no link to d"):
        prefill.links.push(decode.me, header(0, [1]), [1])
    cluster.run_until(lambda: len(cluster.post.links_told()) == 3)
    told = [(link.transport, link.error) for link in cluster.post.links_told()]
    assert told == [("nccl", ""), ("", "the channel has failed: no progress for 5 s"), ("nccl", "")]
    prefill.links.push(decode.me, header(0, [1]), [1])
    cluster.run_until(lambda: decode.arrived)
    cluster.settle()


def test_a_transport_that_one_side_does_not_choose_still_brings_what_the_other_sends(cluster: Cluster) -> None:
    one, other = cluster.add("p", Role.MIXED, "nccl"), cluster.add("d", Role.MIXED, "nccl")
    cluster.meet()
    cluster.run_until(lambda: len(cluster.post.links_told()) == 2)
    (transport,) = one.links._transports.values()
    transport.forget(other.me)
    other.links.push(one.me, header(0, [1]), [1])
    cluster.run_until(lambda: one.arrived)
    one.links.update(ROUTER, [one.info], time.monotonic())
    assert isinstance(transport, NcclTransport)
    assert transport.inbox._sources == {}  # the dead bring nothing
