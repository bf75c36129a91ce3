"""Servers to be measured: how each is started with the demo model, and when it is ready."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import orjson

from crossdock.benchmarks.load import Endpoint, LoadSpec, run_load
from crossdock.benchmarks.report import LoadReport
from crossdock.benchmarks.workload import LoadRequest

START_SECONDS = 300.0
STOP_SECONDS = 30.0
MAX_MODEL_LEN = 1024


@dataclass(frozen=True, slots=True)
class Exports:
    """The demo model as `benchmarks.model_export` wrote it."""

    folder: Path
    gguf: Path
    eos_token_id: int


@dataclass(frozen=True, slots=True)
class Server:
    """``{port}`` in the command is filled in; ``extra`` makes a request greedy and its answer as long as asked for."""

    name: str
    command: tuple[str, ...]
    model: str = "demo"
    extra: dict[str, object] = field(default_factory=lambda: {"temperature": 0, "ignore_eos": True})
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ServedLoad:
    """``ready_seconds`` passed from the start of the process to its first answer."""

    ready_seconds: float
    report: LoadReport


def crossdock(name: str, dtype: str, *workers: str) -> Server:
    start = (sys.executable, "-P", "-c", "from crossdock.cli import main; main()")
    return Server(name, (*start, "serve", "demo", f"--dtype={dtype}", "--port={port}", *workers))


def vllm(environment: Path, exports: Exports, dtype: str, num_threads: int) -> Server:
    command = (str(environment / "bin" / "vllm"), "serve", str(exports.folder), "--served-model-name=demo")
    limits = (f"--dtype={dtype}", "--enforce-eager", f"--max-model-len={MAX_MODEL_LEN}")
    settings = {
        "OMP_NUM_THREADS": str(num_threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
    }
    return Server("vLLM", (*command, *limits, "--host=127.0.0.1", "--port={port}"), environment=settings)


def llama_server(binary: Path, exports: Exports, num_slots: int, num_threads: int) -> Server:
    """llama.cpp's own server, with a slot for each request; the context is divided among the slots."""
    slots = (f"--parallel={num_slots}", f"--ctx-size={num_slots * MAX_MODEL_LEN}", f"--threads={num_threads}")
    command = (str(binary), f"--model={exports.gguf}", "--alias=demo", *slots, "--host=127.0.0.1", "--port={port}")
    return Server("llama.cpp", tuple(part for flag in command for part in flag.split("=", 1)))


def llama_cpp_python(environment: Path, exports: Exports, num_threads: int) -> Server:
    """It answers one request at a time; ``ignore_eos`` is unknown to it, so the end token gets no chance instead."""
    python = (str(environment / "bin" / "python"), "-m", "llama_cpp.server", f"--model={exports.gguf}")
    limits = ("--model_alias=demo", f"--n_ctx={MAX_MODEL_LEN}", f"--n_threads={num_threads}")
    queue = ("--interrupt_requests=False", "--host=127.0.0.1", "--port={port}")
    extra: dict[str, object] = {"temperature": 0, "logit_bias": {str(exports.eos_token_id): -100}}
    return Server("llama-cpp-python", (*python, *limits, *queue), extra=extra)


def transformers_serve(environment: Path, exports: Exports, dtype: str, num_slots: int) -> Server:
    """Without a number of blocks its pool would take most of the machine's memory."""
    block_size = 32
    num_blocks = num_slots * MAX_MODEL_LEN // block_size
    command = (str(environment / "bin" / "transformers"), "serve", str(exports.folder), "--device=cpu")
    batching = ("--continuous-batching", "--attn-implementation=sdpa", f"--dtype={dtype}")
    pool = (f"--cb-block-size={block_size}", f"--cb-num-blocks={num_blocks}")
    generation = {"do_sample": False, "eos_token_id": -1, "pad_token_id": exports.eos_token_id}
    extra: dict[str, object] = {"generation_config": orjson.dumps(generation).decode()}
    flags = (*batching, *pool, "--host=127.0.0.1", "--port={port}")
    return Server("transformers serve", (*command, *flags), model=str(exports.folder), extra=extra)


def measure(server: Server, requests: tuple[LoadRequest, ...], log: Path) -> ServedLoad:
    """Start the server, send it the requests when it answers, stop it; ``RuntimeError`` if it does not answer."""
    port = free_port()
    endpoint = Endpoint(f"http://127.0.0.1:{port}", server.model, extra=server.extra)
    started_at = time.monotonic()
    with running(server, port, log) as process:
        wait_until_it_answers(endpoint, process, log)
        ready_seconds = time.monotonic() - started_at
        report = run_load(LoadSpec(endpoint, requests))
    if report.num_failed:
        raise RuntimeError(f"{server.name} failed {report.num_failed} requests: {report.errors}")
    return ServedLoad(ready_seconds, report)


@contextmanager
def running(server: Server, port: int, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The server's process, in a session of its own that is gone afterwards."""
    command = [part.replace("{port}", str(port)) for part in server.command]
    environment = os.environ | server.environment
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def wait_until_it_answers(endpoint: Endpoint, process: subprocess.Popen[bytes], log: Path) -> None:
    """Ready is who has answered: some name their model before they have loaded it."""
    probe = LoadSpec(endpoint, (LoadRequest("Once upon a time", 4),))
    deadline = time.monotonic() + START_SECONDS
    while run_load(probe).num_failed:
        if process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"{process.args!r} does not answer:\n{log.read_text(errors='replace')[-2000:]}")
        time.sleep(0.25)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
