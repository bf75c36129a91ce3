"""The `crossdock` command: flags become configuration here, and only here.

Heavy imports wait for the command that needs them.
"""

import logging
import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from .benchmarks.bench import bench
from .cli_access import keys, usage
from .cli_doctor import doctor, examine
from .cli_flags import (
    ROUTER,
    AccessLog,
    Host,
    MaxOpenRequests,
    Model,
    PoolingFlag,
    Port,
    ServedName,
    chat,
    check_tcp_address,
    checked,
    door,
    engine,
    responses,
    traces,
    transfer,
    with_flags_of,
    worker_flags,
)
from .cli_settings import settings
from .core.config import (
    DUMMY,
    ChatConfig,
    DoorConfig,
    EngineConfig,
    ResponsesConfig,
    RouterConfig,
    TraceConfig,
    TransferConfig,
    WorkerConfig,
)
from .core.messages import Incarnation, Role
from .deploy.launch import USAGE_STATUS, WorkerCommand, WorkerFailed, WorkerGroup, end_with_parent
from .deploy.model_source import ModelSource, ModelSourceError, resolve
from .deploy.traces import StageSpans, TracesUnavailable, tracing

if TYPE_CHECKING:
    from .router.telemetry import Telemetry
    from .router.text import TextModel

app = typer.Typer(
    name="crossdock",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"auto_envvar_prefix": "CROSSDOCK"},
)


@app.command()
@with_flags_of(engine, into="engine")
@with_flags_of(transfer, into="transfer")
@with_flags_of(traces, into="traces")
@with_flags_of(chat, into="chat")
@with_flags_of(responses, into="responses")
@with_flags_of(door, into="door")
def serve(
    model: Model,
    *,
    engine: EngineConfig,
    transfer: TransferConfig,
    traces: TraceConfig,
    chat: ChatConfig,
    responses: ResponsesConfig,
    door: DoorConfig,
    prefill: Annotated[int, typer.Option(help="Prefill workers.", min=0)] = 1,
    decode: Annotated[int, typer.Option(help="Decode workers.", min=0)] = 1,
    mixed: Annotated[int, typer.Option(help="Workers that do both; instead of prefill and decode workers.", min=0)] = 0,
    host: Host = ROUTER.host,
    port: Port = ROUTER.port,
    served_model_name: ServedName = None,
    pooling: PoolingFlag = "auto",
    max_open_requests: MaxOpenRequests = ROUTER.max_open_requests,
    access_log: AccessLog = None,
) -> None:
    """Serve MODEL on this host: a router with an OpenAI-compatible API, and its workers.

    One prefill and one decode worker unless told otherwise: `crossdock serve demo --prefill 2 --decode 2`, or
    `crossdock serve demo --mixed 1`.
    """
    roles = _roles(prefill, decode, mixed)
    threads = engine.num_threads or max(1, _num_cores() // len(roles))
    flags = worker_flags(replace(engine, num_threads=threads), transfer, traces)
    flags += [f"--parent-pid={os.getpid()}", f"--num-on-host={len(roles)}"]
    config = RouterConfig(
        model,
        host=host,
        port=port,
        served_model_name=served_model_name,
        pooling=pooling,
        access_log=access_log,
        max_open_requests=max_open_requests,
        traces=traces,
        chat=chat,
        responses=responses,
        door=door,
    )
    _serve(config, [(role, [f"--number={number}", *flags]) for number, role in enumerate(roles)])


@app.command()
@with_flags_of(traces, into="traces")
@with_flags_of(chat, into="chat")
@with_flags_of(responses, into="responses")
@with_flags_of(door, into="door")
def router(
    model: Model,
    *,
    traces: TraceConfig,
    chat: ChatConfig,
    responses: ResponsesConfig,
    door: DoorConfig,
    host: Host = ROUTER.host,
    port: Port = ROUTER.port,
    control_host: Annotated[
        str, typer.Option(help="Address on which workers reach this router.")
    ] = ROUTER.control_host,
    control_port: Annotated[int, typer.Option(help="Port for workers; 0 lets the system choose.")] = 5570,
    served_model_name: ServedName = None,
    pooling: PoolingFlag = "auto",
    max_open_requests: MaxOpenRequests = ROUTER.max_open_requests,
    access_log: AccessLog = None,
) -> None:
    """Run the router alone; workers join with `crossdock worker MODEL --router tcp://HOST:PORT`."""
    config = RouterConfig(
        model,
        host=host,
        port=port,
        control_host=control_host,
        control_port=control_port,
        served_model_name=served_model_name,
        pooling=pooling,
        access_log=access_log,
        max_open_requests=max_open_requests,
        traces=traces,
        chat=chat,
        responses=responses,
        door=door,
    )
    _serve(config, [])


@app.command()
@with_flags_of(engine, into="engine")
@with_flags_of(transfer, into="transfer")
@with_flags_of(traces, into="traces")
def worker(
    model: Model,
    *,
    engine: EngineConfig,
    transfer: TransferConfig,
    traces: TraceConfig,
    router: Annotated[
        str, typer.Option(help="Control address of the router, tcp://host:port.", callback=checked(check_tcp_address))
    ],
    role: Annotated[Role, typer.Option(help="Which work the router may send here.")] = Role.MIXED,
    host: Annotated[str, typer.Option(help="Address of this host that routers and peers can reach.")] = "127.0.0.1",
    number: Annotated[int, typer.Option(help="Of the workers that share this host's GPUs.", min=0)] = 0,
    num_on_host: Annotated[int, typer.Option(help="How many workers share this host's GPUs.", min=1)] = 1,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Run one worker: an engine that reports to a router and serves what it is sent."""
    _start_logging(f"{role.value}-{os.getpid()}")
    if parent_pid is not None:
        end_with_parent(parent_pid)
    config = WorkerConfig(
        model,
        router,
        role=role,
        number=number,
        num_on_host=num_on_host,
        host=host,
        engine=engine,
        transfer=transfer,
        traces=traces,
    )
    _work(config)


def _work(config: WorkerConfig) -> None:
    """Load the model and be a worker until told to stop."""
    source = _resolve(config.model, needs_weights=config.engine.load_format != DUMMY)
    from .worker import Worker  # torch: only this command pays for it

    with ExitStack() as stack:
        try:
            tracer = stack.enter_context(tracing(config.traces, f"crossdock-{config.role.value}"))
            spans = StageSpans(tracer, f"{config.role.value}-{os.getpid()}")
            ready = Worker(config, source.path, source.fingerprint(), spans.note)
        except (ValueError, OSError) as error:
            _fail(str(error))
        ready.run()


def _serve(config: RouterConfig, workers: list[tuple[Role, list[str]]]) -> None:
    """Bind both ports before anything slow, start the workers, then be the router until a signal ends it."""
    _start_logging("router")
    from .core.mailbox import AsyncMailbox
    from .router.access.access import Access
    from .router.server import listen, serve_router

    source = _resolve(config.model, needs_weights=False)
    try:
        config = replace(config, fingerprint=source.fingerprint().model)
        Access(config.door, config.model).close()
        listener = listen(config.host, config.port)
        mailbox = AsyncMailbox(config.control_host, config.control_port, Incarnation(secrets.token_hex(8)))
    except OSError as error:
        _fail(error.strerror or str(error))
    except ValueError as error:
        _fail(str(error))
    address = f"--router={mailbox.peer.address}"
    commands = [
        WorkerCommand(f"{role.value} worker {number}", (config.model, f"--role={role.value}", address, *flags))
        for number, (role, flags) in enumerate(workers)
    ]
    group = WorkerGroup(commands)
    failure: BaseException | None = None
    try:
        with _telemetry(config) as telemetry:
            group.start()
            serve_router(config, listener, mailbox, _text_of(source, config), group.run, telemetry)
    except* WorkerFailed as failures:
        failure = failures
        while isinstance(failure, BaseExceptionGroup):
            failure = failure.exceptions[0]
    finally:
        group.stop()
    if failure is not None:
        _fail(str(failure))


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


def _resolve(model: str, needs_weights: bool) -> ModelSource:
    try:
        return resolve(model, needs_weights)
    except ModelSourceError as error:
        _fail(str(error))


def _text_of(source: ModelSource, config: RouterConfig) -> "TextModel":
    from .router.text import load_text

    try:
        return load_text(source.path, config.chat, config.pooling)
    except ValueError as error:
        _fail(str(error))


def _fail(reason: str) -> NoReturn:
    print(f"crossdock: {reason}", file=sys.stderr)
    raise SystemExit(USAGE_STATUS)


app.callback()(settings)
app.command()(bench)
app.command()(usage)
app.command()(doctor)
app.add_typer(keys, name="keys")
app.add_typer(examine, name="examine")


def main() -> None:
    """Entry point of the console script."""
    app(prog_name="crossdock")
