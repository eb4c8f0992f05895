"""A dashboard as Grafana's JSON, through Grafana's own SDK."""

from __future__ import annotations

from typing import Any

from kvplugin.dashboards.errors import MissingDashboardsExtra
from kvplugin.dashboards.panel import Dashboard, Kind, Panel, Variable

try:
    from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, timeseries
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models import common as shared
    from grafana_foundation_sdk.models import dashboard as model
except ImportError:
    raise MissingDashboardsExtra("grafana-foundation-sdk") from None

DATASOURCE = "datasource"
"""Variable that holds the datasource: its uid differs from one Grafana to the next."""
GOOD, BAD = "green", "red"
_COLUMNS = 8
"""Of Grafana's 24: three panels side by side."""
_HEIGHTS = {Kind.LINES: 8, Kind.STATE: 4}


def grafana_json(source: Dashboard) -> str:
    """The dashboard as a file for Grafana's provisioning, or its import page."""
    board = (
        dashboard.Dashboard(source.title)
        .uid(source.uid)
        .description(source.description)
        .tags(["kvplugin", "vllm"])
        .editable()
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .refresh("30s")
        .time("now-1h", "now")
        .with_variable(dashboard.DatasourceVariable(DATASOURCE).label("Datasource").type("prometheus"))
    )
    for variable in source.variables:
        board = board.with_variable(_variable(variable))
    for row in source.rows:
        board = board.with_row(dashboard.Row(row.title))
        for panel in row.panels:
            board = board.with_panel(_panel(panel))
    return str(JSONEncoder(sort_keys=True, indent=2).encode(board.build())) + "\n"


def _datasource() -> Any:
    return model.DataSourceRef(type_val="prometheus", uid=f"${{{DATASOURCE}}}")


def _variable(source: Variable) -> Any:
    selector, label = source.values
    variable = (
        dashboard.QueryVariable(source.name)
        .label(source.label)
        .datasource(_datasource())
        .query(f"label_values({selector}, {label})")
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(source.many)
        .include_all(source.many)
    )
    if source.many:
        # No value of its own for "all": it stands for the instances of the chosen models, not for every instance.
        return variable.current(model.VariableOption(selected=True, text="All", value="$__all"))
    return variable.current(model.VariableOption(selected=True, text=source.prefer, value=source.prefer))


def _panel(source: Panel) -> Any:
    panel: Any = stat.Panel() if source.kind is Kind.STATE else timeseries.Panel()
    only = f" Empty without {source.only_with}." if source.only_with else ""
    panel = (
        panel.title(source.title)
        .description(source.description + only)
        .datasource(_datasource())
        .unit(source.unit)
        .span(_COLUMNS)
        .height(_HEIGHTS[source.kind])
        .thresholds(_thresholds(source))
    )
    for number, query in enumerate(source.queries):
        target = (
            prometheus.Dataquery().expr(query.expression).legend_format(query.legend).ref_id(chr(ord("A") + number))
        )
        panel = panel.with_target(target.instant() if source.kind is Kind.STATE else target.range())
    return _state(panel, source) if source.kind is Kind.STATE else _lines(panel, source)


def _state(panel: Any, source: Panel) -> Any:
    words = model.ValueMap(
        options={str(value): model.ValueMappingResult(text=word, index=value) for value, word in source.words}
    )
    # Without words the series' names say everything.
    text = shared.BigValueTextMode.VALUE_AND_NAME if source.words else shared.BigValueTextMode.NAME
    panel = panel.text_mode(text).color_mode(shared.BigValueColorMode.BACKGROUND)
    panel = panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    return panel.mappings([words]) if source.words else panel


def _lines(panel: Any, source: Panel) -> Any:
    panel = panel.min(0) if source.above == 0 else panel
    if source.above is not None or source.below is not None:
        style = common.GraphThresholdsStyleConfig().mode(shared.GraphThresholdsStyleMode.DASHED)
        panel = panel.thresholds_style(style)
    legend = common.VizLegendOptions().show_legend(True).display_mode(shared.LegendDisplayMode.LIST)
    return panel.legend(legend.placement(shared.LegendPlacement.BOTTOM)).fill_opacity(8)


def _thresholds(source: Panel) -> Any:
    steps = [model.Threshold(value=None, color=BAD if source.below is not None else GOOD)]
    if source.below is not None:
        steps.append(model.Threshold(value=source.below, color=GOOD))
    if source.above is not None:
        # Grafana colours from a step on, so a bound of zero needs a step just past it.
        steps.append(model.Threshold(value=source.above or 1e-9, color=BAD))
    return dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps)
