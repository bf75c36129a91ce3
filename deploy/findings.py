"""What an examination has found: facts, trials of transports, and what is wrong; as text for people and as JSON."""

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec


class Gpu(msgspec.Struct, frozen=True):
    """``reaches`` are the GPUs whose memory it can write to, ``nvlinks`` those of them over NVLink."""

    name: str
    free_bytes: int
    total_bytes: int
    reaches: list[int] = []
    nvlinks: list[int] = []


class Devices(msgspec.Struct, frozen=True, kw_only=True):
    """What Python sees of a host; versions are empty where a thing is not there, errors say why one can't be used."""

    python: str
    torch: str = ""
    cuda: str = ""
    driver: str = ""
    triton: str = ""
    ucx: str = ""
    ucx_lanes: list[str] = []
    ucx_tls: str = ""
    gpus: list[Gpu] = []
    rdma_ports: list[str] = []
    torch_error: str = ""
    ucx_error: str = ""


class Trial(msgspec.Struct, frozen=True, kw_only=True):
    """KV of one kind of memory from one process to another; ``error`` is empty where it works."""

    transport: str
    memory: str
    bytes_per_second: float = 0.0
    latency_seconds: float = 0.0
    detail: str = ""
    error: str = ""


class Severity(StrEnum):
    PROBLEM = "problem"
    """Keeps a server from working."""
    WARNING = "warning"


class Finding(msgspec.Struct, frozen=True):
    """Something that is not as it should be, and what to do."""

    severity: Severity
    what: str
    to_do: str


class Report(msgspec.Struct, frozen=True):
    """``facts`` are lines of a name and a value."""

    facts: list[tuple[str, str]]
    trials: list[Trial]
    findings: list[Finding]

    @property
    def is_well(self) -> bool:
        """Nothing would keep the server from working."""
        return all(finding.severity is not Severity.PROBLEM for finding in self.findings)

    def as_json(self) -> str:
        return msgspec.json.encode({"is_well": self.is_well, **msgspec.to_builtins(self)}).decode()

    def as_text(self) -> str:
        parts = [_table([list(fact) for fact in self.facts])]
        if self.trials:
            heads = ["transport", "memory", "GB/s", "latency", ""]
            parts.append(_table([heads, *map(_trial_row, self.trials)]))
        parts.append("\n".join(map(_told, self.findings)) or "All is well.")
        return "\n\n".join(parts)


def problem(what: str, to_do: str) -> Finding:
    return Finding(Severity.PROBLEM, what, to_do)


def warning(what: str, to_do: str) -> Finding:
    return Finding(Severity.WARNING, what, to_do)


def _trial_row(trial: Trial) -> list[str]:
    if trial.error:
        return [trial.transport, trial.memory, "-", "-", trial.error]
    latency = f"{trial.latency_seconds * 1e6:.0f} us"
    return [trial.transport, trial.memory, f"{trial.bytes_per_second / 1e9:.2f}", latency, trial.detail]


def _told(finding: Finding) -> str:
    return f"{finding.severity.value.upper()}: {finding.what}\n  what to do: {finding.to_do}"


def _table(rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; the last one as long as it likes."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join(_row(row, widths).rstrip() for row in rows)


def _row(cells: Iterable[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True))
