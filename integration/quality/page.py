"""The figures as one HTML page that stands offline."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from integration.quality.claims import Judgement, Verdict
from integration.quality.intervals import Interval
from integration.quality.plots import Bar, Dot, scatter, whiskers
from integration.quality.policies import LEARNED, contestants
from integration.quality.results import MASS_WARNING
from integration.quality.summary import Cell, Place
from integration.quality.tables import plain, points, seeds, share, where
from kvplugin import __version__

STEP = 20
"""Axes end at a multiple of this many points."""


def page(cells: Sequence[Cell], judgements: Sequence[Judgement]) -> str:
    """The whole page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    places = list(dict.fromkeys(cell.place for cell in cells))
    return environment.get_template("page.html.j2").render(
        seeds=", ".join(sorted({str(cell.seeds) for cell in cells})),
        version=__version__,
        claims=[_claim(each) for each in judgements],
        places=[_place(place, [cell for cell in cells if cell.place == place]) for place in places],
        by_hit=scatter([_dot(cell, cell.target_hit) for cell in cells], "target hit", "accuracy"),
        by_mass=scatter([_dot(cell, cell.mass) for cell in cells], "attention mass kept", "accuracy"),
        warning=MASS_WARNING,
        notes=[(each.name, each.note) for each in contestants(places[0].budget)],
    )


def _claim(judgement: Judgement) -> dict[str, Any]:
    cell = judgement.against
    kinds = {Verdict.HOLDS: "gain", Verdict.REFUTED: "loss"}
    return {
        "text": f"{judgement.claim.text} ({judgement.claim.expected})",
        "verdict": judgement.verdict,
        "kind": kinds.get(judgement.verdict, ""),
        "cells": judgement.cells,
        "against": f"{where(cell)}: {points(cell.change)}" if cell else "",
    }


def _place(place: Place, cells: Sequence[Cell]) -> dict[str, Any]:
    compared = [cell for cell in cells if cell.contestant != LEARNED]
    (learned,) = (cell for cell in cells if cell.contestant == LEARNED)
    in_points = [Interval(*(100 * each for each in cell.change)) for cell in compared]
    # Whiskers of a few sequences may be wider than what a share can change.
    low = max(-100, STEP * (min(0.0, *(each.low for each in in_points)) // STEP))
    high = min(100, -STEP * (min(0.0, *(-each.high for each in in_points)) // STEP))
    bars = [
        Bar(cell.contestant, interval, interval.excludes_zero)
        for cell, interval in zip(compared, in_points, strict=True)
    ]
    return {
        "title": f"{place.damage}: {place.length} tokens, K = {place.budget}",
        "learned": "Learned: " + ", ".join(f"{task} {share(each.accuracy)}" for task, each in learned.tasks.items()),
        "plot": whiskers(bars, low, max(high, low + STEP), "points against learned"),
        "tasks": list(learned.tasks),
        "rows": [_row(cell) for cell in cells],
    }


def _row(cell: Cell) -> dict[str, Any]:
    notes = {each.name: each.note for each in contestants(cell.place.budget)}
    kind = "" if not cell.change.excludes_zero else "gain" if cell.change.value > 0 else "loss"
    return {
        "name": cell.contestant,
        "note": notes[cell.contestant],
        "shares": [share(each.accuracy) for each in cell.tasks.values()],
        "points": points(cell.change),
        "kind": kind,
        "by_seed": seeds(cell),
        "log_prob": plain(cell.log_prob_change),
        "divergence": plain(cell.divergence),
        "overlap": f"{cell.overlap:.2f}",
        "hit": f"{cell.target_hit:.2f}",
        "mass": f"{cell.mass:.2f}",
    }


def _dot(cell: Cell, x: float) -> Dot:
    accuracy = mean(each.accuracy.value for each in cell.tasks.values())
    return Dot(x, accuracy, f"{cell.contestant}, {cell.place.damage}, {cell.place.length}: {accuracy:.3f}")
