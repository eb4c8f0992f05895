"""The dashboard as one HTML file that needs nothing else: no Grafana, no script, no font, no network."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files

from kvplugin.dashboards.charts import COLOURS, Line, chart, shown
from kvplugin.dashboards.errors import MissingDashboardsExtra
from kvplugin.dashboards.panel import Dashboard, Kind, Panel, Variable
from kvplugin.dashboards.prometheus import Prometheus, Span

ALL = ".*"
_LABEL = re.compile(r"\{\{\s*(\w+)\s*\}\}")


class DrawnState:
    """The last values of a state panel: name, value in words, and whether it is a good one."""

    def __init__(self, panel: Panel, lines: list[Line]) -> None:
        words = dict(panel.words)
        self.panel = panel
        self.states = [
            (line.name, words.get(round(last), shown(last, panel.unit)) if words else "", _is_good(panel, last))
            for line in lines
            for last in line.series.values[-1:]
        ]

    @property
    def series(self) -> int:
        """How many series there are."""
        return len(self.states)


class DrawnLines:
    """A panel of lines: its chart, and the last value of each."""

    def __init__(self, panel: Panel, lines: list[Line], span: Span) -> None:
        limits = [limit for limit in (panel.above, panel.below) if limit is not None]
        self.panel, self.series = panel, len(lines)
        self.svg = chart(lines, span, panel.unit, limits, panel.title) if lines else ""
        self.legend = [
            (number % COLOURS, line.name, shown(line.series.values[-1], panel.unit))
            for number, line in enumerate(lines)
        ]


@dataclass(frozen=True)
class Choices:
    """What a user would choose at the top of the dashboard.

    Attributes:
        span: the stretch of time.
        rate_interval: window of every rate, as Prometheus writes it.
        values: of variables by name; regular expressions where several may be chosen. Others take their default.
    """

    span: Span
    rate_interval: str
    values: Mapping[str, str]


def render_preview(dashboard: Dashboard, prometheus: Prometheus, choices: Choices) -> str:
    """The page, as text.

    Raises:
        PrometheusError: Prometheus cannot be asked.
        MissingDashboardsExtra: jinja2 is not installed.
    """
    try:
        from jinja2 import Environment, StrictUndefined
    except ImportError:
        raise MissingDashboardsExtra("jinja2") from None
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = files("kvplugin.dashboards").joinpath("preview.html.j2").read_text(encoding="utf-8")
    values = chosen_values(dashboard, prometheus, choices)
    rows = [
        (row.title, [_drawn(panel, prometheus, values, choices.span) for panel in row.panels]) for row in dashboard.rows
    ]
    return environment.from_string(source).render(
        dashboard=dashboard,
        rows=rows,
        chosen=[(variable.label, values[f"${variable.name}"]) for variable in dashboard.variables],
        prometheus=prometheus.url,
        start=_moment(choices.span.start),
        end=_moment(choices.span.end),
        colours=COLOURS,
        state=Kind.STATE,
    )


def chosen_values(dashboard: Dashboard, prometheus: Prometheus, choices: Choices) -> dict[str, str]:
    """What stands for each ``$name`` in expressions.

    Raises:
        PrometheusError: Prometheus cannot be asked.
    """
    values = {"$__rate_interval": choices.rate_interval}
    for variable in dashboard.variables:
        given = choices.values.get(variable.name)
        # A variable's own selector names variables before it.
        values[f"${variable.name}"] = given or _default(variable, prometheus, choices.span, values)
    return values


def filled_in(expression: str, values: Mapping[str, str]) -> str:
    """An expression with the values of its variables."""
    for name, value in values.items():
        expression = expression.replace(name, value)
    return expression


def _default(variable: Variable, prometheus: Prometheus, span: Span, values: Mapping[str, str]) -> str:
    if variable.many:
        return ALL
    selector, label = variable.values
    found = prometheus.label_values(filled_in(selector, values), label, span)
    return variable.prefer if variable.prefer in found or not found else found[0]


def _drawn(panel: Panel, prometheus: Prometheus, values: Mapping[str, str], span: Span) -> DrawnState | DrawnLines:
    lines = list(_lines(panel, prometheus, values, span))
    return DrawnState(panel, lines) if panel.kind is Kind.STATE else DrawnLines(panel, lines, span)


def _lines(panel: Panel, prometheus: Prometheus, values: Mapping[str, str], span: Span) -> Iterator[Line]:
    for query in panel.queries:
        for series in prometheus.over_time(filled_in(query.expression, values), span):
            yield Line(_named(query.legend, series.labels), series)


def _named(legend: str, labels: Mapping[str, str]) -> str:
    return _LABEL.sub(lambda found: labels.get(found[1], ""), legend)


def _is_good(panel: Panel, value: float) -> bool:
    too_low = panel.below is not None and value < panel.below
    too_high = panel.above is not None and value > panel.above
    return not too_low and not too_high


def _moment(when: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(when))
