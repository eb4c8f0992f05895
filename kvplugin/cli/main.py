"""The ``kvplugin`` command: finds the subcommands and turns errors into an exit status."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from kvplugin import __version__
from kvplugin.errors import KvpluginError

SUBCOMMANDS = ("doctor", "capture", "replay", "bench", "rollout", "dashboards")
"""Modules beside this one; each holds a command of its name, or an ``app`` of several."""


class Subcommands(TyperGroup):
    """Imports a subcommand when it is asked for: whoever pulls the kill switch should not wait for torch."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names, in the order of the help."""
        return list(SUBCOMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name, or None."""
        if cmd_name not in SUBCOMMANDS:
            return None
        module = import_module(f"kvplugin.cli.{cmd_name}")
        holder = typer.Typer(callback=options)  # makes it a group, whatever it holds
        if hasattr(module, "app"):
            holder.add_typer(module.app, name=cmd_name)
        else:
            holder.command(cmd_name)(getattr(module, cmd_name))
        group: Any = get_command(holder)
        return group.commands[cmd_name]


app = typer.Typer(
    cls=Subcommands,
    no_args_is_help=True,
    add_completion=False,
    help="Check and measure kvplugin, control a rollout, and replay decode steps, for DeepSeek sparse attention.",
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True, help="Print the version."),
) -> None:
    """Options before the subcommand."""


def main() -> None:
    """Entry point: 0 = well, 1 = kvplugin says what is wrong, 2 = wrong usage."""
    try:
        app()
    except KvpluginError as error:
        typer.echo(f"error: {error}", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
