"""Lines over time as inline SVG: plain text that every browser draws offline."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from kvplugin.dashboards.panel import Unit
from kvplugin.dashboards.prometheus import Series, Span

WIDTH, HEIGHT = 400, 190
LEFT, RIGHT, TOP, BOTTOM = 52, 8, 10, 22
COLOURS = 8
"""Colours that the page's style sheet has for lines."""
GRID_LINES = 4


class Line(NamedTuple):
    """One line, and what it is called."""

    name: str
    series: Series


class Scale(NamedTuple):
    """What the edges of the drawing stand for."""

    span: Span
    low: float
    high: float

    def x(self, when: float) -> float:
        """Place of a moment."""
        share = (when - self.span.start) / (self.span.end - self.span.start)
        return LEFT + (WIDTH - LEFT - RIGHT) * share

    def y(self, value: float) -> float:
        """Place of a value."""
        share = (value - self.low) / (self.high - self.low)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * share


def chart(lines: Sequence[Line], span: Span, unit: Unit, limits: Sequence[float], title: str) -> str:
    """The lines, with an axis of times and one of values; ``limits`` are dashed across."""
    scale = _scale(lines, span, limits)
    parts = [*_axes(scale, unit)]
    parts += [_rule(scale, limit, "limit") for limit in limits]
    for number, line in enumerate(lines):
        tip = f"<title>{escape(line.name)}: {shown(line.series.values[-1], unit)}</title>"
        parts += [
            f'<polyline class="line c{number % COLOURS}" points="{points}">{tip}</polyline>'
            for points in _pieces(line.series, scale)
        ]
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'


def shown(value: float, unit: Unit) -> str:
    """A value as people write it."""
    if unit is Unit.SHARE:
        return f"{value * 100:.3g} %"
    if unit is Unit.SECONDS:
        return f"{value:.3g} s" if abs(value) >= 1 or value == 0 else f"{value * 1000:.3g} ms"
    if abs(value) >= 1000:
        return f"{value / 1000:.3g} k"
    return f"{value:.3g}"


def _scale(lines: Sequence[Line], span: Span, limits: Sequence[float]) -> Scale:
    values = [value for line in lines for value in line.series.values]
    # Zero belongs to every chart, and a limit that is near; one far above would flatten the lines.
    high = max([0.0, *values, *(limit for limit in limits if values and limit <= 2 * max(values))])
    low = min([0.0, *values])
    step = _round_step((high - low) or 1.0)
    return Scale(span, math.floor(low / step) * step, math.ceil((high or step) / step) * step)


def _round_step(extent: float) -> float:
    """A step of 1, 2 or 5 times a power of ten that divides an extent into a few parts."""
    rough = extent / GRID_LINES
    power = 10.0 ** math.floor(math.log10(rough))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)


def _axes(scale: Scale, unit: Unit) -> list[str]:
    step = _round_step(scale.high - scale.low)
    parts = []
    for number in range(round((scale.high - scale.low) / step) + 1):
        value = scale.low + number * step
        parts.append(_rule(scale, value, "grid"))
        parts.append(_text(LEFT - 5, scale.y(value) + 4, shown(value, unit), "end"))
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        when = scale.span.start + share * (scale.span.end - scale.span.start)
        label = time.strftime("%H:%M:%S", time.gmtime(when))
        parts.append(_text(scale.x(when), HEIGHT - 6, label, anchor))
    return parts


def _pieces(series: Series, scale: Scale) -> list[str]:
    """The points of each stretch without a gap; a point alone is drawn as a short dash."""
    pieces: list[list[str]] = []
    last = -math.inf
    for when, value in zip(series.times, series.values, strict=True):
        if when - last > 1.5 * scale.span.step:
            pieces.append([f"{scale.x(when) - 1:.1f},{scale.y(value):.1f}"])
        pieces[-1].append(f"{scale.x(when):.1f},{scale.y(value):.1f}")
        last = when
    return [" ".join(piece) for piece in pieces]


def _rule(scale: Scale, value: float, kind: str) -> str:
    if not scale.low <= value <= scale.high:
        return ""
    y = scale.y(value)
    return f'<line class="{kind}" x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
