"""Tries one transport between two processes of this host, as a router has its workers do: greetings, probe, result."""

import secrets
import subprocess
import time
from collections.abc import Sequence
from contextlib import closing
from tempfile import TemporaryFile
from typing import IO

from ..core.mailbox import Mailbox
from ..core.messages import Hello, Incarnation, Link, PeerInfo, Peers, Role
from .findings import Trial
from .launch import crossdock_command

GPU_ONLY = frozenset({"cuda_ipc", "nccl"})
HOST_ONLY = frozenset({"shm"})
MAX_SECONDS = 40.0


class _Side:
    """A process that takes part, and what it says before it ends."""

    def __init__(self, role: Role, device: str, transport: str, router: str) -> None:
        self._errors: IO[bytes] = TemporaryFile()  # noqa: SIM115 - closed by `close`
        arguments = (f"--role={role.value}", f"--device={device}", f"--transport={transport}", f"--router={router}")
        self._process = subprocess.Popen(
            crossdock_command("examine", "side", *arguments),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
        )

    @property
    def failure(self) -> str:
        """The last thing that it said, when it has ended; else empty."""
        status = self._process.poll()
        if status is None:
            return ""
        self._errors.seek(0)
        lines = [line.strip() for line in self._errors.read().decode(errors="replace").splitlines() if line.strip()]
        last = lines[-1].removeprefix("crossdock: ") if lines else ""
        return last if status > 0 and last else f"a process ended with status {status}; {last}".rstrip("; ")

    def close(self) -> None:
        self._process.kill()  # nothing that it holds outlives it
        self._process.wait()
        self._errors.close()


def try_transport(transport: str, devices: tuple[str, str], max_seconds: float = MAX_SECONDS) -> Trial:
    """From the memory of the first of ``devices`` (``cpu``, ``cuda:N``) to that of the second."""
    memory = "host" if devices[0] == "cpu" else f"{devices[0]} to {devices[1]}"
    with closing(Mailbox("127.0.0.1", 0, Incarnation(secrets.token_hex(8)))) as mailbox:
        roles = (Role.PREFILL, Role.DECODE)
        sides = [_Side(*each, transport, mailbox.peer.address) for each in zip(roles, devices, strict=True)]
        try:
            outcome = _outcome(mailbox, sides, time.monotonic() + max_seconds)
        finally:
            for side in sides:
                side.close()
    if isinstance(outcome, str):
        return Trial(transport=transport, memory=memory, error=outcome)
    return Trial(
        transport=transport,
        memory=memory,
        bytes_per_second=outcome.bytes_per_second,
        latency_seconds=outcome.latency_seconds,
        detail="; ".join(tried.detail for tried in outcome.tried if tried.detail),
        error=outcome.error.removeprefix(f"{transport}: "),
    )


def _outcome(mailbox: Mailbox, sides: Sequence[_Side], end: float) -> Link | str:
    """What the prefill side reports, or why it can't."""
    workers: dict[str, PeerInfo] = {}
    while time.monotonic() < end:
        mailbox.poll_socket.poll(20)
        while (delivery := mailbox.receive()) is not None:
            if isinstance(delivery.message, Link):
                return delivery.message
            if isinstance(delivery.message, Hello):
                workers[delivery.sender.incarnation] = PeerInfo(delivery.sender, delivery.message.card)
                for info in workers.values() if len(workers) == len(sides) else ():
                    mailbox.send(info.peer, Peers(workers=list(workers.values())))
        for side in sides:
            if failure := side.failure:
                return failure
    return "no result in time"
