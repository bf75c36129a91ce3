"""A network of hosts within this one: network namespaces on a bridge, whose cables can be pulled (ip-netns(8))."""

import os
import shutil
import subprocess
from collections.abc import Sequence
from itertools import count

NOBODY = "02:00:00:00:00:fe"
"""A hardware address that no host has."""


_numbers = count()


class IpFailed(Exception):
    """What ``ip`` says."""


def ip(*arguments: str) -> str:
    """Raises `IpFailed`."""
    ran = subprocess.run(["ip", *arguments], capture_output=True, text=True, timeout=20)
    if ran.returncode != 0:
        raise IpFailed(f"ip {' '.join(arguments)}: {ran.stderr.strip()}")
    return ran.stdout


class Network:
    """``hosts`` by name, each with an address of its own and a cable to a bridge on which this process is too.

    Everything is gone after `close`, also if the constructor fails.
    """

    def __init__(self, hosts: Sequence[str]) -> None:
        number = os.getpid() % 1000 * 10 + next(_numbers) % 10
        self._bridge = f"xd{number}"
        subnet = f"10.{200 + number % 50}.{number // 50}"
        self._addresses = {host: f"{subnet}.{number}" for number, host in enumerate(hosts, start=2)}
        try:
            ip("link", "add", self._bridge, "type", "bridge")
            ip("addr", "add", f"{subnet}.1/24", "dev", self._bridge)
            ip("link", "set", self._bridge, "up")
            for host in hosts:
                self._connect(host)
        except IpFailed:
            self.close()
            raise

    def _connect(self, host: str) -> None:
        namespace, cable = self._namespace(host), self._cable(host)
        ip("netns", "add", namespace)
        ip("link", "add", cable, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        ip("link", "set", cable, "master", self._bridge, "up")
        ip("-n", namespace, "addr", "add", f"{self.address(host)}/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            ip("-n", namespace, "link", "set", device, "up")

    def _namespace(self, host: str) -> str:
        return f"{self._bridge}-{host}"

    def _cable(self, host: str) -> str:
        return f"{self._bridge}v{list(self._addresses).index(host)}"

    @classmethod
    def can_be_made(cls) -> bool:
        """Here, by this user."""
        if shutil.which("ip") is None or os.geteuid() != 0:
            return False
        try:
            cls(("trial",)).close()
        except IpFailed:
            return False
        return True

    def address(self, host: str) -> str:
        return self._addresses[host]

    def command_prefix(self, host: str) -> Sequence[str]:
        """Runs what follows on that host, in the same process."""
        return ("ip", "netns", "exec", self._namespace(host))

    def pull(self, host: str) -> None:
        """Its cable: nothing reaches the host or leaves it, and it sees that."""
        ip("link", "set", self._cable(host), "down")

    def plug(self, host: str) -> None:
        ip("link", "set", self._cable(host), "up")

    def part(self, one: str, other: str) -> None:
        """What these two send each other goes to nobody, and nobody tells them."""
        for here, there in ((one, other), (other, one)):
            neighbour = ("neigh", "replace", self.address(there), "lladdr", NOBODY, "nud", "permanent")
            ip("-n", self._namespace(here), *neighbour, "dev", "eth0")

    def join(self, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            ip("-n", self._namespace(here), "neigh", "del", self.address(there), "dev", "eth0")

    def close(self) -> None:
        """Whatever of it there is."""
        existing = ip("netns", "list").split()
        for host in self._addresses:
            if self._namespace(host) in existing:
                ip("netns", "del", self._namespace(host))  # its cable goes with it
        if os.path.exists(f"/sys/class/net/{self._bridge}"):
            ip("link", "del", self._bridge)
