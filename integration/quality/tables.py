"""The figures as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from integration.quality.claims import Judgement, Verdict
from integration.quality.intervals import Interval
from integration.quality.results import MASS_WARNING
from integration.quality.summary import Cell, Place

WIDTH = 195
"""Columns that a table needs; narrower terminals wrap its lines."""
CAPTION = f"Shares with 95 % intervals; 'points' = accuracy minus learned, paired by sequence.\n{MASS_WARNING}"


def tables(cells: Sequence[Cell]) -> Iterator[Table]:
    """A table per place, a row per contestant."""
    for place in dict.fromkeys(cell.place for cell in cells):
        yield _table(place, [cell for cell in cells if cell.place == place])


def _table(place: Place, cells: Sequence[Cell]) -> Table:
    tasks = list(cells[0].tasks)
    trainings = ", ".join(sorted({str(cell.seeds) for cell in cells}))
    table = Table(
        title=f"{place.damage}: {place.length} tokens, K = {place.budget}, training seeds: {trainings}",
        caption=CAPTION,
        title_justify="left",
        caption_justify="left",
    )
    for name in ("selection", *tasks, "points", "by seed", "KL", "IoU", "hit", "(mass)"):
        table.add_column(name, justify="left" if name == "selection" else "right", no_wrap=True)
    for cell in cells:
        table.add_row(
            cell.contestant,
            *(short(cell.tasks[task].accuracy) for task in tasks),
            points(cell.change),
            seeds(cell),
            f"{cell.divergence.value:.2f}",
            f"{cell.overlap:.2f}",
            f"{cell.target_hit:.2f}",
            f"({cell.mass:.2f})",
        )
    return table


def claims_table(judgements: Sequence[Judgement]) -> Table:
    """What the guide says, and whether it holds here."""
    table = Table(title="What docs/quality.md says of these figures", title_justify="left")
    for name in ("claim", "verdict", "cells", "the cell most against it", "points"):
        table.add_column(name)
    colours = {Verdict.HOLDS: "green", Verdict.REFUTED: "red"}
    for each in judgements:
        cell = each.against
        table.add_row(
            f"{each.claim.text} ({each.claim.expected})",
            f"[{colours.get(each.verdict, 'default')}]{each.verdict}[/]",
            str(each.cells),
            where(cell) if cell else "",
            points(cell.change) if cell else "",
        )
    return table


def where(cell: Cell) -> str:
    """A cell by its names."""
    return f"{cell.contestant}, {cell.place.damage}, {cell.place.length} tokens, K = {cell.place.budget}"


def short(interval: Interval) -> str:
    """A share and its interval in few characters: ``.94 .92-.96``."""
    value, low, high = (f"{each:.2f}".removeprefix("0") for each in interval)
    return f"{value} {low}-{high}"


def share(interval: Interval) -> str:
    """A share and its interval."""
    value, low, high = (f"{each:.3f}" for each in interval)
    return f"{value} ({low}-{high})"


def points(interval: Interval) -> str:
    """A difference of shares in percentage points."""
    return f"{100 * interval.value:+.1f} ({100 * interval.low:+.1f} to {100 * interval.high:+.1f})"


def seeds(cell: Cell) -> str:
    """The difference of each training on its own, in percentage points."""
    return " ".join(f"{100 * each:+.1f}" for each in cell.by_seed)


def plain(interval: Interval) -> str:
    """A figure in its own unit."""
    return f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"
