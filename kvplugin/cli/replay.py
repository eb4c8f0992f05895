"""``kvplugin replay``: does a captured decode step match prefill, and if not, where does it stop matching."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from kvplugin.errors import KvpluginError
from kvplugin.replay import CaptureReport, read_capture, replay_capture
from kvplugin.replay.render.page import render_html
from kvplugin.replay.render.table import render_table
from kvplugin.replay.selftest.run import SelftestCase, run_selftest

WITHIN, DRIFT, BAD_INPUT = 0, 1, 2


@dataclass(frozen=True)
class ReplayRequest:
    """What to replay.

    Attributes:
        capture: folder with ``manifest.json``.
        strict: the engine's values must equal the replay's bit for bit.
        split_size: tokens per split of the KV; None = one split.
    """

    capture: Path
    strict: bool = False
    split_size: int | None = None


def run_replay(request: ReplayRequest) -> CaptureReport:
    """Read a capture and replay every record.

    Raises:
        CaptureFileError: the capture cannot be used.
        MissingExtra: safetensors is not installed.
    """
    return replay_capture(read_capture(request.capture), strict=request.strict, split_size=request.split_size)


def replay(
    capture: Path | None = typer.Argument(None, help="Capture folder: manifest.json and its safetensors files."),
    as_json: bool = typer.Option(False, "--json", help="Print the report as JSON (schema: docs/replay-schema.json)."),
    html: Path | None = typer.Option(None, "--html", help="Also write the report as one HTML file."),
    strict: bool = typer.Option(False, "--strict", help="Ask for equal bits: no tolerance, no A/A floor."),
    split_size: int | None = typer.Option(None, min=1, help="Tokens per split of the KV, in whole pages."),
    selftest: bool = typer.Option(False, "--selftest", help="Run the built-in cases instead of a capture."),
) -> None:
    """Replay a captured decode step from its KV pages. Exit 0 within tolerance, 1 drift, 2 bad input.

    Examples:  kvplugin replay captures/run-7 --html drift.html  |  kvplugin replay --selftest
    """
    if selftest == (capture is not None):
        raise typer.BadParameter("give a capture folder, or --selftest", param_hint="CAPTURE")
    if selftest:
        raise typer.Exit(_selftest(as_json))
    assert capture is not None
    if html is not None and html.resolve().is_relative_to(capture.resolve()):
        raise typer.BadParameter("is inside the capture; name a file elsewhere", param_hint="--html")
    try:
        report = run_replay(ReplayRequest(capture, strict, split_size))
        page = render_html(report) if html else ""
    except KvpluginError as error:
        _stop(str(error))
    if html is not None:
        _write(html, page)
    if as_json:
        typer.echo(report.model_dump_json(indent=1))
    else:
        Console().print(render_table(report))
    raise typer.Exit(WITHIN if report.within else DRIFT)


def _write(path: Path, page: str) -> None:
    try:
        path.write_text(page, encoding="utf-8")
    except OSError as error:
        _stop(f"--html {path}: {error.strerror}; name a file in a folder that can be written")


def _stop(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(BAD_INPUT)


def _selftest(as_json: bool) -> int:
    cases = list(run_selftest())
    failed = sum(bool(case.problem) for case in cases)
    if as_json:
        typer.echo(json.dumps({"passed": not failed, "cases": [case._asdict() for case in cases]}, indent=1))
    else:
        Console().print(
            _selftest_table(cases), f"{len(cases) - failed} of {len(cases)} cases as they should be", sep="\n"
        )
    return DRIFT if failed else WITHIN


def _selftest_table(cases: list[SelftestCase]) -> RenderableType:
    table = Table("case", "result", "seen", title="kvplugin replay --selftest")
    for case in cases:
        table.add_row(
            case.name, Text("WRONG", "bold red") if case.problem else Text("ok", "green"), case.problem or case.seen
        )
    return table
