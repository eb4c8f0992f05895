"""The figures as tables for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.table import Table

from integration.quality.intervals import Interval
from integration.quality.results import MASS_WARNING
from integration.quality.summary import Cell, Place

WIDTH = 175
"""Columns that a table needs; narrower terminals wrap its lines."""
CAPTION = f"Shares with 95 % intervals; 'points' = accuracy minus learned, paired by sequence.\n{MASS_WARNING}"


def tables(cells: Sequence[Cell]) -> Iterator[Table]:
    """A table per place, a row per contestant."""
    for place in dict.fromkeys(cell.place for cell in cells):
        yield _table(place, [cell for cell in cells if cell.place == place])


def _table(place: Place, cells: Sequence[Cell]) -> Table:
    tasks = list(cells[0].tasks)
    seeds = ", ".join(sorted({str(cell.seeds) for cell in cells}))
    table = Table(
        title=f"{place.damage}: {place.length} tokens, K = {place.budget}, training seeds: {seeds}",
        caption=CAPTION,
        title_justify="left",
        caption_justify="left",
    )
    for name in ("selection", *tasks, "points", "KL", "IoU", "hit", "(mass)"):
        table.add_column(name, justify="left" if name == "selection" else "right", no_wrap=True)
    for cell in cells:
        table.add_row(
            cell.contestant,
            *(short(cell.tasks[task].accuracy) for task in tasks),
            points(cell.change),
            f"{cell.divergence.value:.2f}",
            f"{cell.overlap:.2f}",
            f"{cell.target_hit:.2f}",
            f"({cell.mass:.2f})",
        )
    return table


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


def plain(interval: Interval) -> str:
    """A figure in its own unit."""
    return f"{interval.value:.2f} ({interval.low:.2f} to {interval.high:.2f})"
