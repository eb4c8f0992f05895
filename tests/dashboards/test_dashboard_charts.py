"""Charts: everything stays inside the frame, whatever the values."""

from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvplugin.dashboards.charts import HEIGHT, WIDTH, Line, chart, shown
from kvplugin.dashboards.panel import Unit
from kvplugin.dashboards.prometheus import Series, Span

SPAN = Span(1000.0, 1060.0, 1.0)
VALUES = st.lists(st.floats(-1e12, 1e12, allow_subnormal=False), min_size=1, max_size=20)


@given(st.lists(VALUES, max_size=4), st.lists(st.floats(0, 1e6, allow_subnormal=False), max_size=2))
def test_everything_is_inside_the_frame(values: list[list[float]], limits: list[float]) -> None:
    lines = [
        Line("line", Series({}, tuple(1000.0 + 3 * place for place in range(len(each))), tuple(each)))
        for each in values
    ]
    svg = chart(lines, SPAN, Unit.COUNT, limits, "title")
    assert svg.count("<polyline") == sum(map(len, values))  # three seconds apart: every point is a piece of its own
    places = [point for points in re.findall(r'points="([^"]*)"', svg) for point in points.split()]
    places += [f"{x},{y}" for x, y in re.findall(r'x1="([^"]*)" y1="([^"]*)"', svg)]
    for place in places:
        x, y = map(float, place.split(","))
        assert 0 <= x <= WIDTH, svg
        assert 0 <= y <= HEIGHT, svg
    assert 2 <= svg.count('class="grid"') <= 8, svg


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.1234, Unit.SHARE, "12.3 %"),
        (0.0123, Unit.SECONDS, "12.3 ms"),
        (2.5, Unit.SECONDS, "2.5 s"),
        (0, Unit.SECONDS, "0 s"),
        (12345, Unit.PER_SECOND, "12.3 k"),
        (7, Unit.COUNT, "7"),
    ],
)
def test_values_are_written_as_people_do(value: float, unit: Unit, text: str) -> None:
    assert shown(value, unit) == text
