"""A router and workers in places of their own, every one of which can be killed, frozen and started again."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from crossdock.deploy.launch import crossdock_command

from ..server import Scrape, Server, free_port, processes_with
from .meddler import ROUTER

REQUEST_SECONDS = 40.0
"""The router's own deadline for every request."""
SETTLE_SECONDS = 90.0
"""A lease time of quarantine, and a probe whose messages were lost begins again after at most half a minute."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where one process runs: the address on which it listens, and what its command begins with."""

    host: str = "127.0.0.1"
    command_prefix: Sequence[str] = ()
    reports_to: str = ""
    """The router's address as the worker here is told."""


class Fleet:
    """``places`` of the workers are named by role and number, ``prefill-0``, that of the router is `ROUTER`.

    All start at once. ``flags_for`` a place are asked again at every start of a worker there. Use it in one thread.
    """

    def __init__(
        self,
        model: Path,
        folder: Path,
        places: Mapping[str, Place],
        control_port: int,
        flags_for: Callable[[str], Sequence[str]],
        router_flags: Sequence[str] = (),
    ) -> None:
        self._model = str(model)
        self._folder = folder
        self._places = places
        self._flags_for = flags_for
        self._workers: dict[str, subprocess.Popen[bytes]] = {}
        self._num_started = 0
        self._http_port = free_port()
        host = places[ROUTER].host
        own = (f"--control-host={host}", f"--control-port={control_port}", f"--request-timeout={REQUEST_SECONDS:g}")
        self._router_flags = (*own, *router_flags)
        self.router = self._start_router()
        for place in places.keys() - {ROUTER}:
            self._start(place)

    def _start_router(self) -> Server:
        place = self._places[ROUTER]
        return Server(
            self._model,
            self._router_flags,
            self._new_log(ROUTER),
            "router",
            self._http_port,
            host=place.host,
            command_prefix=place.command_prefix,
        )

    def _start(self, name: str) -> None:
        place, role = self._places[name], name.partition("-")[0]
        own = (f"--role={role}", f"--router={place.reports_to}", f"--host={place.host}", "--threads=1")
        flags = (*own, f"--parent-pid={os.getpid()}", *self._flags_for(name))
        command = [*place.command_prefix, *crossdock_command("worker", self._model, *flags)]
        with self._new_log(name).open("wb") as log:
            self._workers[name] = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def _new_log(self, name: str) -> Path:
        self._num_started += 1
        return self._folder / f"{self._num_started:03}-{name}.log"

    def kill(self, place: str) -> None:
        """``kill -9``, and a new process at once in the same place."""
        worker = self._workers[place]
        worker.kill()
        worker.wait()
        self._start(place)

    def kill_router(self) -> None:
        self.router.client.close()
        self.router.process.kill()
        self.router.process.wait()
        self.router = self._start_router()

    def freeze(self, place: str, seconds: float) -> None:
        """It stands still meanwhile."""
        pid = self._workers[place].pid
        os.kill(pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(pid, signal.SIGCONT)

    @property
    def faults(self) -> list[str]:
        """Workers that ended by themselves, or processes too many or too few."""
        faults = [self._end_of(place) for place, worker in self._workers.items() if worker.poll() is not None]
        found, wanted = self._processes(), {worker.pid for worker in self._workers.values()}
        if found != wanted:  # who has just forked to run something else still has its parent's command line
            time.sleep(0.2)
            found = self._processes()
        return faults if found == wanted else [*faults, f"there are workers {found}, not {wanted}"]

    def _processes(self) -> set[int]:
        addresses = {place.reports_to for place in self._places.values() if place.reports_to}
        return {pid for address in addresses for pid in processes_with(f"--router={address}")}

    def _end_of(self, place: str) -> str:
        log = max(self._folder.glob(f"*-{place}.log")).read_text(errors="replace")
        return f"the worker of {place} ended with {self._workers[place].poll()}:\n{log[-3000:]}"

    def settle(self, seconds: float = SETTLE_SECONDS) -> Scrape:
        """Wait until all workers are in the fleet and linked, nothing is left anywhere and every block is there."""
        deadline = time.monotonic() + seconds
        while not self._is_whole():
            faults = self.faults
            assert not faults, faults
            assert time.monotonic() < deadline, f"not whole after {seconds} s: {self._shape()}\n{self.router.log}"
            time.sleep(0.2)
        return self.router.wait_until_nothing_is_left(max(10.0, deadline - time.monotonic()))

    def _is_whole(self) -> bool:
        num_prefill = sum(place.startswith("prefill") for place in self._workers)
        num_pairs = num_prefill * (len(self._workers) - num_prefill)
        return self.router.is_healthy and self._shape() == (len(self._workers), num_pairs)

    def _shape(self) -> tuple[float, float]:
        """How many workers take requests, and how many pairs are linked."""
        scrape = self.router.scrape()
        return scrape.worker("accepting"), scrape.worker("links")

    def stop(self) -> list[str]:
        """End all; who did not end as it should when asked to."""
        faults = []
        for worker in self._workers.values():
            worker.send_signal(signal.SIGCONT)
            worker.terminate()
        for place, worker in self._workers.items():
            try:
                worker.wait(20)
            except subprocess.TimeoutExpired:
                worker.kill()
                worker.wait()
            if worker.returncode != 0:
                faults.append(self._end_of(place))
        self.router.stop()
        return faults
