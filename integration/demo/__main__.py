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
from integration.recipes import require_vllm, tiny_model
from integration.server import ServerError
from integration.tiny_dsa import ModelKind

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
        Path | None, typer.Option(help="Keep the servers' logs in this directory.", show_default="deleted")
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the servers; 0 = any free one.")] = 0,
) -> None:
    """Serve a tiny DSA model with real vLLM, policy on and policy observing, and show what the policy did.

    Exits with 0 only if both servers answered every request and the policy rewrote rows.
    """
    console, errors = Console(), Console(stderr=True)
    try:
        with ExitStack() as resources:
            require_vllm()
            logs = keep_logs or Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="kvplugin-demo-")))
            _make_directory(logs)
            report = run_demo(DemoOptions(tiny_model(ModelKind.GLM52), logs, port), errors)
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


def _make_directory(logs: Path) -> None:
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise typer.BadParameter(f"{logs}: {error.strerror}; give a directory", param_hint="'--keep-logs'") from None


if __name__ == "__main__":
    app()
