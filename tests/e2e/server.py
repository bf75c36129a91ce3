"""A `crossdock serve` process under test."""

import os
import re
import resource
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from crossdock.deploy.launch import crossdock_command

HEALTHY_SECONDS = 60.0
QUIET_SECONDS = 1.5
"""Longer than a worker's time between two heartbeats, so that both ends of it are seen."""


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Scrape:
    """What ``/metrics`` said at one moment."""

    def __init__(self, text: str) -> None:
        self._samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]

    def total(self, name: str, **labels: str) -> float:
        """The sum of a metric over all samples that have these labels."""
        return sum(s.value for s in self._samples if s.name == name and labels.items() <= s.labels.items())

    def worker(self, name: str, **labels: str) -> float:
        return self.total(f"crossdock:worker_{name}", **labels)

    def changes_since(self, before: "Scrape") -> Callable[[str], float]:
        """By how much a metric of the workers, summed over all of them, has grown."""
        return lambda name: self.worker(name) - before.worker(name)

    @property
    def unfinished(self) -> dict[str, float]:
        """Whatever is left of requests, by place; empty when nobody is served and all blocks are free or cached."""
        left = {name: self.total(f"vllm:num_requests_{name}") for name in ("running", "waiting")}
        for role in ("prefill", "decode", "mixed"):
            for table in ("running", "waiting", "arriving", "kept"):
                left[f"{role} {table}"] = self.worker(f"requests_{table}", role=role)
            for state in ("leased", "quarantined"):
                left[f"{role} {state}"] = self.worker("blocks", role=role, state=state)
            whole = sum(self.worker("blocks", role=role, state=state) for state in ("free", "cached"))
            left[f"{role} missing"] = self.worker("blocks_total", role=role) - whole
        return {place: number for place, number in left.items() if number}


class Server:
    """Started at once; ``log`` receives what router and workers print. ``command`` is ``serve`` or ``router``.

    It speaks TLS where the ``authority`` of its certificate is given. ``command_prefix`` takes it to another ``host``.
    """

    def __init__(
        self,
        model: str,
        flags: tuple[str, ...],
        log: Path,
        command: str = "serve",
        port: int | None = None,
        authority: Path | None = None,
        host: str = "127.0.0.1",
        command_prefix: Sequence[str] = (),
    ) -> None:
        self.port = port or free_port()
        self.url = f"{'http' if authority is None else 'https'}://{host}:{self.port}"
        self._log = log
        where = ("--host", host, "--port", str(self.port))
        command_line = [*command_prefix, *crossdock_command(command, model, *where, *flags)]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command_line, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
        trusted = ssl.create_default_context(cafile=authority)
        self.client = httpx.Client(base_url=self.url, timeout=60, verify=trusted)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    @property
    def control_address(self) -> str:
        found = re.search(r"workers report to (tcp://\S+)", self.log)
        assert found is not None, self.log
        return found[1]

    def wait_until_healthy(self, seconds: float = HEALTHY_SECONDS) -> None:
        self.wait_for(lambda: self.is_healthy, seconds)

    @property
    def is_healthy(self) -> bool:
        return self.health == 200

    @property
    def health(self) -> int | None:
        """The status of ``/health``, ``None`` as long as nobody answers."""
        try:
            return self.client.get("/health").status_code
        except httpx.TransportError:
            return None

    def wait_for(self, holds: Callable[[], bool], seconds: float) -> None:
        """Until ``holds()``; fails the test with the log when it takes longer or the server ends."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{self.log}"
            time.sleep(0.05)

    def scrape(self) -> Scrape:
        return Scrape(self.client.get("/metrics").text)

    def wait_until_nothing_is_left(self, seconds: float) -> Scrape:
        """No request and no taken block anywhere, for longer than a heartbeat; fails with what is left."""
        deadline, last = time.monotonic() + seconds, time.monotonic()
        scrape = self.scrape()
        while time.monotonic() - last < QUIET_SECONDS:
            time.sleep(0.1)
            scrape = self.scrape()
            last = time.monotonic() if scrape.unfinished else last
            assert time.monotonic() < deadline, f"after {seconds} s there is {scrape.unfinished}:\n{self.log}"
        return scrape

    def settled(self) -> Scrape:
        """The numbers of workers that have nothing to do, so that they will not change."""
        return self.wait_until_nothing_is_left(10)

    @property
    def num_deaths(self) -> float:
        return self.scrape().total("crossdock:worker_deaths_total")

    def metrics(self) -> dict[str, float]:
        """Every sample, summed over its labels, by name."""
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
        return samples

    def worker_pids(self, role: str) -> list[int]:
        """Processes of this server's workers with a role, from the kernel's own list."""
        return sorted(pid for pid in processes_with(f"--role={role}") if _parent_of(pid) == self.process.pid)

    def resident_bytes(self) -> dict[str, int]:
        """Memory of the router and of every worker, by name."""
        pids = {f"{role} {pid}": pid for role in ("prefill", "decode", "mixed") for pid in self.worker_pids(role)}
        return {name: _resident_bytes(pid) for name, pid in {"router": self.process.pid, **pids}.items()}

    def stop(self) -> int:
        """SIGTERM, and the exit status; SIGKILL to the whole session if it does not end."""
        self.client.close()
        self.process.terminate()
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise


@contextmanager
def serving(model: Path | str, log: Path, *flags: str, authority: Path | None = None) -> Iterator[Server]:
    """A healthy server, on one compute thread a worker, that ends with the block."""
    server = Server(str(model), ("--threads", "1", *flags), log, authority=authority)
    try:
        server.wait_until_healthy()
        yield server
    finally:
        server.stop()


def processes_with(argument: str) -> list[int]:
    """Whoever was started with this argument and has not ended."""
    entries = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [int(entry.name) for entry in entries if argument in _command_of(entry)]


def listening_ports(pid: int) -> list[int]:
    """TCP ports on which a process listens (Linux, proc_pid_net(5))."""
    links = {os.readlink(descriptor) for descriptor in Path(f"/proc/{pid}/fd").iterdir()}
    rows = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in links]


def cpu_seconds(pid: int) -> float:
    """User and system time of a process so far (proc_pid_stat(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def _command_of(entry: Path) -> list[str]:
    try:
        return (entry / "cmdline").read_text().split("\0")
    except OSError:
        return []  # it ended meanwhile


def _parent_of(pid: int) -> int | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None  # it ended meanwhile
    return int(stat.rpartition(")")[2].split()[1])
