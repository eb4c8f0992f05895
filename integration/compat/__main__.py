"""``python -m integration.compat``: kvplugin's GPU parts in each version of vLLM, as far as that goes without a GPU."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from integration.compat.checks import Run, run_checks
from integration.compat.page import PAGE, page
from integration.parity.source_in_use import parity_environment
from integration.vllm_source import SourceError, fetch_source

VERSIONS = ("0.30.0", "0.31.0", "0.32.0", "0.33.0")

EXAMPLES = """
Examples:

  python -m integration.compat 0.32.0

  python -m integration.compat --page
"""

app = typer.Typer(add_completion=False)


@app.command(epilog=EXAMPLES)
def main(
    versions: Annotated[
        list[str] | None,
        typer.Argument(metavar="[VERSION]...", help=f"vLLM versions; default {' '.join(VERSIONS)}."),
    ] = None,
    write: Annotated[bool, typer.Option("--page", help="Write docs/compatibility.md from what came out.")] = False,
) -> None:
    """Fetch vLLM's Python where it is missing, and run contract tests and parity against it; needs no GPU."""
    runs: list[Run] = []
    for version in versions or VERSIONS:
        try:
            source = fetch_source(version)
        except SourceError as error:
            typer.echo(f"error: {error}", err=True)
            sys.exit(1)
        typer.echo(f"vLLM {source.version} ({source.route})")
        runs.append(run_checks(source.version, parity_environment(source.root)))
    if write:
        PAGE.write_text(page(runs))
    sys.exit(max(run.status for run in runs))


if __name__ == "__main__":
    app()
