"""Plots as inline SVG, which every browser draws offline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from integration.quality.intervals import Interval

WIDTH, ROW, LABEL, RIGHT, TOP, BOTTOM = 760, 20, 190, 16, 8, 34
SCATTER_HEIGHT = 300


class Bar(NamedTuple):
    """One row of a whisker plot; ``sure`` colours it."""

    label: str
    interval: Interval
    sure: bool


class Dot(NamedTuple):
    """One dot of a scatter plot, with what a pointer shows."""

    x: float
    y: float
    label: str


def whiskers(bars: Sequence[Bar], low: float, high: float, unit: str) -> str:
    """Intervals as horizontal whiskers over one axis from ``low`` to ``high``; a line marks zero."""
    height = TOP + ROW * len(bars) + BOTTOM

    def x(value: float) -> float:
        return LABEL + (WIDTH - LABEL - RIGHT) * (min(max(value, low), high) - low) / (high - low)

    parts = [_axis(x, low, high, height, unit)]
    for row, bar in enumerate(bars):
        y = TOP + ROW * row + ROW / 2
        kind = "unsure" if not bar.sure else "gain" if bar.interval.value > 0 else "loss"
        text = f"{bar.label}: {bar.interval.value:.3g} ({bar.interval.low:.3g} to {bar.interval.high:.3g})"
        parts += [
            _text(LABEL - 8, y + 4, bar.label, "end"),
            f'<g class="{kind}"><title>{escape(text)}</title>'
            f'<line x1="{x(bar.interval.low):.1f}" y1="{y}" x2="{x(bar.interval.high):.1f}" y2="{y}"/>'
            f'<circle cx="{x(bar.interval.value):.1f}" cy="{y}" r="4"/></g>',
        ]
    return _svg(height, parts, unit)


def scatter(dots: Sequence[Dot], x_label: str, y_label: str) -> str:
    """Dots in the unit square."""

    def x(value: float) -> float:
        return 60 + (WIDTH - 76) * value

    def y(value: float) -> float:
        return TOP + (SCATTER_HEIGHT - TOP - BOTTOM) * (1 - value)

    parts = []
    for tick in (0, 0.25, 0.5, 0.75, 1):
        parts.append(f'<line class="grid" x1="{x(0)}" y1="{y(tick):.1f}" x2="{x(1)}" y2="{y(tick):.1f}"/>')
        parts.append(_text(x(0) - 6, y(tick) + 4, f"{tick:g}", "end"))
        parts.append(_text(x(tick), SCATTER_HEIGHT - BOTTOM + 15, f"{tick:g}", "middle"))
    parts.append(_text(x(0.5), SCATTER_HEIGHT - 4, x_label, "middle"))
    parts.append(_text(x(0) + 4, TOP + 10, y_label, "start"))
    parts += [
        f'<circle class="dot" cx="{x(dot.x):.1f}" cy="{y(dot.y):.1f}" r="4"><title>{escape(dot.label)}</title></circle>'
        for dot in dots
    ]
    return _svg(SCATTER_HEIGHT, parts, f"{y_label} over {x_label}")


def _axis(x: Callable[[float], float], low: float, high: float, height: int, unit: str) -> str:
    parts = []
    for step in range(5):
        value = low + (high - low) * step / 4
        parts.append(f'<line class="grid" x1="{x(value):.1f}" y1="{TOP}" x2="{x(value):.1f}" y2="{height - BOTTOM}"/>')
        parts.append(_text(x(value), height - BOTTOM + 14, f"{value:g}", "middle"))
    parts.append(f'<line class="zero" x1="{x(0):.1f}" y1="{TOP}" x2="{x(0):.1f}" y2="{height - BOTTOM}"/>')
    parts.append(_text(x((low + high) / 2), height - 4, unit, "middle"))
    return "".join(parts)


def _svg(height: float, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
