"""``python -m integration.parity``: fetch vLLM's source where it is missing, and compare kvplugin with it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated

import typer

from integration.parity.source_in_use import parity_environment
from integration.vllm_source import DEFAULT_VERSION, SourceError, fetch_source

EXAMPLES = """
Examples:

  python -m integration.parity

  python -m integration.parity 0.30.0 0.31.0 0.32.0 0.33.0
"""

app = typer.Typer(add_completion=False)


@app.command(epilog=EXAMPLES)
def main(
    versions: Annotated[
        list[str] | None, typer.Argument(metavar="[VERSION]...", help=f"vLLM versions; default {DEFAULT_VERSION}.")
    ] = None,
) -> None:
    """Compare kvplugin with vLLM's own kernels, bit for bit; needs no GPU."""
    for version in versions or [DEFAULT_VERSION]:
        started = time.monotonic()
        try:
            source = fetch_source(version)
        except SourceError as error:
            typer.echo(f"error: {error}", err=True)
            sys.exit(1)
        typer.echo(f"vLLM {source.version} ({source.route}, {time.monotonic() - started:.0f} s)")
        command = (sys.executable, "-m", "pytest", str(Path(__file__).parent))
        status = subprocess.run(command, env=parity_environment(source.root), check=False).returncode
        if status:
            sys.exit(status)


if __name__ == "__main__":
    app()
