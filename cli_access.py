"""`crossdock keys` and `crossdock usage`: who may come in, and what they have used.

The parts of the router that know keys are imported by the commands that need them; a worker starts faster without.
"""

import json
from dataclasses import fields
from datetime import UTC, date, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .router.access.usage import UsageError
from .router.access.usage_report import Column, UsageRow, read_usage

if TYPE_CHECKING:
    from collections.abc import Sequence

keys = typer.Typer(help="Make, list and revoke API keys.", no_args_is_help=True)

KeysFile = Annotated[Path, typer.Option("--api-keys", help="The file that `crossdock serve --api-keys` reads.")]
Name = Annotated[str, typer.Argument(help="Whose key it is: letters, digits and ._@-")]
Limit = Annotated[int | None, typer.Option(min=1)]


@keys.command()
def add(
    name: Name,
    api_keys: KeysFile,
    tenant: Annotated[
        str | None, typer.Option(help="Keys of one tenant share the prefix cache; alone if unset.")
    ] = None,
    priority: Annotated[int, typer.Option(help="Of its requests; a lower number goes first.")] = 0,
    most_urgent: Annotated[
        int | None, typer.Option(help="The lowest priority number that a request may ask for; --priority if unset.")
    ] = None,
    requests_per_minute: Limit = None,
    tokens_per_minute: Annotated[int | None, typer.Option(help="Prompt and output.", min=1)] = None,
    max_concurrent: Annotated[int | None, typer.Option(help="Requests at a time.", min=1)] = None,
) -> None:
    """Make a key and print it, once: the file holds only its salted hash."""
    from .router.access.key_file import KeyFileError, add_key
    from .router.access.keys import KeyRecord, new_key

    record = KeyRecord(
        name=name,
        id="",
        salt="",
        digest="",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        tenant=tenant,
        priority=priority,
        most_urgent=most_urgent,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        max_concurrent=max_concurrent,
    )
    key = new_key()
    try:
        add_key(api_keys, record.sealed(key))
    except (KeyFileError, OSError) as error:
        raise typer.BadParameter(str(error)) from None
    print(key)


@keys.command("list")
def list_keys(api_keys: KeysFile) -> None:
    """Show names, tenants, priorities and limits."""
    from .router.access.key_file import KeyFileError, read_keys

    try:
        records = read_keys(api_keys)
    except KeyFileError as error:
        raise typer.BadParameter(str(error)) from None
    head = ("name", "id", "tenant", "priority", "urgent", "requests/min", "tokens/min", "at a time", "created")
    rows = [
        (
            record.name,
            record.id,
            record.caller.tenant,
            record.priority,
            record.caller.most_urgent,
            record.requests_per_minute,
            record.tokens_per_minute,
            record.max_concurrent,
            record.created,
        )
        for record in records
    ]
    _print_table(head, rows)


@keys.command()
def revoke(name: Name, api_keys: KeysFile) -> None:
    """Take a key back; servers refuse it within two seconds."""
    from .router.access.key_file import KeyFileError, revoke_key

    try:
        revoke_key(api_keys, name)
    except (KeyFileError, OSError) as error:
        raise typer.BadParameter(str(error)) from None


def usage(
    usage_db: Annotated[Path, typer.Option(help="The file that `crossdock serve --usage-db` writes.")],
    by: Annotated[list[Column], typer.Option(help="What to add up by; repeatable.")] = [Column.KEY],  # noqa: B006
    since: Annotated[datetime | None, typer.Option(formats=["%Y-%m-%d"], help="First day (UTC).")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
) -> None:
    """Show what each key has used: requests, prompt tokens, those of them that were cached, output tokens."""
    try:
        rows = read_usage(usage_db, by, None if since is None else date(since.year, since.month, since.day))
    except UsageError as error:
        raise typer.BadParameter(str(error)) from None
    counts = [field.name for field in fields(UsageRow) if field.name != "group"]
    names = [*dict.fromkeys(column.value for column in by), *counts]
    values = [(*row.group, *(getattr(row, name) for name in counts)) for row in rows]
    if as_json:
        for row in values:
            print(json.dumps(dict(zip(names, row, strict=True))))
    else:
        _print_table([name.replace("_", " ") for name in names], values)


def _print_table(head: "Sequence[str]", rows: "Sequence[Sequence[str | int | None]]") -> None:
    """Numbers to the right; what is not there is a dash."""
    cells = [["-" if value is None else str(value) for value in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    is_number = [any(isinstance(row[n], int) for row in rows) for n in range(len(head))]
    for row in (head, *cells):
        aligned = zip(row, widths, is_number, strict=True)
        print("  ".join(cell.rjust(width) if right else cell.ljust(width) for cell, width, right in aligned).rstrip())
