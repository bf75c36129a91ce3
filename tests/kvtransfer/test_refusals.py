"""A decode worker that will not have KV from a prefill worker which differs from it, whatever the router says."""

import time
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from crossdock.core.kv_layout import KvLayout
from crossdock.core.messages import Incarnation, Link, Peer, PeerInfo, Refused, Role
from crossdock.core.part import Delivery, TransferFailed

from .test_links import LAYOUT, LEASE_SECONDS, NUM_BLOCKS, ROUTER, Cluster, header


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    made = Cluster()
    yield made
    for worker in made.workers:
        worker.close()


OTHER_DTYPE = replace(LAYOUT, dtype="bfloat16")


@pytest.mark.parametrize(
    ("layout", "claims", "difference"),
    [
        (LAYOUT, {"model": "n"}, "model differs: m at the decode worker, n at the prefill worker"),
        (LAYOUT, {"weights": "2"}, "weights differs:  at the decode worker, 2 at the prefill worker"),
        (OTHER_DTYPE, {}, "layout.dtype differs: float32 at the decode worker, bfloat16 at the prefill worker"),
    ],
    ids=["model", "weights", "dtype"],
)
def test_a_decode_worker_asks_who_wants_to_send_kv_and_does_not_trust_the_router_alone(
    layout: KvLayout,
    claims: dict[str, object],
    difference: str,
    cluster: Cluster,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prefill, decode = cluster.add("p", Role.PREFILL, "tcp", layout, **claims), cluster.add("d", Role.DECODE, "tcp")
    as_told = msgspec.structs.replace(prefill.card, role=Role.DECODE, transports=decode.card.transports)
    prefill.links.update(ROUTER, [PeerInfo(decode.me, as_told)], time.monotonic())
    decode.links.update(ROUTER, [prefill.info], time.monotonic())
    cluster.run_until(cluster.post.links_told)
    assert cluster.post.links_told() == [
        Link(to=decode.me.incarnation, transport="", error=f"it refuses: {difference}")
    ]
    told = [
        f"refused KV from control of p: {difference}",
        f"no KV goes to control of d: it refuses: {difference}",
    ]
    for _ in range(5):
        cluster.turn(seconds_ahead=2 * LEASE_SECONDS)
    assert [record.message for record in caplog.records] == told
    assert decode.pool.books().free == NUM_BLOCKS
    with pytest.raises(TransferFailed):
        prefill.links.push(decode.me, header(0, [1]), [1])


def test_a_refusal_by_a_stranger_or_too_late_changes_nothing(cluster: Cluster) -> None:
    prefill, decode = cluster.add("p", Role.PREFILL), cluster.add("d", Role.DECODE)
    cluster.meet()
    cluster.run_until(cluster.post.links_told)
    for sender in (decode.me, Peer("tcp://127.0.0.1:9", Incarnation("x"))):
        assert prefill.links.handle(Delivery(sender, Refused(reason="no")), 0.0)
    prefill.links.push(decode.me, header(1, [9]), [2])
    assert len(cluster.post.links_told()) == 1
