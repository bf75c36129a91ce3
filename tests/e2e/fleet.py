"""A router and workers as separate commands, as they run on several hosts."""

import subprocess
from pathlib import Path

from crossdock.deploy.launch import crossdock_command

from .server import Server, free_port


class Fleet:
    """One router at a time, always at the same addresses, and any number of workers for it."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model = str(model)
        self._folder = folder
        self._http_port, self._control_port = free_port(), free_port()
        self._routers: list[Server] = []
        self._workers: list[subprocess.Popen[bytes]] = []

    def start_router(self) -> Server:
        log = self._folder / f"router{len(self._routers)}.log"
        flags = ("--control-port", str(self._control_port))
        self._routers.append(Server(self._model, flags, log, "router", self._http_port))
        return self._routers[-1]

    def start_worker(self, role: str) -> "subprocess.Popen[bytes]":
        address = f"tcp://127.0.0.1:{self._control_port}"
        command = crossdock_command("worker", self._model, f"--role={role}", f"--router={address}", "--threads=1")
        self._workers.append(subprocess.Popen(command))
        return self._workers[-1]

    def stop(self) -> None:
        for router in self._routers:
            router.stop()
        for worker in self._workers:
            worker.terminate()
        for worker in self._workers:
            worker.wait(20)
