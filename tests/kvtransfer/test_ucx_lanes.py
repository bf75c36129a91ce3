"""Which lanes UCX could use and has chosen, and when TCP is a pity."""

from pathlib import Path

import pytest

from crossdock.kvtransfer.ucx_lanes import Surroundings, active_rdma_ports, advice, available_lanes, is_tcp_alone
from crossdock.kvtransfer.ucx_port import Port

INFO = """#
#            md 4  :  component 4  cma
#
#      resource 0  :  md 0  dev 0  flags -- self/memory
#      resource 10 :  md 1  dev 1  flags -- tcp/eth0
#      resource 11 :  md 2  dev 0  flags c- rc_mlx5/mlx5_0:1
"""
HERE = ["self/memory", "tcp/eth0", "tcp/lo", "sysv/memory", "posix/memory"]
VERBS = [*HERE, "rc_mlx5/mlx5_0:1"]
CUDA = [*HERE, "cuda_copy/cuda", "cuda_ipc/cuda"]


def test_the_lanes_are_read_from_what_ucx_prints_and_a_real_context_has_tcp_and_shared_memory() -> None:
    assert available_lanes(INFO) == ["self/memory", "tcp/eth0", "rc_mlx5/mlx5_0:1"]
    real = {lane.partition("/")[0] for lane in Port(b"key").available_lanes}
    assert {"tcp", "posix", "sysv"} <= real


def test_only_ports_with_a_link_count_as_rdma(tmp_path: Path) -> None:
    assert active_rdma_ports(tmp_path / "none") == []
    for port, state in (("mlx5_0/ports/1", "4: ACTIVE\n"), ("mlx5_1/ports/1", "1: DOWN\n")):
        folder = tmp_path / port
        folder.mkdir(parents=True)
        (folder / "state").write_text(state)
    assert active_rdma_ports(tmp_path) == ["mlx5_0/1"]


@pytest.mark.parametrize(
    ("lanes", "is_alone"),
    [
        (["tcp/eth0"], True),
        (["tcp/eth0", "tcp/lo", "cuda_copy/cuda"], True),
        (["tcp/lo", "posix/memory"], False),
        (["rc_mlx5/mlx5_0:1"], False),
        (["self/memory"], False),
        ([], False),
    ],
)
def test_tcp_is_alone_when_nothing_else_leads_out(lanes: list[str], is_alone: bool) -> None:
    assert is_tcp_alone(lanes) is is_alone


def around(available: list[str], *rdma_ports: str, one_host: bool = False, gpu: bool = False) -> Surroundings:
    return Surroundings(available, rdma_ports, one_host, gpu)


@pytest.mark.parametrize(
    ("surroundings", "words"),
    [
        (around(HERE, one_host=True), "posix, sysv are there"),
        (around(CUDA, one_host=True, gpu=True), "both GPUs are in one host"),
        (around(HERE, "mlx5_0/1"), "mlx5_0/1 has RDMA, but this UCX was built without it"),
        (around(VERBS, "mlx5_0/1"), "UCX_NET_DEVICES"),
    ],
    ids=["shared memory", "cuda_ipc", "no verbs", "verbs"],
)
def test_tcp_is_warned_of_where_something_better_is_there(surroundings: Surroundings, words: str) -> None:
    assert words in advice(["tcp/eth0"], surroundings)
    assert advice(["posix/memory", "tcp/eth0"], surroundings) == ""


@pytest.mark.parametrize("surroundings", [around(HERE), around(HERE, gpu=True, one_host=True), around(["tcp/lo"])])
def test_tcp_where_nothing_else_leads_is_no_fault(surroundings: Surroundings) -> None:
    assert advice(["tcp/eth0"], surroundings) == ""
