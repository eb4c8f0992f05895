"""Command line: ``python -m integration.demo``."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from integration.demo.run import DemoOptions, run_demo
from integration.demo.scrape import MetricsError
from integration.recipes import require_vllm, trained_model
from integration.server import ServerError

EXAMPLES = """
Examples:

  python -m integration.demo

  python -m integration.demo --json --keep-logs logs > demo.json
"""
INTERRUPTED = 130

app = typer.Typer(add_completion=False)


@app.command(epilog=EXAMPLES)
def main(
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
    keep_logs: Annotated[
        Path | None,
        typer.Option(help="Keep the server's log and rollout file in this directory.", show_default="deleted"),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the server; 0 = any free one.")] = 0,
) -> None:
    """Serve a small trained DSA model with real vLLM, and show what each policy does to its answers.

    Exits with 0 only if every request was answered, every policy counted, merging rewrote rows, and the model alone
    answers well.
    """
    console, errors = Console(), Console(stderr=True)
    try:
        with ExitStack() as resources:
            require_vllm()
            files = keep_logs or Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="kvplugin-demo-")))
            _make_directory(files)
            report = run_demo(DemoOptions(trained_model(), files, port), errors)
    except (ServerError, MetricsError) as error:
        typer.echo(f"demo failed: {error}", err=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        typer.echo("demo interrupted; its server has been stopped", err=True)
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        typer.echo(report.to_json())
    else:
        console.print(report.table())
    problems = list(report.problems())
    for problem in problems:
        typer.echo(f"problem: {problem}", err=True)
    raise typer.Exit(1 if problems else 0)


def _make_directory(files: Path) -> None:
    try:
        files.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{files}: {error.strerror}; give a directory", param_hint="'--keep-logs'") from None


if __name__ == "__main__":
    app()
