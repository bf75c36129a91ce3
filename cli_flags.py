"""The flags of the commands: each is described once, and refused where it is typed rather than in every process.

Any flag may come from the environment instead, as ``CROSSDOCK_<COMMAND>_<FLAG>`` (``CROSSDOCK_SERVE_PORT``).
"""

import functools
import inspect
import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import typer

from .core.config import TRANSPORTS as ALL_TRANSPORTS
from .core.config import (
    ChatConfig,
    DoorConfig,
    EngineConfig,
    ResponsesConfig,
    RouterConfig,
    TraceConfig,
    TransferConfig,
)

T = TypeVar("T")
Command = Callable[..., None]

_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


def parse_bytes(text: str) -> int:
    """``256MiB``, ``2G``, ``1048576``; raises ``typer.BadParameter``."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None:
        raise typer.BadParameter(f"{text!r} is no size; write 256MiB or 2G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def check_transports(names: str) -> None:
    """Raises ``typer.BadParameter``."""
    if unknown := set(names.split(",")) - set(ALL_TRANSPORTS):
        raise typer.BadParameter(f"{', '.join(sorted(unknown))} is no transport; there are {', '.join(ALL_TRANSPORTS)}")


def check_tcp_address(address: str) -> None:
    """Raises ``typer.BadParameter``."""
    if not re.fullmatch(r"tcp://\S+:\d+", address):
        raise typer.BadParameter(f"{address!r} is no address; write tcp://host:port")


def check_dtype(name: str) -> None:
    """Raises ``typer.BadParameter``."""
    if name not in DTYPES:
        raise typer.BadParameter(f"{name!r} is no dtype; there are {', '.join(DTYPES)}")


def check_origins(origins: list[str]) -> list[str]:
    """Raises ``typer.BadParameter``."""
    for origin in origins:
        if not re.fullmatch(r"\*|[a-z][a-z0-9+.-]*://[^/\s]+", origin):
            raise typer.BadParameter(f"{origin!r} is no origin; write https://host, or * for all")
    return origins


def checked(check: Callable[[str], object]) -> Callable[[str | None], str | None]:
    """A callback for an option."""

    def callback(text: str | None) -> str | None:
        if text is not None:
            check(text)
        return text

    return callback


def with_flags_of(make: Callable[..., T], into: str) -> Callable[[Command], Command]:
    """Decorates a command: in place of its parameter ``into`` it has the flags of ``make``, and gets their result."""
    added = inspect.signature(make).parameters

    def decorate(command: Command) -> Command:
        @functools.wraps(command)
        def with_flags(**given: Any) -> None:
            made = make(**{name: given.pop(name) for name in added})
            command(**given, **{into: made})

        own = inspect.signature(command).parameters
        parameters = [*(own[name] for name in own if name != into), *added.values()]
        shown = inspect.Signature([each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters])
        with_flags.__signature__ = shown  # type: ignore[attr-defined]  # typer reads it and the annotations
        with_flags.__annotations__ = {each.name: each.annotation for each in parameters}
        return with_flags

    return decorate


DTYPES = ("auto", "float32", "bfloat16", "float16")
ENGINE, TRANSFER, CHAT, ROUTER = EngineConfig(), TransferConfig(), ChatConfig(), RouterConfig(model="")
TRANSPORTS = ",".join(TRANSFER.transports)

Model = Annotated[str, typer.Argument(help="demo, a folder, a .gguf file, or a name on the Hugging Face hub.")]
Host = Annotated[str, typer.Option(help="Address to listen on.")]
Port = Annotated[int, typer.Option(help="Port of the HTTP API; 0 lets the system choose.", min=0, max=65535)]
ServedName = Annotated[str | None, typer.Option(help="Model name that clients see.")]
PoolingFlag = Annotated[
    Literal["auto", "last", "mean"],
    typer.Option("--pooling", help="How /v1/embeddings makes a vector of a prompt; auto: as the model's files say."),
]
MaxOpenRequests = Annotated[
    int, typer.Option(help="Most requests at a time, choices counted; more are refused with 503.", min=1)
]
AccessLog = Annotated[
    str | None, typer.Option(help="File for a JSON line a request, without prompts and keys; - is the standard output.")
]


def engine(
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 or auto (a GPU if there is one).")] = ENGINE.device,
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, bfloat16 or auto (the model's on a GPU, float32 on a CPU).", callback=checked(check_dtype)
        ),
    ] = ENGINE.dtype,
    load_format: Annotated[
        str, typer.Option(help="auto, or dummy: random weights from config.json alone, for benchmarks.")
    ] = ENGINE.load_format,
    block_size: Annotated[int, typer.Option(help="Tokens in a KV block.", min=1)] = ENGINE.block_size,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            help="Memory of each worker's KV pool, like 256MiB or 2G; 256MiB on a CPU, what is left on a GPU.",
            callback=checked(parse_bytes),
        ),
    ] = None,
    num_blocks: Annotated[
        int | None, typer.Option(help="KV blocks of each pool, instead of --kv-memory.", min=2)
    ] = None,
    gpu_memory_utilization: Annotated[
        float, typer.Option(help="Share of a GPU's memory that weights, graphs and pool may take.", min=0.05, max=1.0)
    ] = ENGINE.gpu_memory_utilization,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt plus output, in tokens.", min=2)] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Most requests in one step.", min=1)] = ENGINE.max_num_seqs,
    chunk_tokens: Annotated[
        int | None, typer.Option(help="Token budget of one step; 512 on a CPU, 8192 on a GPU when unset.", min=16)
    ] = None,
    layer_groups: Annotated[
        int, typer.Option(help="In how many pushes a prompt's KV travels.", min=1)
    ] = ENGINE.num_layer_groups,
    prefix_cache: Annotated[bool, typer.Option(help="Reuse the KV of prompts that start alike.")] = ENGINE.prefix_cache,
    threads: Annotated[
        int | None, typer.Option(help="Compute threads of each worker; the cores are divided when unset.", min=1)
    ] = None,
) -> EngineConfig:
    """How a worker computes."""
    return EngineConfig(
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


def transfer(
    transports: Annotated[
        str,
        typer.Option(
            help=f"Allowed KV transports, comma-separated, of {', '.join(ALL_TRANSPORTS)}; the fastest that works "
            "is used.",
            callback=checked(check_transports),
        ),
    ] = TRANSPORTS,
    transfer_checksums: Annotated[
        bool, typer.Option(help="Compare all KV that arrives with what was sent, before anything reads it.")
    ] = TRANSFER.checksums,
) -> TransferConfig:
    """How KV travels between workers."""
    return TransferConfig(transports=tuple(transports.split(",")), checksums=transfer_checksums)


def worker_flags(engine: EngineConfig, transfer: TransferConfig, traces: TraceConfig) -> list[str]:
    """The flags from which another process makes the same three."""
    values = {
        "device": engine.device,
        "dtype": engine.dtype,
        "load-format": engine.load_format,
        "block-size": engine.block_size,
        "kv-memory": engine.kv_bytes,
        "num-blocks": engine.num_blocks,
        "gpu-memory-utilization": engine.gpu_memory_utilization,
        "max-model-len": engine.max_model_len,
        "max-num-seqs": engine.max_num_seqs,
        "chunk-tokens": engine.chunk_tokens,
        "layer-groups": engine.num_layer_groups,
        "threads": engine.num_threads,
        "transports": ",".join(transfer.transports),
        "otlp-endpoint": traces.otlp_endpoint,
        "trace-file": traces.file,
    }
    switches = {"prefix-cache": engine.prefix_cache, "transfer-checksums": transfer.checksums}
    return [
        *(f"--{name}={value}" for name, value in values.items() if value is not None),
        *(f"--{'' if is_on else 'no-'}{name}" for name, is_on in switches.items()),
    ]


def traces(
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Send OpenTelemetry traces there, like http://localhost:4318/v1/traces.")
    ] = None,
    trace_file: Annotated[
        str | None, typer.Option(help="Append OpenTelemetry spans to this file, a JSON line each.")
    ] = None,
) -> TraceConfig:
    """Where traces go."""
    return TraceConfig(otlp_endpoint, trace_file)


def chat(
    chat_template: Annotated[
        str | None, typer.Option(help="File with a Jinja chat template, instead of the model's.")
    ] = None,
    tool_parser: Annotated[
        str,
        typer.Option(
            help="How the model writes tool calls: hermes, llama3_json, mistral, … or auto (by its template)."
        ),
    ] = CHAT.tool_parser,
    reasoning_parser: Annotated[
        str, typer.Option(help="How the model writes reasoning: think, none or auto.")
    ] = CHAT.reasoning_parser,
) -> ChatConfig:
    """How chats become prompts and answers are read."""
    return ChatConfig(chat_template, tool_parser, reasoning_parser)


def responses(
    max_kept_responses: Annotated[
        int, typer.Option(help="Most responses kept in memory for clients that come back to them; 0 keeps none.", min=0)
    ] = ROUTER.responses.max_kept,
    kept_responses_memory: Annotated[
        str, typer.Option(help="Memory for them.", callback=checked(parse_bytes))
    ] = f"{ROUTER.responses.max_bytes >> 20}MiB",
    kept_responses_seconds: Annotated[
        float, typer.Option(help="How long one is kept at most.", min=0)
    ] = ROUTER.responses.max_seconds,
) -> ResponsesConfig:
    """What is kept of `/v1/responses`."""
    return ResponsesConfig(max_kept_responses, parse_bytes(kept_responses_memory), kept_responses_seconds)


ApiKeysFile = Annotated[
    Path | None, typer.Option("--api-keys", help="File of API keys, made by `crossdock keys`; changes count at once.")
]
UsageDb = Annotated[Path | None, typer.Option(help="SQLite file for the tokens that each key has used.")]


def door(
    api_keys: ApiKeysFile = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="CROSSDOCK_API_KEY",
            help="One API key without limits. A command line can be read by everybody on the host: "
            "use the environment variable.",
        ),
    ] = None,
    public_path: Annotated[list[str], typer.Option(help="Needs no key; repeatable.")] = [*ROUTER.door.public_paths],  # noqa: B006
    request_timeout: Annotated[
        float | None, typer.Option(help="Longest time of a request in seconds; clients may ask for less.", min=0.001)
    ] = None,
    body_timeout: Annotated[
        float, typer.Option(help="Longest time that the body of a request takes to come, in seconds.", min=0.001)
    ] = ROUTER.door.body_timeout_seconds,
    max_body_size: Annotated[
        str, typer.Option(help="Longest HTTP request body.", callback=checked(parse_bytes))
    ] = f"{ROUTER.door.max_body_bytes >> 20}MiB",
    usage_db: UsageDb = None,
    cors_origin: Annotated[
        list[str],
        typer.Option(help="Web pages of this origin may use the API; repeatable, * for all.", callback=check_origins),
    ] = [],  # noqa: B006
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate chain (PEM) for HTTPS.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its key (PEM), if it is in another file.")] = None,
    tls_client_ca: Annotated[
        Path | None, typer.Option(help="Only clients with a certificate of this authority (PEM) may connect.")
    ] = None,
) -> DoorConfig:
    """Who may come in."""
    if tls_cert is None and (tls_key or tls_client_ca):
        raise typer.BadParameter("--tls-key and --tls-client-ca need --tls-cert")
    return DoorConfig(
        api_keys=api_keys,
        api_key=api_key,
        public_paths=tuple(public_path),
        request_timeout_seconds=request_timeout,
        body_timeout_seconds=body_timeout,
        max_body_bytes=parse_bytes(max_body_size),
        usage_db=usage_db,
        cors_origins=tuple(cors_origin),
        tls_cert=tls_cert,
        tls_key=tls_key,
        tls_client_ca=tls_client_ca,
    )
