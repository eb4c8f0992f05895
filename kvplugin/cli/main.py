"""The ``kvplugin`` command: wires the subcommands and turns errors into an exit status."""

from __future__ import annotations

import sys

import typer

from kvplugin import __version__
from kvplugin.cli import bench, capture, doctor, replay, rollout
from kvplugin.errors import KvpluginError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Check and measure kvplugin, and replay decode steps, for models with DeepSeek sparse attention.",
)
app.command("doctor")(doctor.doctor)
app.command("capture")(capture.capture)
app.command("replay")(replay.replay)
app.add_typer(bench.app, name="bench")
app.add_typer(rollout.app, name="rollout")


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
