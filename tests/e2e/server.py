"""A `crossdock serve` process under test."""

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from crossdock.deploy.launch import crossdock_command

HEALTHY_SECONDS = 60.0


def free_port() -> int:
    with closing(socket.socket()) as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """Started at once; ``log`` receives what router and workers print."""

    def __init__(self, model: str, flags: tuple[str, ...], log: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        command = crossdock_command("serve", model, "--port", str(self.port), *flags)
        with log.open("wb") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        self.client = httpx.Client(base_url=self.url, timeout=60)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def wait_until_healthy(self, seconds: float = HEALTHY_SECONDS) -> None:
        self.wait_for(lambda: self.is_healthy, seconds)

    @property
    def is_healthy(self) -> bool:
        try:
            return self.client.get("/health").status_code == 200
        except httpx.TransportError:
            return False

    def wait_for(self, holds: Callable[[], bool], seconds: float) -> None:
        """Until ``holds()``; fails the test with the log when it takes longer or the server ends."""
        deadline = time.monotonic() + seconds
        while not holds():
            assert self.process.poll() is None, f"the server ended with {self.process.returncode}:\n{self.log}"
            assert time.monotonic() < deadline, f"not within {seconds} s:\n{self.log}"
            time.sleep(0.05)

    def metrics(self) -> dict[str, float]:
        """Every sample, summed over its labels, by name."""
        samples: dict[str, float] = {}
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                samples[sample.name] = samples.get(sample.name, 0.0) + sample.value
        return samples

    def worker_pids(self, role: str) -> list[int]:
        """Processes of this server's workers with a role, from the kernel's own list."""
        pids = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _parent_of(entry) == self.process.pid:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                if f"--role={role}".encode() in command:
                    pids.append(int(entry.name))
        return sorted(pids)

    def kill_worker(self, role: str) -> None:
        os.kill(self.worker_pids(role)[0], signal.SIGKILL)

    def stop(self) -> int:
        """SIGTERM, and the exit status; SIGKILL to the whole session if it does not end."""
        self.client.close()
        self.process.terminate()
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise


def _parent_of(entry: Path) -> int | None:
    try:
        stat = (entry / "stat").read_text()
    except OSError:
        return None  # it ended meanwhile
    return int(re.sub(r"^.*\) ", "", stat).split()[1])
