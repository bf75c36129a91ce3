"""`crossdock doctor`: why nothing starts, or why KV travels slowly."""

import sys
from typing import Annotated

import typer

from .core.messages import Role
from .deploy.fleet_check import check_fleet
from .deploy.host_check import check_host
from .deploy.launch import USAGE_STATUS


def doctor(
    router: Annotated[str | None, typer.Option(help="URL of a running server: examine its workers instead.")] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="CROSSDOCK_API_KEY", help="For a server that tells its status only with a key."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="For programs.")] = False,
) -> None:
    """Examine this host, or a running server: what is there, how fast KV travels, what is wrong and what to do.

    Ends with status 1 if something would keep a server from working.
    """
    report = check_host() if router is None else check_fleet(router, api_key)
    print(report.as_json() if json else report.as_text())
    raise SystemExit(0 if report.is_well else 1)


examine = typer.Typer(hidden=True, help="Parts of `crossdock doctor` that run in processes of their own.")


@examine.command()
def devices() -> None:
    """Print what torch and UCX see, as JSON."""
    import msgspec

    from .examine import look_at_devices  # whatever it imports may fail

    print(msgspec.json.encode(look_at_devices()).decode())


@examine.command()
def side(
    role: Annotated[Role, typer.Option()],
    device: Annotated[str, typer.Option()],
    transport: Annotated[str, typer.Option()],
    router: Annotated[str, typer.Option()],
) -> None:
    """Be one of the two processes between which a transport is tried."""
    from .examine import Side

    try:
        made = Side(role, device, transport, router)
    except (ValueError, OSError, ImportError) as error:
        print(f"crossdock: {error}", file=sys.stderr)
        raise SystemExit(USAGE_STATUS) from None
    made.run()
