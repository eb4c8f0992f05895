"""The figures of the signals study as tables for a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.table import Table

from integration.quality.signal_power import Power
from integration.quality.signal_values import BUDGET, LENGTH

SHOWN = 3
"""Signals of a damage in a model's table; the file has all."""
NEVER = 10**6
"""Ranks behind every window."""

Study = Mapping[str, Mapping[str, Power]]
"""By damage and signal: what one model showed."""


def table(name: str, found: Study, runs: int) -> Table:
    """The signals that show each damage best on one model."""
    shown = _table(
        f"Online signals, {name}: {LENGTH} tokens, K = {BUDGET}; no alarm in {runs} healthy runs",
        ("damage", "signal", "healthy", "damaged", "ROC area", "values needed", "windows caught"),
    )
    for damage, signals in found.items():
        best = sorted(signals.items(), key=lambda item: _rank([item[1]]))
        for place, (signal, each) in enumerate(best[:SHOWN]):
            shown.add_row(
                damage if place == 0 else "",
                signal,
                f"{each.healthy:.3f}",
                f"{each.damaged:.3f}",
                f"{each.area:.3f}",
                _window(each),
                f"{each.caught.value:.2f} [{each.caught.low:.2f}, {each.caught.high:.2f}]",
            )
        shown.add_section()
    return shown


def over_models(studies: Mapping[str, Study]) -> Table:
    """The signal that shows each damage best on all models; a signal is as good as on the model where it is worst."""
    shown = _table(
        f"Over {len(studies)} models: {', '.join(studies)}",
        ("damage", "signal", "healthy", "damaged", "ROC area", "values needed", "windows caught"),
    )
    first, *others = studies.values()
    for damage, signals in first.items():
        common = [name for name in signals if all(name in study[damage] for study in others)]
        best = min(common, key=lambda name: _rank([study[damage][name] for study in studies.values()]))
        powers = [study[damage][best] for study in studies.values()]
        shown.add_row(
            damage,
            best,
            *(
                " / ".join(f"{value:.3f}" for value in column)
                for column in zip(*(each[:3] for each in powers), strict=True)
            ),
            " / ".join(map(_window, powers)),
            " / ".join(f"{each.caught.value:.2f}" for each in powers),
        )
    return shown


def _rank(powers: Sequence[Power]) -> tuple[int, float, float]:
    """Sorts the better signal first: fewest values, most windows caught, the larger area, each at its worst."""
    return (
        max(each.window or NEVER for each in powers),
        -min(each.caught.value for each in powers),
        -min(each.area for each in powers),
    )


def _window(power: Power) -> str:
    return str(power.window) if power.window else "-"


def _table(title: str, headings: Sequence[str]) -> Table:
    shown = Table(title=title, title_justify="left")
    for heading in headings:
        shown.add_column(heading)
    return shown
