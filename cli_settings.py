"""Flags from a TOML file: a table for each command, in it a key for each flag, without the dashes in front.

    [serve]
    port = 9000
    api-keys = "keys.jsonl"
    cors-origin = ["https://page.example"]

What the command line says goes before the environment, and that before the file.
"""

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

Names = Mapping[str, str]
"""The parameter that a flag (without dashes in front) belongs to."""


def settings(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="TOML file with flags, in a table for each command.")] = None,
) -> None:
    """Serve large language models with prefill and decode on separate workers."""
    if config is not None:
        context.default_map = read_settings(config, _commands(context))


def _commands(context: typer.Context) -> dict[str, Names]:
    """Flags by command; groups of commands have none."""
    commands = getattr(context.command, "commands", {})
    return {
        name: {option.removeprefix("--"): each.name for each in command.params for option in each.opts}
        for name, command in commands.items()
        if not hasattr(command, "commands")
    }


def read_settings(path: Path, commands: Mapping[str, Names]) -> dict[str, dict[str, object]]:
    """Values by command and parameter; raises ``typer.BadParameter`` for what no command has."""
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"cannot read {path}: {error}") from None
    return {command: _parameters(path, command, table, commands) for command, table in tables.items()}


def _parameters(path: Path, command: str, table: object, commands: Mapping[str, Names]) -> dict[str, object]:
    if command not in commands or not isinstance(table, dict):
        raise typer.BadParameter(f"[{command}] in {path} is no table of a command; there are {', '.join(commands)}")
    names = commands[command]
    if unknown := sorted(table.keys() - names.keys()):
        raise typer.BadParameter(f"{command} has no flag --{unknown[0]}, which {path} names")
    return {names[flag]: value for flag, value in table.items()}
