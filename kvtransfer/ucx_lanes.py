"""What UCX has chosen, and whether something better is there.

A lane reads ``transport/device``, as ``ucp_context_print_info`` and ``ucp_ep_query`` have it.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

INFINIBAND = Path("/sys/class/infiniband")
"""RDMA devices, InfiniBand or RoCE (Linux, Documentation/ABI/stable/sysfs-class-infiniband)."""

SHARED_MEMORY = ("posix", "sysv", "cma", "xpmem", "knem")
RDMA = ("rc_", "rc", "dc_", "ud_", "ud")
INSIDE = ("self", "cuda_copy", "gdr_copy")
"""Bring bytes to the other lanes, and to no other process."""


@dataclass(frozen=True, slots=True)
class Surroundings:
    """``available`` are the lanes that this UCX could use, ``rdma_ports`` the active ones of this host."""

    available: Sequence[str]
    rdma_ports: Sequence[str]
    is_one_host: bool
    is_gpu_memory: bool


def available_lanes(context_info: str) -> list[str]:
    """From the text of ``ucp_context_print_info``."""
    return re.findall(r"resource\s+\d+\s*:.*flags\s+\S+\s+(\S+)", context_info)


def active_rdma_ports(devices: Path = INFINIBAND) -> list[str]:
    """``device/port`` of each port with a link; empty where there are no such devices."""
    states = sorted(devices.glob("*/ports/*/state"))
    return [f"{path.parts[-4]}/{path.parts[-2]}" for path in states if "ACTIVE" in path.read_text(encoding="ascii")]


def is_tcp_alone(lanes: Sequence[str]) -> bool:
    """Bytes reach the other process over TCP and nothing else."""
    outside = {lane.partition("/")[0] for lane in lanes} - set(INSIDE)
    return outside == {"tcp"}


def advice(lanes: Sequence[str], around: Surroundings) -> str:
    """Why TCP should not have been chosen, and what to do; empty if it was not, or nothing else is there."""
    if not is_tcp_alone(lanes):
        return ""
    names = sorted({lane.partition("/")[0] for lane in around.available})
    if around.is_one_host and around.is_gpu_memory and "cuda_ipc" in names:
        return (
            "UCX took TCP though both GPUs are in one host: check that the processes share their namespaces (IPC, pid)"
        )
    shared = [name for name in names if name in SHARED_MEMORY]
    if around.is_one_host and not around.is_gpu_memory and shared:
        return (
            f"UCX took TCP though both processes are on one host and {', '.join(shared)} are there: check UCX_TLS, "
            "the size of /dev/shm, and that the processes share their namespaces (IPC, pid)"
        )
    if around.rdma_ports and not around.is_one_host:
        ports = ", ".join(around.rdma_ports)
        if any(name.startswith(RDMA) for name in names):
            return f"UCX took TCP though {ports} has RDMA: check UCX_TLS and UCX_NET_DEVICES on both sides"
        return f"UCX took TCP: {ports} has RDMA, but this UCX was built without it; use one of the system's"
    return ""
