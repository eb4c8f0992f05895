"""A capture's report as one HTML file that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from importlib.resources import files

from kvplugin.replay.errors import MissingExtra
from kvplugin.replay.render.plots import RANK_HUES, Point, heat_strips, merge_strip, scatter
from kvplugin.replay.render.table import record_drifts, span, verdict
from kvplugin.replay.report import CaptureReport, RecordReport, Stage

MAX_STRIPS = 96
MAX_MERGES = 8


def render_html(report: CaptureReport) -> str:
    """The page, as text.

    Raises:
        MissingExtra: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        raise MissingExtra("jinja2", "the HTML report") from None
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = files("kvplugin.replay.render").joinpath("report.html.j2").read_text(encoding="utf-8")
    return environment.from_string(source).render(
        report=report,
        stages=list(Stage),
        verdict=verdict(report),
        by_position=scatter(_points(report, by_layer=False), "position of the query token"),
        by_layer=scatter(_points(report, by_layer=True), "layer"),
        selections=heat_strips(_strips(report)[:MAX_STRIPS]),
        hidden_strips=max(len(_strips(report)) - MAX_STRIPS, 0),
        merges=_merges(report),
        ranks=max((owner + 1 for record in report.records for owner in _owners(record)), default=0),
        rank_hues=RANK_HUES,
        drifts=record_drifts,
        span=span,
    )


def _points(report: CaptureReport, by_layer: bool) -> list[Point]:
    return [
        Point(
            record.layer if by_layer else position,
            share,
            f"request {record.request}, layer {record.layer}, step {record.step}, position {position}: "
            f"{drift:.3g}, {share:.3g} of the tolerance",
        )
        for record in report.records
        for position, share, drift in zip(record.positions, record.position_share, record.position_drift, strict=False)
    ]


def _strips(report: CaptureReport) -> list[tuple[str, list[float]]]:
    return [
        (f"layer {record.layer}, position {position}", shares)
        for record in report.records
        for position, shares in zip(record.positions, record.selected_blocks, strict=False)
    ]


def _merges(report: CaptureReport) -> list[tuple[str, str]]:
    """Title and strip of each distinct merge order and ownership, the first few."""
    found: dict[tuple[tuple[int, ...], tuple[int, ...]], tuple[str, str]] = {}
    for record in report.records:
        if record.comparison is None:
            continue
        owners = _owners(record)
        for position, order in zip(record.positions, record.comparison.provenance.logical_merge_orders[0], strict=True):
            key = (tuple(order), tuple(owners))
            title = f"request {record.request}, layer {record.layer}, position {position}: {len(order)} blocks"
            found.setdefault(key, (title, merge_strip(order, owners)))
    return list(found.values())[:MAX_MERGES]


def _owners(record: RecordReport) -> list[int]:
    """Rank of each logical block; empty without context parallelism."""
    if record.comparison is None or not record.comparison.provenance.cp_block_owners:
        return []
    return record.comparison.provenance.cp_block_owners[0]
