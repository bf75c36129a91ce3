"""Examines this host: its limits, its devices as Python sees them, and every transport between two of its processes."""

import os
import resource
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from ..core.config import CPU_KV_BYTES, TRANSPORTS, RouterConfig
from ..core.version import VERSION
from .findings import Devices, Finding, Report, Severity, Trial, problem, warning
from .launch import crossdock_command
from .trial import GPU_ONLY, HOST_ONLY, try_transport

GIB = 1 << 30
SHM = Path("/dev/shm")
MIN_SHM_BYTES = 64 << 20
"""UCX and NCCL meet there; pools do not lie there, they have no name in any file system."""
FILES_BESIDE_CLIENTS = 100
"""What a router opens that is no client."""
LEAST_FREE_SHARE = 0.5
"""Of a GPU's memory; with less of it free, somebody else has it."""
SLOW_BYTES_PER_SECOND = 0.5e9
EXAMINE_SECONDS = 120.0


@dataclass(frozen=True, slots=True)
class Limits:
    """What the system allows a process; ``None`` for no limit."""

    num_files: int
    locked_bytes: int | None
    available_bytes: int
    shm_free_bytes: int
    num_cores: int
    has_nvidia_driver: bool


def read_limits() -> Limits:
    """Of this process (Linux)."""
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    memory = dict(line.split(":") for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    shm = os.statvfs(SHM) if SHM.is_dir() else None
    return Limits(
        num_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        locked_bytes=None if locked == resource.RLIM_INFINITY else locked,
        available_bytes=int(memory["MemAvailable"].split()[0]) << 10,
        shm_free_bytes=shm.f_bavail * shm.f_frsize if shm is not None else 0,
        num_cores=len(os.sched_getaffinity(0)),
        has_nvidia_driver=Path("/proc/driver/nvidia/version").exists(),
    )


def look_at_devices() -> Devices | Finding:
    """In a process of its own, which a broken library may end."""
    command = crossdock_command("examine", "devices")
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=EXAMINE_SECONDS, stdin=subprocess.DEVNULL)
        return msgspec.json.decode(ran.stdout, type=Devices)
    except subprocess.TimeoutExpired:
        said = f"no answer within {EXAMINE_SECONDS:.0f} s"
    except msgspec.MsgspecError:
        said = (ran.stderr.strip().splitlines() or [f"it ended with status {ran.returncode}"])[-1]
    return problem(f"torch and UCX can't be looked at: {said}", "repair the installation that the message names")


def check_host() -> Report:
    limits, devices = read_limits(), look_at_devices()
    findings = list(judge_limits(limits))
    if isinstance(devices, Finding):
        return Report(_facts(limits, None), [], [*findings, devices])
    findings += judge_devices(devices, limits)
    trials = [try_transport(transport, ends) for ends in _ends(devices) for transport in transports_for(ends)]
    return Report(_facts(limits, devices), trials, [*findings, *judge_trials(trials, bool(devices.gpus))])


def _ends(devices: Devices) -> list[tuple[str, str]]:
    """Host memory, and from the first GPU to the second, if there is one."""
    gpus = [("cuda:0", f"cuda:{min(1, len(devices.gpus) - 1)}")] if devices.gpus else []
    return [("cpu", "cpu"), *gpus]


def transports_for(ends: tuple[str, str]) -> list[str]:
    others = GPU_ONLY if ends[0] == "cpu" else HOST_ONLY
    return [transport for transport in TRANSPORTS if transport not in others]


def _facts(limits: Limits, devices: Devices | None) -> list[tuple[str, str]]:
    facts = [("crossdock", VERSION)]
    if devices is not None:
        facts += [("python", devices.python), ("torch", devices.torch or "none"), ("triton", devices.triton or "none")]
        facts += [("CUDA", f"{devices.cuda or 'none'}, driver {devices.driver or 'none'}")]
        facts += [(f"GPU {number}", _gpu_told(devices, number)) for number in range(len(devices.gpus))]
        facts += [("UCX", f"{devices.ucx}: {', '.join(devices.ucx_lanes)}" if devices.ucx else "none")]
        facts += [("RDMA", ", ".join(devices.rdma_ports) or "none")]
    locked = "no limit" if limits.locked_bytes is None else f"{limits.locked_bytes >> 20} MiB"
    return [
        *facts,
        ("cores", str(limits.num_cores)),
        ("memory", f"{limits.available_bytes / GIB:.1f} GiB available"),
        ("/dev/shm", f"{limits.shm_free_bytes / GIB:.2f} GiB free"),
        ("limits", f"{limits.num_files} open files, locked memory: {locked}"),
    ]


def _gpu_told(devices: Devices, number: int) -> str:
    gpu = devices.gpus[number]
    memory = f"{gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
    nvlinks = ", ".join(map(str, gpu.nvlinks)) or "none"
    return f"{gpu.name}, {memory}, reaches {', '.join(map(str, gpu.reaches)) or 'none'}, NVLink to {nvlinks}"


# --- judgement: pure ---------------------------------------------------------------------------------


def judge_limits(limits: Limits) -> Iterator[Finding]:
    wanted = RouterConfig("").max_open_requests + FILES_BESIDE_CLIENTS
    if limits.num_files < wanted:
        severity = Severity.PROBLEM if limits.num_files < 2 * FILES_BESIDE_CLIENTS else Severity.WARNING
        clients = max(0, limits.num_files - FILES_BESIDE_CLIENTS)
        what = f"a process may open {limits.num_files} files: the router can serve some {clients} clients at a time"
        yield Finding(severity, what, f"ulimit -n {2 * wanted}, or LimitNOFILE= of its service")
    if limits.shm_free_bytes < MIN_SHM_BYTES:
        what = f"/dev/shm has {limits.shm_free_bytes >> 20} MiB free; UCX and NCCL fall back to slower ways without it"
        yield warning(what, "mount it with more, as with docker run --shm-size=1g, or remove what lies there")


def judge_devices(devices: Devices, limits: Limits) -> Iterator[Finding]:
    if devices.torch_error or not devices.torch:
        why = devices.torch_error or "it is not installed"
        yield problem(f"torch can't be imported: {why}", "install a torch that fits this Python and driver")
    if not devices.gpus:
        if limits.has_nvidia_driver:
            what = f"there is an NVIDIA driver, but torch {devices.torch} (CUDA {devices.cuda or 'none'}) sees no GPU"
            yield warning(what, "install a torch built for a CUDA that the driver supports; check CUDA_VISIBLE_DEVICES")
        if limits.available_bytes < 2 * CPU_KV_BYTES:
            what = (
                f"{limits.available_bytes >> 20} MiB of memory are available, two pools take {2 * CPU_KV_BYTES >> 20}"
            )
            yield problem(what, "free memory, or start with a smaller --kv-memory")
    for number, gpu in enumerate(devices.gpus):
        if gpu.free_bytes < LEAST_FREE_SHARE * gpu.total_bytes:
            what = f"GPU {number} has {gpu.free_bytes / GIB:.1f} of {gpu.total_bytes / GIB:.1f} GiB free"
            yield warning(what, "end who holds it (nvidia-smi names them), or lower --gpu-memory-utilization")
    if len(devices.gpus) > 1 and not any(gpu.reaches for gpu in devices.gpus):
        yield warning("no GPU can write to another's memory", "check the topology, and ACS and IOMMU of the host")
    yield from _judge_ucx(devices, limits)


def _judge_ucx(devices: Devices, limits: Limits) -> Iterator[Finding]:
    if not devices.ucx:
        if devices.rdma_ports:
            what = f"{', '.join(devices.rdma_ports)} has RDMA, but the ucx transport is not there: {devices.ucx_error}"
            yield warning(what, "pip install 'crossdock[ucx]'")
        return
    if devices.ucx_tls != "all":
        yield warning(f"UCX_TLS is set to {devices.ucx_tls}: UCX uses nothing else", "unset it unless that is wanted")
    if devices.rdma_ports and limits.locked_bytes is not None:
        what = f"only {limits.locked_bytes >> 20} MiB of memory may be locked, which RDMA needs for its buffers"
        yield warning(what, "ulimit -l unlimited, or LimitMEMLOCK=infinity of its service")


def judge_trials(trials: list[Trial], has_gpus: bool) -> Iterator[Finding]:
    """The memory in which pools will lie must be reached by something."""
    for memory in dict.fromkeys(trial.memory for trial in trials):
        tried = [trial for trial in trials if trial.memory == memory]
        is_needed = (memory != "host") == has_gpus
        fastest = max(trial.bytes_per_second for trial in tried)
        if is_needed and all(trial.error for trial in tried):
            yield problem(f"no transport works between processes with pools in {memory}", "see the errors above")
        elif is_needed and fastest < SLOW_BYTES_PER_SECOND:
            what = f"the fastest transport between pools in {memory} does {fastest / 1e9:.2f} GB/s"
            yield warning(what, "see what else runs here; a host that is idle does more")
    for trial in trials:
        if trial.error:
            yield warning(f"{trial.transport} ({trial.memory}) does not work: {trial.error}", _advice(trial))
        elif "UCX took TCP" in trial.detail:
            yield warning(trial.detail.partition("; ")[2], "then start the workers again")


def _advice(trial: Trial) -> str:
    if trial.transport == "ucx":
        return "pip install 'crossdock[ucx]', unless another transport will do"
    return "nothing, if another transport serves the same memory; the fastest that works is taken"
