"""``kvplugin bench``: how long the parts take on this machine."""

from __future__ import annotations

import typer

from kvplugin.cli.bench_policy import LEAST_REPEATS, BenchPolicyRequest, Structure, run_bench_policy
from kvplugin.cli.bench_report import render
from kvplugin.config import Eviction
from kvplugin.errors import ArgumentError

app = typer.Typer(no_args_is_help=True, help="Measure the parts of kvplugin on this machine.")


@app.callback()
def bench() -> None:
    """Keep ``policy`` a subcommand: typer makes the only command of an app the app itself."""


@app.command("policy")
def policy(
    rows: int = typer.Option(128, min=1, help="Query tokens in the call."),
    width: int = typer.Option(2048, min=1, help="Slots per row (K)."),
    length: int = typer.Option(8192, min=1, help="Visible tokens per row (L)."),
    eviction: Eviction = typer.Option(Eviction.LOWEST_SCORE, help="Which learned tokens make room."),
    structure: Structure = typer.Option(Structure.DEFAULT, help="How much structure needs room."),
    repeats: int = typer.Option(9, min=LEAST_REPEATS, help="Timings of each contestant; the median counts."),
    as_json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Time one call of the topology policy in its reference, torch and numba forms, and a plain copy of the buffer.

    Examples:  kvplugin bench policy  |  kvplugin bench policy --structure wide --json
    """
    request = BenchPolicyRequest(rows, width, length, eviction, structure, repeats)
    try:
        report = run_bench_policy(request)
    except ArgumentError as error:
        raise typer.BadParameter(str(error), param_hint="--structure, --width") from None
    typer.echo(render(report, json=as_json))
