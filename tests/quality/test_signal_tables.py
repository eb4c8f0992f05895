"""Which signal is called the best one, from powers made by hand."""

from __future__ import annotations

import io

from rich.console import Console

from integration.quality.intervals import Interval
from integration.quality.signal_power import Power
from integration.quality.signal_tables import over_models, table


def _power(window: int | None, caught: float, area: float = 0.9) -> Power:
    return Power(0.5, 0.25, area, window, Interval(caught, caught, caught), 0.4)


def _lines(shown: object) -> list[str]:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(shown)
    return [line for line in console.export_text().splitlines() if "lost" in line]


def test_fewest_values_come_first() -> None:
    signals = {"slow": _power(128, 1.0), "unseen": _power(None, 0.9), "quick": _power(8, 0.95)}
    (line,) = _lines(table("one", {"lost": signals}, 50))
    assert "quick" in line


def test_over_models_a_signal_is_as_good_as_at_its_worst() -> None:
    steady, moody = "steady", "moody"
    studies = {
        "one": {"lost": {moody: _power(8, 1.0), steady: _power(32, 1.0)}},
        "two": {"lost": {moody: _power(None, 0.2), steady: _power(64, 0.97), "only here": _power(8, 1.0)}},
    }
    (line,) = _lines(over_models(studies))
    assert steady in line
    assert "32 / 64" in line
    assert "1.00 / 0.97" in line
