"""Every knob, on one page. The command line (cli.py) and `LLM` fill these in; nothing reads the environment later."""

from dataclasses import dataclass, field
from pathlib import Path

from .messages import Role

CPU_KV_BYTES = 256 << 20
TRANSPORTS = ("shm", "cuda_ipc", "ucx", "nccl", "tcp")
"""All there are. ``nccl`` is used only where it is named: each channel of it holds memory of both GPUs."""
DUMMY = "dummy"


CHUNK_TOKENS = {"cpu": 512, "cuda": 8192}
"""By kind of device: enough work to fill it."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine: its pool, its step and its limits."""

    device: str = "auto"
    """``cpu``, ``cuda``, ``cuda:1`` or ``auto``: a GPU if there is one."""
    dtype: str = "auto"
    """Weights, activations and KV; ``auto`` is the checkpoint's dtype on a GPU, float32 on a CPU."""
    load_format: str = "auto"
    """``auto`` reads the weights; ``dummy`` draws them at random, from ``config.json`` alone, for benchmarks."""
    block_size: int = 16
    kv_bytes: int | None = None
    """Memory of the pool; ``num_blocks`` overrides it. Unset: `CPU_KV_BYTES`, or what is left on a GPU."""
    num_blocks: int | None = None
    gpu_memory_utilization: float = 0.9
    """Share of a GPU's memory that weights, activations, graphs and pool may take together."""
    num_sharing_gpu: int = 1
    """Workers on the same GPU, which get equal parts of that share."""
    max_model_len: int | None = None
    """Longest prompt plus output; the model's own limit, capped by what the pool holds, when unset."""
    max_num_seqs: int = 256
    chunk_tokens: int | None = None
    """Token budget of one step, decode tokens and prompt chunks together; that of `CHUNK_TOKENS` when unset."""
    num_layer_groups: int = 4
    """In how many pushes a prompt's KV travels."""
    prefix_cache: bool = True
    num_threads: int | None = None
    """Compute threads; all cores when unset (``crossdock serve`` divides them among its workers)."""


@dataclass(frozen=True, slots=True)
class TransferConfig:
    transports: tuple[str, ...] = ("shm", "cuda_ipc", "ucx", "tcp")
    """Allowed ones of `TRANSPORTS`; a pair uses the fastest of them that both have and that passes its probe."""
    checksums: bool = False
    """Compare all KV that arrives with what was sent, before anything attends to it: a pass over it on each side."""
    lease_seconds: float = 10.0
    """A lease that nobody renews for so long is ended."""


@dataclass(frozen=True, slots=True)
class TraceConfig:
    """Where OpenTelemetry's spans go; nowhere as it stands here."""

    otlp_endpoint: str | None = None
    """URL of a collector, like ``http://localhost:4318/v1/traces`` (OTLP over HTTP)."""
    file: str | None = None
    """A JSON object a span is appended; all processes of a host may share the file."""


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One `crossdock worker` process."""

    model: str
    router_address: str
    role: Role = Role.MIXED
    number: int = 0
    """Of the ``num_on_host`` workers that share the GPUs of this host."""
    num_on_host: int = 1
    host: str = "127.0.0.1"
    """Where this worker listens, and the name others reach it by; the port is chosen by the system."""
    cluster_key: bytes = b"crossdock"
    """Key of the block hashes; equal in all processes of one deployment."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    transfer: TransferConfig = field(default_factory=TransferConfig)
    traces: TraceConfig = field(default_factory=TraceConfig)
    heartbeat_seconds: float = 1.0
    router_silence_seconds: float = 10.0
    """Without a word from the router for so long, its requests are dropped: nobody would read them."""


@dataclass(frozen=True, slots=True)
class DoorConfig:
    """Who may come in (router/access). As it stands here everybody may, and nothing is written down."""

    api_keys: Path | None = None
    """A file made by ``crossdock keys``; read again when it changes."""
    api_key: str | None = field(default=None, repr=False)
    """One key without limits, beside or instead of the file."""
    public_paths: tuple[str, ...] = (
        *("/", "/docs", "/openapi.json", "/status.json"),
        *("/health", "/ready", "/version", "/metrics"),
    )
    """Need no key."""
    usage_db: Path | None = None
    """An SQLite file for what each key has used."""
    tls_cert: Path | None = None
    """A chain in PEM form; read again when it changes."""
    tls_key: Path | None = None
    """Unset: in the same file as the certificate."""
    tls_client_ca: Path | None = None
    """Clients must have a certificate that this one signed."""
    cors_origins: tuple[str, ...] = ()
    """Web pages of these origins may read answers; ``*`` for all."""
    request_timeout_seconds: float | None = None
    """A request that takes longer ends; a client may ask for less."""
    body_timeout_seconds: float = 60.0
    """So long a client may take to send the body."""
    max_body_bytes: int = 8 << 20
    """A longer HTTP request gets 413."""
    max_nesting: int = 100
    """Levels of arrays and objects in a body."""


@dataclass(frozen=True, slots=True)
class ChatConfig:
    """How chats become prompts and answers are read, where the model's own files are not to decide."""

    chat_template: str | None = None
    """A file with a Jinja template, instead of the model's."""
    tool_parser: str = "auto"
    """Whose spelling of tool calls is read; ``auto`` goes by the chat template."""
    reasoning_parser: str = "auto"
    """Likewise for reasoning; ``none`` leaves it in the text."""


@dataclass(frozen=True, slots=True)
class ResponsesConfig:
    """How many responses the router keeps in memory, for clients that come back to them."""

    max_kept: int = 4096
    """0 keeps none."""
    max_bytes: int = 64 << 20
    max_seconds: float = 86_400.0


@dataclass(frozen=True, slots=True)
class RouterConfig:
    """The `crossdock router` process. ``access_log`` is a file, or ``-`` for the standard output."""

    model: str
    host: str = "127.0.0.1"
    port: int = 8000
    control_host: str = "127.0.0.1"
    control_port: int = 0
    """Where workers report; 0 lets the system choose."""
    served_model_name: str | None = None
    fingerprint: str | None = None
    """Of the model whose tokens it speaks (`ModelFingerprint.model`); unset, the first worker's model will do."""
    access_log: str | None = None
    traces: TraceConfig = field(default_factory=TraceConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    pooling: str = "auto"
    """How prompts become vectors: ``last``, ``mean``, or ``auto``, what the model's files say."""
    cluster_key: bytes = b"crossdock"
    dead_after_seconds: float = 3.0
    """A worker silent for so long is dead."""
    max_attempts: int = 3
    """How often a request that has emitted nothing may start again elsewhere."""
    max_open_requests: int = 2048
    """More are refused with 503 before any work."""
    door: DoorConfig = field(default_factory=DoorConfig)
    drain_seconds: float = 30.0
    responses: ResponsesConfig = field(default_factory=ResponsesConfig)
