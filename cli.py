"""The `crossdock` command: flags become configuration here, and only here.

Heavy imports wait for the command that needs them.
"""

import logging
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from .benchmarks.bench import bench
from .core.config import ChatConfig, EngineConfig, RouterConfig, TraceConfig, TransferConfig, WorkerConfig
from .core.messages import Incarnation, Role
from .deploy.launch import USAGE_STATUS, WorkerCommand, WorkerFailed, WorkerGroup, end_with_parent
from .deploy.model_source import ModelSource, ModelSourceError, resolve
from .deploy.traces import TracesUnavailable, tracing

if TYPE_CHECKING:
    from .router.telemetry import Telemetry
    from .router.text import TextModel

app = typer.Typer(
    name="crossdock",
    help="Serve large language models with prefill and decode on separate workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(text: str) -> int:
    """``256MiB``, ``2G``, ``1048576``; raises ``typer.BadParameter``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write 256MiB or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def check_transports(names: str) -> None:
    """Raises ``typer.BadParameter``."""
    if unknown := set(names.split(",")) - set(TRANSFER.transports):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))} is no transport; there are {TRANSPORTS}")


def check_tcp_address(address: str) -> None:
    """Raises ``typer.BadParameter``."""
    if not re.fullmatch(r"tcp://\S+:\d+", address):
        raise typer.BadParameter(f"{address!r} is no address; write tcp://host:port")


def check_dtype(name: str) -> None:
    """Raises ``typer.BadParameter``."""
    if name not in DTYPES:
        raise typer.BadParameter(f"{name!r} is no dtype; there are {', '.join(DTYPES)}")


def _checked(check: Callable[[str], object]) -> Callable[[str | None], str | None]:
    """Refuse a flag where it is typed, rather than in every worker that is started with it."""

    def callback(text: str | None) -> str | None:
        if text is not None:
            check(text)
        return text

    return callback


DTYPES = ("auto", "float32", "bfloat16", "float16")
ENGINE, TRANSFER, CHAT, ROUTER = EngineConfig(), TransferConfig(), ChatConfig(), RouterConfig(model="")
TRANSPORTS = ",".join(TRANSFER.transports)

Model = Annotated[str, typer.Argument(help="demo, a folder, a .gguf file, or a name on the Hugging Face hub.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port of the HTTP API; 0 lets the system choose.", min=0, max=65535)]
ServedName = Annotated[str | None, typer.Option(help="Model name that clients see.")]
ChatTemplate = Annotated[str | None, typer.Option(help="File with a Jinja chat template, instead of the model's.")]
ToolParser = Annotated[
    str,
    typer.Option(help="How the model writes tool calls: hermes, llama3_json, mistral, … or auto (by its template)."),
]
ReasoningParser = Annotated[str, typer.Option(help="How the model writes reasoning: think, none or auto.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto (a GPU if there is one).")]
Dtype = Annotated[
    str,
    typer.Option(
        help="float32, bfloat16 or auto (the model's on a GPU, float32 on a CPU).", callback=_checked(check_dtype)
    ),
]
LoadFormat = Annotated[str, typer.Option(help="auto, or dummy: random weights from config.json alone, for benchmarks.")]
BlockSize = Annotated[int, typer.Option(help="Tokens in a KV block.", min=1)]
KvMemory = Annotated[
    str | None,
    typer.Option(
        help="Memory of each worker's KV pool, like 256MiB or 2G; 256MiB on a CPU, what is left on a GPU.",
        callback=_checked(parse_bytes),
    ),
]
NumBlocks = Annotated[int | None, typer.Option(help="KV blocks of each pool, instead of --kv-memory.", min=2)]
GpuMemoryUtilization = Annotated[
    float, typer.Option(help="Share of a GPU's memory that weights, graphs and pool may take.", min=0.05, max=1.0)
]
MaxModelLen = Annotated[int | None, typer.Option(help="Longest prompt plus output, in tokens.", min=2)]
MaxNumSeqs = Annotated[int, typer.Option(help="Most requests in one step.", min=1)]
ChunkTokens = Annotated[int, typer.Option(help="Token budget of one step.", min=16)]
LayerGroups = Annotated[int, typer.Option(help="In how many pushes a prompt's KV travels.", min=1)]
PrefixCache = Annotated[bool, typer.Option(help="Reuse the KV of prompts that start alike.")]
Transports = Annotated[
    str, typer.Option(help="Allowed KV transports, comma-separated.", callback=_checked(check_transports))
]
Threads = Annotated[
    int | None, typer.Option(help="Compute threads of each worker; the cores are divided when unset.", min=1)
]

AccessLog = Annotated[
    str | None, typer.Option(help="File for a JSON line a request, without prompts and keys; - is the standard output.")
]
OtlpEndpoint = Annotated[
    str | None, typer.Option(help="Send OpenTelemetry traces there, like http://localhost:4318/v1/traces.")
]
TraceFile = Annotated[str | None, typer.Option(help="Append OpenTelemetry spans to this file, a JSON line each.")]


@app.command()
def serve(
    model: Model,
    prefill: Annotated[int, typer.Option(help="Prefill workers.", min=0)] = 1,
    decode: Annotated[int, typer.Option(help="Decode workers.", min=0)] = 1,
    mixed: Annotated[int, typer.Option(help="Workers that do both; instead of prefill and decode workers.", min=0)] = 0,
    host: Host = ROUTER.host,
    port: Port = ROUTER.port,
    served_model_name: ServedName = None,
    chat_template: ChatTemplate = None,
    tool_parser: ToolParser = CHAT.tool_parser,
    reasoning_parser: ReasoningParser = CHAT.reasoning_parser,
    device: Device = ENGINE.device,
    dtype: Dtype = ENGINE.dtype,
    load_format: LoadFormat = ENGINE.load_format,
    block_size: BlockSize = ENGINE.block_size,
    kv_memory: KvMemory = None,
    num_blocks: NumBlocks = None,
    gpu_memory_utilization: GpuMemoryUtilization = ENGINE.gpu_memory_utilization,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = ENGINE.max_num_seqs,
    chunk_tokens: ChunkTokens = ENGINE.chunk_tokens,
    layer_groups: LayerGroups = ENGINE.num_layer_groups,
    prefix_cache: PrefixCache = ENGINE.prefix_cache,
    transports: Transports = TRANSPORTS,
    threads: Threads = None,
    access_log: AccessLog = None,
    otlp_endpoint: OtlpEndpoint = None,
    trace_file: TraceFile = None,
) -> None:
    """Serve MODEL on this host: a router with an OpenAI-compatible API, and its workers.

    One prefill and one decode worker unless told otherwise: `crossdock serve demo --prefill 2 --decode 2`, or
    `crossdock serve demo --mixed 1`.
    """
    roles = _roles(prefill, decode, mixed)
    flags = [
        f"--device={device}",
        f"--dtype={dtype}",
        f"--load-format={load_format}",
        f"--block-size={block_size}",
        f"--gpu-memory-utilization={gpu_memory_utilization}",
        f"--max-num-seqs={max_num_seqs}",
        f"--chunk-tokens={chunk_tokens}",
        f"--layer-groups={layer_groups}",
        f"--{'' if prefix_cache else 'no-'}prefix-cache",
        f"--transports={transports}",
        f"--threads={threads or max(1, _num_cores() // len(roles))}",
        f"--parent-pid={os.getpid()}",
    ]
    flags += [f"--kv-memory={kv_memory}"] if kv_memory else []
    flags += [f"--num-blocks={num_blocks}"] if num_blocks else []
    flags += [f"--max-model-len={max_model_len}"] if max_model_len else []
    flags += [f"--otlp-endpoint={otlp_endpoint}"] if otlp_endpoint else []
    flags += [f"--trace-file={trace_file}"] if trace_file else []
    config = RouterConfig(
        model,
        host=host,
        port=port,
        served_model_name=served_model_name,
        chat=ChatConfig(chat_template, tool_parser, reasoning_parser),
        access_log=access_log,
        traces=TraceConfig(otlp_endpoint, trace_file),
    )
    _serve(config, [(role, flags) for role in roles])


@app.command()
def router(
    model: Model,
    host: Host = ROUTER.host,
    port: Port = ROUTER.port,
    control_host: Annotated[
        str, typer.Option(help="Address on which workers reach this router.")
    ] = ROUTER.control_host,
    control_port: Annotated[int, typer.Option(help="Port for workers; 0 lets the system choose.")] = 5570,
    served_model_name: ServedName = None,
    chat_template: ChatTemplate = None,
    tool_parser: ToolParser = CHAT.tool_parser,
    reasoning_parser: ReasoningParser = CHAT.reasoning_parser,
    access_log: AccessLog = None,
    otlp_endpoint: OtlpEndpoint = None,
    trace_file: TraceFile = None,
) -> None:
    """Run the router alone; workers join with `crossdock worker MODEL --router tcp://HOST:PORT`."""
    config = RouterConfig(
        model,
        host=host,
        port=port,
        control_host=control_host,
        control_port=control_port,
        served_model_name=served_model_name,
        chat=ChatConfig(chat_template, tool_parser, reasoning_parser),
        access_log=access_log,
        traces=TraceConfig(otlp_endpoint, trace_file),
    )
    _serve(config, [])


@app.command()
def worker(
    model: Model,
    router: Annotated[
        str, typer.Option(help="Control address of the router, tcp://host:port.", callback=_checked(check_tcp_address))
    ],
    role: Annotated[Role, typer.Option(help="Which work the router may send here.")] = Role.MIXED,
    host: Annotated[str, typer.Option(help="Address of this host that routers and peers can reach.")] = "127.0.0.1",
    device: Device = ENGINE.device,
    dtype: Dtype = ENGINE.dtype,
    load_format: LoadFormat = ENGINE.load_format,
    block_size: BlockSize = ENGINE.block_size,
    kv_memory: KvMemory = None,
    num_blocks: NumBlocks = None,
    gpu_memory_utilization: GpuMemoryUtilization = ENGINE.gpu_memory_utilization,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = ENGINE.max_num_seqs,
    chunk_tokens: ChunkTokens = ENGINE.chunk_tokens,
    layer_groups: LayerGroups = ENGINE.num_layer_groups,
    prefix_cache: PrefixCache = ENGINE.prefix_cache,
    transports: Transports = TRANSPORTS,
    threads: Threads = None,
    otlp_endpoint: OtlpEndpoint = None,
    trace_file: TraceFile = None,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run one worker: an engine that reports to a router and serves what it is sent."""
    _start_logging(f"{role.value}-{os.getpid()}")
    if parent_pid is not None:
        end_with_parent(parent_pid)
    engine = EngineConfig(
        device=device,
        dtype=dtype,
        load_format=load_format,
        block_size=block_size,
        kv_bytes=parse_bytes(kv_memory) if kv_memory else None,
        num_blocks=num_blocks,
        gpu_memory_utilization=gpu_memory_utilization,
        max_model_len=max_model_len,
        max_num_seqs=max_num_seqs,
        chunk_tokens=chunk_tokens,
        num_layer_groups=layer_groups,
        prefix_cache=prefix_cache,
        num_threads=threads,
    )
    transfer = TransferConfig(transports=tuple(transports.split(",")))
    traces = TraceConfig(otlp_endpoint, trace_file)
    config = WorkerConfig(model, router, role=role, host=host, engine=engine, transfer=transfer, traces=traces)
    source = _resolve(model)
    from .worker import Worker  # torch: only this command pays for it

    try:
        ready = Worker(config, source.path, source.fingerprint())
    except (ValueError, OSError) as error:
        _fail(str(error))
    ready.run()


def _serve(config: RouterConfig, workers: list[tuple[Role, list[str]]]) -> None:
    """Bind both ports before anything slow, start the workers, then be the router until a signal ends it."""
    _start_logging("router")
    from .core.mailbox import AsyncMailbox
    from .router.server import listen, serve_router

    source = _resolve(config.model)
    try:
        listener = listen(config.host, config.port)
        mailbox = AsyncMailbox(config.control_host, config.control_port, Incarnation(secrets.token_hex(8)))
    except OSError as error:
        _fail(error.strerror or str(error))
    address = f"--router={mailbox.peer.address}"
    commands = [
        WorkerCommand(f"{role.value} worker {number}", (config.model, f"--role={role.value}", address, *flags))
        for number, (role, flags) in enumerate(workers)
    ]
    group = WorkerGroup(commands)
    try:
        with _telemetry(config) as telemetry:
            group.start()
            serve_router(config, listener, mailbox, _text_of(source, config.chat), group.run, telemetry)
    except* WorkerFailed as failures:
        failure: BaseException = failures
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
        _fail(str(failure))
    finally:
        group.stop()


@contextmanager
def _telemetry(config: RouterConfig) -> "Iterator[Telemetry]":
    """What tells of the router's requests; all of it is written when the block ends."""
    from .router.access_log import LineWriter
    from .router.telemetry import Telemetry

    with ExitStack() as stack:
        try:
            lines = stack.enter_context(LineWriter(config.access_log)) if config.access_log else None
            tracer = stack.enter_context(tracing(config.traces, "crossdock-router"))
        except (OSError, TracesUnavailable) as error:
            _fail(str(error))
        yield Telemetry(lines, tracer)


def _roles(prefill: int, decode: int, mixed: int) -> list[Role]:
    """Raises ``typer.BadParameter`` for a set of workers that can't serve."""
    if mixed:
        return [Role.MIXED] * mixed
    if not prefill or not decode:
        raise typer.BadParameter("at least one prefill and one decode worker are needed, or --mixed 1")
    return [Role.PREFILL] * prefill + [Role.DECODE] * decode


def _num_cores() -> int:
    return len(os.sched_getaffinity(0))


def _start_logging(name: str) -> None:
    logging.basicConfig(level=logging.INFO, format=f"%(asctime)s {name} %(levelname)s %(message)s", datefmt="%H:%M:%S")


def _resolve(model: str) -> ModelSource:
    try:
        return resolve(model)
    except ModelSourceError as error:
        _fail(str(error))


def _text_of(source: ModelSource, chat: ChatConfig) -> "TextModel":
    from .router.text import load_text

    try:
        return load_text(source.path, chat)
    except ValueError as error:
        _fail(str(error))


def _fail(reason: str) -> NoReturn:
    print(f"crossdock: {reason}", file=sys.stderr)
    raise SystemExit(USAGE_STATUS)


app.command()(bench)


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="crossdock")
