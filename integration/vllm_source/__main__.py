"""``python -m integration.vllm_source``: fetch the Python of vLLM's CUDA wheels."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from integration.vllm_source import DEFAULT_VERSION, SourceError, default_folder, fetch_source

EXAMPLES = """
Examples:

  python -m integration.vllm_source

  python -m integration.vllm_source 0.30.0 '0.33.*' --dest /tmp/vllm
"""

app = typer.Typer(add_completion=False)


@app.command(epilog=EXAMPLES)
def main(
    versions: Annotated[
        list[str] | None, typer.Argument(metavar="[VERSION]...", help=f"Versions to fetch; default {DEFAULT_VERSION}.")
    ] = None,
    dest: Annotated[
        Path | None, typer.Option(file_okay=False, help="Folder to keep them in; default .cache/vllm-source.")
    ] = None,
) -> None:
    """Fetch the Python files of vLLM's CUDA wheel, check them, and print where they are."""
    for version in versions or [DEFAULT_VERSION]:
        try:
            source = fetch_source(version, dest or default_folder())
        except SourceError as error:
            typer.echo(f"error: {error}", err=True)
            sys.exit(1)
        typer.echo(f"{source.version} {source.root} ({source.route})")


if __name__ == "__main__":
    app()
