"""What `crossdock doctor` makes of a host and of a fleet: each thing that is wrong, and what to do."""

from dataclasses import replace

import msgspec
import pytest

from crossdock.core.config import CPU_KV_BYTES
from crossdock.core.messages import PROTOCOL_VERSION
from crossdock.core.version import VERSION
from crossdock.deploy.findings import Devices, Finding, Gpu, Report, Severity, Trial, problem, warning
from crossdock.deploy.fleet_check import (
    FleetLink,
    FleetRefusal,
    FleetStatus,
    FleetWorker,
    TriedTransport,
    advice_on_mismatch,
    check_fleet,
    judge_fleet,
)
from crossdock.deploy.host_check import (
    GIB,
    Limits,
    judge_devices,
    judge_limits,
    judge_trials,
    look_at_devices,
    read_limits,
    transports_for,
)
from crossdock.deploy.trial import try_transport

LIMITS = Limits(
    num_files=65536,
    locked_bytes=None,
    available_bytes=8 * GIB,
    shm_free_bytes=GIB,
    num_cores=2,
    has_nvidia_driver=False,
)
CPU_HOST = Devices(python="3.11", torch="2.13.0+cpu", ucx="1.21.0", ucx_tls="all")
GPUS = [Gpu("H200", 140 * GIB, 141 * GIB, [1], [1]), Gpu("H200", 140 * GIB, 141 * GIB, [0], [0])]
GPU_HOST = msgspec.structs.replace(CPU_HOST, torch="2.13.0", cuda="13.0", driver="580", gpus=GPUS)
SHM = Trial(transport="shm", memory="host", bytes_per_second=5e9, latency_seconds=2e-4)
TCP = Trial(transport="tcp", memory="host", bytes_per_second=1e9, latency_seconds=5e-4)


def words(findings: list[Finding]) -> list[tuple[str, str]]:
    assert all(finding.to_do for finding in findings)
    return [(finding.severity.value, finding.what) for finding in findings]


# --- a host ----------------------------------------------------------------------------------------


def test_a_host_in_order_gives_no_findings() -> None:
    for devices in (CPU_HOST, GPU_HOST):
        assert [*judge_limits(LIMITS), *judge_devices(devices, LIMITS)] == []
    assert list(judge_trials([SHM, TCP], has_gpus=False)) == []


@pytest.mark.parametrize(
    ("limits", "severity", "what"),
    [
        (replace(LIMITS, num_files=1024), "warning", "may open 1024 files: the router can serve some 924 clients"),
        (replace(LIMITS, num_files=64), "problem", "may open 64 files: the router can serve some 0 clients"),
        (replace(LIMITS, shm_free_bytes=1 << 20), "warning", "/dev/shm has 1 MiB free"),
    ],
    ids=["few files", "hardly any file", "small /dev/shm"],
)
def test_limits_that_are_too_narrow_are_told(limits: Limits, severity: str, what: str) -> None:
    ((found, text),) = words(list(judge_limits(limits)))
    assert found == severity and what in text


@pytest.mark.parametrize(
    ("devices", "limits", "severity", "what"),
    [
        (
            msgspec.structs.replace(CPU_HOST, torch=""),
            LIMITS,
            "problem",
            "torch can't be imported: it is not installed",
        ),
        (
            msgspec.structs.replace(CPU_HOST, torch_error="libcudart.so.13: cannot open"),
            LIMITS,
            "problem",
            "torch can't be imported: libcudart.so.13: cannot open",
        ),
        (CPU_HOST, replace(LIMITS, has_nvidia_driver=True), "warning", "torch 2.13.0+cpu (CUDA none) sees no GPU"),
        (CPU_HOST, replace(LIMITS, available_bytes=CPU_KV_BYTES), "problem", "256 MiB of memory are available"),
        (
            msgspec.structs.replace(GPU_HOST, gpus=[Gpu("H200", 2 * GIB, 141 * GIB)]),
            LIMITS,
            "warning",
            "GPU 0 has 2.0 of 141.0 GiB free",
        ),
        (
            msgspec.structs.replace(GPU_HOST, gpus=[msgspec.structs.replace(gpu, reaches=[]) for gpu in GPUS]),
            LIMITS,
            "warning",
            "no GPU can write to another's memory",
        ),
        (
            msgspec.structs.replace(CPU_HOST, ucx="", ucx_error="No module named 'ucxx'", rdma_ports=["mlx5_0/1"]),
            LIMITS,
            "warning",
            "mlx5_0/1 has RDMA, but the ucx transport is not there: No module named 'ucxx'",
        ),
        (msgspec.structs.replace(CPU_HOST, ucx_tls="tcp"), LIMITS, "warning", "UCX_TLS is set to tcp"),
        (
            msgspec.structs.replace(CPU_HOST, rdma_ports=["mlx5_0/1"]),
            replace(LIMITS, locked_bytes=8 << 20),
            "warning",
            "only 8 MiB of memory may be locked",
        ),
    ],
    ids=["no torch", "broken torch", "CPU torch", "memory", "full GPU", "no peers", "no ucx", "UCX_TLS", "memlock"],
)
def test_devices_that_can_not_be_used_are_told(devices: Devices, limits: Limits, severity: str, what: str) -> None:
    ((found, text),) = words(list(judge_devices(devices, limits)))
    assert found == severity and what in text


def test_without_any_transport_for_the_memory_of_pools_nothing_would_work() -> None:
    broken = [msgspec.structs.replace(trial, error="no") for trial in (SHM, TCP)]
    assert words(list(judge_trials(broken, has_gpus=False))) == [
        ("problem", "no transport works between processes with pools in host"),
        ("warning", "shm (host) does not work: no"),
        ("warning", "tcp (host) does not work: no"),
    ]
    gpu = Trial(transport="cuda_ipc", memory="cuda:0 to cuda:1", bytes_per_second=9e10)
    assert [severity for severity, _ in words(list(judge_trials([*broken, gpu], has_gpus=True)))] == ["warning"] * 2


def test_a_host_that_is_slow_and_an_ucx_that_took_tcp_are_told() -> None:
    slow = msgspec.structs.replace(SHM, bytes_per_second=1e8)
    ucx = Trial(transport="ucx", memory="host", bytes_per_second=2e8, detail="tcp/lo; UCX took TCP though it need not")
    assert words(list(judge_trials([slow, ucx], has_gpus=False))) == [
        ("warning", "the fastest transport between pools in host does 0.20 GB/s"),
        ("warning", "UCX took TCP though it need not"),
    ]


def test_this_host_is_looked_at_and_a_transport_tried_between_real_processes() -> None:
    limits, devices = read_limits(), look_at_devices()
    assert isinstance(devices, Devices)
    assert limits.num_cores > 0 and limits.available_bytes > 0
    assert devices.torch and not devices.torch_error and "tcp/lo" in devices.ucx_lanes
    trial = try_transport("shm", ("cpu", "cpu"))
    assert (trial.transport, trial.memory, trial.error) == ("shm", "host", "")
    assert trial.bytes_per_second > 1e6 and 0 < trial.latency_seconds < 10


def test_a_transport_that_can_not_work_says_why() -> None:
    trial = try_transport("cuda_ipc", ("cpu", "cpu"))
    assert trial.error == "cuda_ipc is not installed, or not for host memory"
    assert transports_for(("cpu", "cpu")) == ["shm", "ucx", "tcp"]
    assert transports_for(("cuda:0", "cuda:1")) == ["cuda_ipc", "ucx", "nccl", "tcp"]


# --- a report --------------------------------------------------------------------------------------


def test_a_report_is_a_table_and_what_to_do() -> None:
    failed = Trial(transport="ucx", memory="host", error="no module")
    report = Report([("python", "3.11")], [SHM, failed], [warning("a", "b"), problem("c", "d")])
    assert report.as_text().splitlines() == [
        "python  3.11",
        "",
        "transport  memory  GB/s  latency",
        "shm        host    5.00  200 us",
        "ucx        host    -     -        no module",
        "",
        "WARNING: a",
        "  what to do: b",
        "PROBLEM: c",
        "  what to do: d",
    ]
    assert not report.is_well
    told = msgspec.json.decode(report.as_json())
    assert (told["is_well"], told["findings"][1]) == (False, {"severity": "problem", "what": "c", "to_do": "d"})
    assert told["trials"][0]["bytes_per_second"] == 5e9


def test_warnings_alone_are_no_failure() -> None:
    report = Report([("python", "3.11")], [], [warning("a", "b")])
    assert report.is_well
    assert Report([("python", "3.11")], [], []).as_text().endswith("\n\nAll is well.")
    assert Severity.WARNING in {finding.severity for finding in report.findings}


# --- a fleet ---------------------------------------------------------------------------------------


def fleet_worker(name: str, role: str, *links: FleetLink) -> FleetWorker:
    return FleetWorker(name, role, True, 0.5, ["shm", "tcp"], list(links))


TRIED = [TriedTransport("shm", 5e9, 1e-4, "", ""), TriedTransport("tcp", 1e9, 1e-3, "", "")]
FLEET = FleetStatus(
    version=VERSION,
    protocol=PROTOCOL_VERSION,
    model="m",
    is_ready=True,
    reasons=[],
    workers=[fleet_worker("p:1", "prefill", FleetLink("d:1", "shm", "", TRIED)), fleet_worker("d:1", "decode")],
    refused=[],
)


def with_link(link: FleetLink) -> FleetStatus:
    return msgspec.structs.replace(FLEET, workers=[fleet_worker("p:1", "prefill", link)])


def test_a_fleet_in_order_gives_no_findings() -> None:
    assert list(judge_fleet(FLEET)) == []


@pytest.mark.parametrize(
    ("status", "severity", "what", "to_do"),
    [
        (
            msgspec.structs.replace(FLEET, is_ready=False, reasons=["no worker that decodes is here"]),
            "problem",
            "no request is taken: no worker that decodes is here",
            "--role decode",
        ),
        (
            msgspec.structs.replace(FLEET, refused=[FleetRefusal("x:1", "layout.dtype differs: a, b", 3.0)]),
            "warning",
            "worker x:1 was refused 3 s ago: layout.dtype differs: a, b",
            "--dtype",
        ),
        (msgspec.structs.replace(FLEET, protocol=1), "warning", "(protocol 1)", "one version"),
        (
            with_link(FleetLink("d:1", "", "no transport in common", [])),
            "warning",
            "no KV can go from p:1 to d:1: no transport in common",
            "p:1 has shm, tcp",
        ),
        (
            with_link(FleetLink("d:1", "tcp", "", [TriedTransport("tcp", 1e8, 1e-3, "", "")])),
            "warning",
            "p:1 to d:1 is slow: 0.10 GB/s over tcp",
            "crossdock doctor",
        ),
        (
            with_link(FleetLink("d:1", "ucx", "", [TriedTransport("ucx", 1e9, 1e-3, "", "tcp/eth0; UCX took TCP: x")])),
            "warning",
            "p:1 to d:1: UCX took TCP: x",
            "start",
        ),
        (
            msgspec.structs.replace(FLEET, workers=[FleetWorker("p:1", "prefill", False, 0.1, [], [])]),
            "warning",
            "prefill worker p:1 takes no new requests",
            "start",
        ),
        (
            msgspec.structs.replace(FLEET, workers=[FleetWorker("p:1", "prefill", True, 2.8, [], [])]),
            "warning",
            "prefill worker p:1 was last heard of 2.8 s ago",
            "log",
        ),
    ],
    ids=["no decode", "refused", "version", "no transport", "slow", "tcp", "drains", "silent"],
)
def test_what_is_wrong_with_a_fleet_is_told(status: FleetStatus, severity: str, what: str, to_do: str) -> None:
    (finding,) = judge_fleet(status)
    assert finding.severity == severity
    assert what in finding.what and to_do in finding.to_do


def test_a_refused_worker_is_a_problem_while_the_server_is_not_ready() -> None:
    refused = [FleetRefusal("x:1", "weights differs: a, b", 3.0)]
    status = msgspec.structs.replace(FLEET, is_ready=False, refused=refused)
    (finding,) = judge_fleet(status)
    assert finding.severity is Severity.PROBLEM


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        ("protocol version differs: 3 here, 4 there", "install one version of Crossdock everywhere"),
        ("model differs: a, b; layout.num_layers differs: 1, 2", "give router and workers the same model"),
        ("num_layer_groups differs: 4, 2; layout.dtype differs: a, b", "--dtype and --layer-groups"),
        ("layout.block_size differs: 16, 32", "--block-size"),
    ],
)
def test_each_difference_has_its_advice(reason: str, advice: str) -> None:
    assert advice in advice_on_mismatch(reason)


@pytest.mark.parametrize("url", ["http://127.0.0.1:9", "ftp://x", "nonsense"])
def test_a_router_that_does_not_answer_is_a_problem(url: str) -> None:
    report = check_fleet(url, api_key="secret")
    ((severity, what),) = words(report.findings)
    assert (severity, report.is_well) == ("problem", False)
    assert what.startswith(f"{url} does not tell its status: ")
    assert "secret" not in report.as_text()
