"""A capture's report on a terminal."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from kvplugin.replay.drift import Drift
from kvplugin.replay.report import CaptureReport, RecordReport, Stage, StageReport, Status

MARKS = {Status.MATCH: ("ok", "green"), Status.DRIFT: ("DRIFT", "bold red"), Status.UNAVAILABLE: ("-", "dim")}
HEADINGS = {
    Stage.INDEXER_SCORES: "indexer",
    Stage.SELECTION: "select",
    Stage.ATTENTION: "attend",
    Stage.LOG_PROBS: "logprob",
}


def render_table(report: CaptureReport) -> RenderableType:
    """Stages by record, what is beyond its tolerance, what could not be looked at, and the verdict."""
    parts: list[RenderableType] = [_stages(report)]
    parts += [_drifts(record) for record in report.records if not all(each.within for each in record_drifts(record))]
    parts += [Text(line, style="dim") for line in _unavailable(report)]
    parts.append(Text(verdict(report), style="bold green" if report.within else "bold red"))
    return Group(*parts)


def verdict(report: CaptureReport) -> str:
    """One paragraph: within tolerance, or where decode first stops matching and what is proven about it."""
    first = report.first_drift
    if first is None:
        return f"decode matches prefill: {len(report.records)} records within tolerance"
    place = f"request {first.request}, layer {first.layer}, step {first.step}, position {first.position}"
    return "\n".join([f"drift at stage {first.stage}: {place}", *(f"  {text}" for text in first.findings)])


def _stages(report: CaptureReport) -> Table:
    title = Text(f"{report.model} on {report.engine}" + (f", {report.policy}" if report.policy else ""))
    # Ten columns in 80 characters: no lines between them.
    table = Table(title=title, box=None, padding=(0, 1, 0, 0))
    for heading in ("request", "layer", "step", "at", *(HEADINGS.get(stage, str(stage)) for stage in Stage)):
        table.add_column(heading, no_wrap=heading != "request")
    for record in report.records:
        cells = [Text(*_mark(stage)) for stage in record.stages]
        table.add_row(Text(record.request), str(record.layer), str(record.step), span(record.positions), *cells)
    return table


def _place(record: RecordReport) -> str:
    return f"request {record.request}, layer {record.layer}, step {record.step}"


def _mark(stage: StageReport) -> tuple[str, str]:
    text, style = MARKS[stage.status]
    least = min(stage.iou, default=1.0)
    return (f"{text} {least:.2f}" if least < 1 else text), style


def span(positions: list[int]) -> str:
    """``7`` or ``7-9``."""
    return str(positions[0]) if len(positions) == 1 else f"{positions[0]}-{positions[-1]}"


def _drifts(record: RecordReport) -> Table:
    """The comparisons that are beyond their tolerance."""
    table = Table("beyond tolerance", "max", "mean", "p99", "over", "of", "tolerance", title=Text(_place(record)))
    for drift in record_drifts(record):
        if not drift.within:
            figures = [f"{value:.3g}" for value in (drift.max, drift.mean, drift.p99)]
            table.add_row(Text(drift.name), *figures, str(drift.over), str(drift.active), f"{drift.tolerance:.3g}")
    return table


def record_drifts(record: RecordReport) -> Iterator[Drift]:
    """Every comparison of a record, in the order of its stages."""
    for stage in record.stages:
        yield from stage.drifts


def _unavailable(report: CaptureReport) -> list[str]:
    """What could not be looked at, each reason once."""
    reasons = [f"{stage.stage}: {stage.reason}" for record in report.records for stage in record.stages if stage.reason]
    for record in report.records:
        if record.comparison:
            reasons += [f"oracle {each.name}: {each.reason}" for each in record.comparison.unavailable]
    return list(dict.fromkeys(reasons))
