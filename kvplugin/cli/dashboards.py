"""``kvplugin dashboards``: the files for Grafana and Prometheus, and the dashboard without Grafana."""

from __future__ import annotations

import re
import time
from pathlib import Path

import typer

from kvplugin.dashboards.overview import OVERVIEW
from kvplugin.dashboards.preview import Choices, render_preview
from kvplugin.dashboards.prometheus import Prometheus, Span
from kvplugin.dashboards.rule_files import RUNBOOK
from kvplugin.errors import ArgumentError

POINTS = 120
"""Points of each line, a second apart or more."""
WINDOW = re.compile(r"[1-9]\d*[smhd]")
SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}

app = typer.Typer(no_args_is_help=True, help="Dashboards, alert rules, and a static page of the same panels.")


@app.command(epilog="Examples: kvplugin dashboards build; kvplugin dashboards build --out /etc/kvplugin --runbook URL")
def build(
    out: Path = typer.Option(Path("deploy"), help="Folder to write to; made where missing."),
    runbook: str = typer.Option(RUNBOOK, help="Where docs/runbook.md is published, for the alerts' links."),
) -> None:
    """Write Grafana's dashboard, the rule file for Prometheus, and the same rules for its Kubernetes operator."""
    from kvplugin.dashboards.files import built_files

    for place, text in built_files(runbook).items():
        path = out / place
        _write(path, text)
        typer.echo(path)


@app.command(
    epilog="Examples: kvplugin dashboards preview --prometheus http://127.0.0.1:9090 --out page.html; "
    "kvplugin dashboards preview --prometheus URL --window 6h --baseline control --out page.html"
)
def preview(
    prometheus: str = typer.Option(..., help="A Prometheus server that scrapes the vLLM server."),
    out: Path = typer.Option(..., dir_okay=False, help="The page to write."),
    window: str = typer.Option("1h", help="How far back, as Prometheus writes it."),
    rate_interval: str = typer.Option("1m", help="Window of every rate; at least four times the scrape interval."),
    instance: str | None = typer.Option(None, help="Regular expression of instances; default all."),
    arm: str | None = typer.Option(None, help="Regular expression of arms; default all."),
    baseline: str | None = typer.Option(None, help="Arm to compare with; default control, where there is one."),
) -> None:
    """Draw the dashboard's panels as one HTML file that needs no Grafana, no script and no network."""
    for name, value in (("--window", window), ("--rate-interval", rate_interval)):
        if not WINDOW.fullmatch(value):
            raise typer.BadParameter(f"{value!r}: give a number and s, m, h or d, such as 30m", param_hint=name)
    end, seconds = time.time(), int(window[:-1]) * SECONDS[window[-1]]
    span = Span(end - seconds, end, max(1.0, seconds / POINTS))
    given = {"instance": instance, "arm": arm, "baseline": baseline}
    values = {name: value for name, value in given.items() if value is not None}
    _write(out, render_preview(OVERVIEW, Prometheus(prometheus), Choices(span, rate_interval, values)))
    typer.echo(out)


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError("--out", f"{path}: {error.strerror}", "give a place that can be written") from None
