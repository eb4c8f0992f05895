"""Plots as inline SVG: plain text that every browser draws offline."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 62, 12, 12, 40
LEAST_SHARE = 1e-3
RANK_HUES = 8
CELL, STRIP_WIDTH = 14, 640
MAX_COLUMNS = 160
"""Blocks drawn side by side; longer contexts put several blocks into one cell, which shows their mean."""


class Point(NamedTuple):
    """One dot: where, how large a share of its tolerance, and what a pointer shows."""

    x: int
    share: float
    label: str


def scatter(points: Sequence[Point], x_label: str) -> str:
    """Shares of the tolerance over ``x``, on a logarithmic axis; the line at 1 is the tolerance."""
    if not points:
        return "<p>No output of the engine was captured.</p>"
    low, high = min(point.x for point in points), max(point.x for point in points)
    top = math.ceil(math.log10(max(10.0, *(point.share for point in points))))
    bottom = math.log10(LEAST_SHARE)

    def x(value: float) -> float:
        return LEFT + (WIDTH - LEFT - RIGHT) * ((value - low) / (high - low) if high > low else 0.5)

    def y(share: float) -> float:
        place = (math.log10(max(share, LEAST_SHARE)) - bottom) / (top - bottom)
        return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * place

    parts = []
    decades = range(int(bottom), top + 1)
    for decade in decades[:: math.ceil(len(decades) / 8)]:
        name = f"≤ {LEAST_SHARE:g}" if decade == bottom else f"{10.0**decade:g}"
        parts.append(_line(LEFT, y(10.0**decade), WIDTH - RIGHT, y(10.0**decade), "grid"))
        parts.append(_text(LEFT - 6, y(10.0**decade) + 4, name, "end"))
    parts.append(_line(LEFT, y(1), WIDTH - RIGHT, y(1), "limit"))
    parts += [_text(x(tick), HEIGHT - BOTTOM + 16, str(tick), "middle") for tick in _ticks(low, high)]
    parts.append(_text((LEFT + WIDTH) / 2, HEIGHT - 6, x_label, "middle"))
    for point in points:
        kind = "over" if point.share > 1 else "within"
        parts.append(
            f'<circle class="{kind}" cx="{x(point.x):.1f}" cy="{y(point.share):.1f}" r="3.5">'
            f"<title>{escape(point.label)}</title></circle>"
        )
    return _svg(WIDTH, HEIGHT, parts, f"drift as a share of its tolerance, by {x_label}")


def heat_strips(rows: Sequence[tuple[str, Sequence[float]]]) -> str:
    """One strip per row: a cell per logical block, darker where more of the block was selected."""
    if not rows:
        return "<p>No selection was captured: attention is dense.</p>"
    most = max(len(shares) for _, shares in rows)
    group = math.ceil(most / MAX_COLUMNS)
    width = STRIP_WIDTH / math.ceil(most / group)
    parts = []
    for line, (name, shares) in enumerate(rows):
        parts.append(_text(LEFT + 92, line * (CELL + 3) + CELL - 3, name, "end"))
        for column in range(0, len(shares), group):
            part = shares[column : column + group]
            share = sum(part) / len(part)
            blocks = f"block {column}" if group == 1 else f"blocks {column}–{column + len(part) - 1}"
            parts.append(
                f'<rect class="heat" x="{LEFT + 98 + column // group * width:.1f}" y="{line * (CELL + 3)}" '
                f'width="{max(width - 0.5, 0.5):.2f}" height="{CELL}" fill-opacity="{share:.3f}">'
                f"<title>{escape(name)}, {blocks}: {share:.0%} selected</title></rect>"
            )
    parts.append(_text(LEFT + 98, len(rows) * (CELL + 3) + 12, "logical block 0", "start"))
    parts.append(_text(LEFT + 98 + STRIP_WIDTH, len(rows) * (CELL + 3) + 12, str(most - 1), "end"))
    return _svg(LEFT + 104 + STRIP_WIDTH, len(rows) * (CELL + 3) + 20, parts, "selected share of each logical block")


def merge_strip(order: Sequence[int], owners: Sequence[int]) -> str:
    """Logical blocks in the order of their merge, coloured by the context-parallel rank that holds them."""
    shown = order[: 4 * MAX_COLUMNS]
    columns = min(len(shown), MAX_COLUMNS // 4)
    width = (WIDTH - 20) / max(columns, 1)
    width = min(width, 44)
    parts = []
    for place, block in enumerate(shown):
        left, top = 10 + place % columns * width, place // columns * (CELL + 6)
        rank = f", rank {owners[block]}" if owners else ""
        hue = f"rank{owners[block] % RANK_HUES}" if owners else "rank0"
        parts.append(
            f'<rect class="{hue}" x="{left:.1f}" y="{top}" width="{width - 1:.1f}" height="{CELL + 3}">'
            f"<title>merged {place + 1}.: block {block}{rank}</title></rect>"
        )
        if width >= 17:
            parts.append(_text(left + width / 2 - 0.5, top + CELL - 1, str(block), "middle", "in-cell"))
    lines = math.ceil(len(shown) / max(columns, 1))
    return _svg(WIDTH, lines * (CELL + 6) + 2, parts, "merge order of the logical blocks")


def _ticks(low: int, high: int) -> list[int]:
    step = max(1, math.ceil((high - low) / 8))
    return list(range(low, high + 1, step))


def _svg(width: float, height: float, parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" width="{width:g}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg>"
    )


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str, kind: str = "axis") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
