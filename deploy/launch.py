"""Worker processes of one host: started, watched, restarted, and stopped together with whoever started them."""

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence as Seq
from dataclasses import dataclass

PR_SET_PDEATHSIG = 1
QUICK_DEATH_SECONDS = 20.0
"""A worker that dies sooner than this after its start counts as one that can't start."""
MAX_QUICK_DEATHS = 3
USAGE_STATUS = 2
"""Exit status of a worker whose model or flags can't work; starting it again would change nothing."""

_log = logging.getLogger("crossdock.launch")


class WorkerFailed(Exception):
    """A worker that can't be started: it died again and again."""


@dataclass(frozen=True, slots=True)
class WorkerCommand:
    """``arguments`` of `crossdock worker`, and the name under which the log speaks of it."""

    name: str
    arguments: tuple[str, ...]


def crossdock_command(*arguments: str) -> list[str]:
    """How to start this very program in another process; ``-P`` keeps the current folder off its import path."""
    return [sys.executable, "-P", "-c", "from crossdock.cli import main; main()", *arguments]


def end_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, however it dies (Linux, prctl(2)).

    Without draining: the parent was the router, and nobody else reads what this process makes.
    """
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent_pid:  # it died before we asked
        raise SystemExit("the process that started this worker is gone")


class WorkerGroup:
    """All workers that `crossdock serve` runs; a dead one is started again."""

    def __init__(self, commands: Seq[WorkerCommand]) -> None:
        self._commands = commands
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start every worker and return at once, so that they load while their parent does."""
        for command in self._commands:
            self._start(command)

    async def run(self) -> None:
        """Restart whoever dies, until cancelled. Raises `WorkerFailed` (in a group) when one can't be started."""
        async with asyncio.TaskGroup() as group:
            for command in self._commands:
                group.create_task(self._keep_running(command))

    def stop(self, seconds: float = 10.0) -> None:
        """SIGTERM to all, which drains them; SIGKILL to those still there after ``seconds``."""
        deadline = time.monotonic() + seconds
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def _start(self, command: WorkerCommand) -> None:
        # a session of its own: ctrl-C reaches the router, which ends the workers when its streams have ended
        arguments = crossdock_command("worker", *command.arguments)
        self._processes[command.name] = subprocess.Popen(arguments, stdin=subprocess.DEVNULL, start_new_session=True)

    async def _keep_running(self, command: WorkerCommand) -> None:
        num_quick_deaths = 0
        while True:
            started = time.monotonic()
            code = await _end_of(self._processes[command.name])
            lived = time.monotonic() - started
            num_quick_deaths = num_quick_deaths + 1 if lived < QUICK_DEATH_SECONDS else 0
            if num_quick_deaths == MAX_QUICK_DEATHS or code == USAGE_STATUS:
                raise WorkerFailed(f"{command.name} ended with status {code} after {lived:.0f} s")
            _log.warning("%s ended with status %s; starting it again", command.name, code)
            self._start(command)


async def _end_of(process: subprocess.Popen[bytes]) -> int:
    """Exit status of a child, waited for without a thread (Linux, pidfd_open(2))."""
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    descriptor = os.pidfd_open(process.pid)
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)
    return process.wait()
