"""Every PromQL expression of the project, and where it stands."""

from __future__ import annotations

import re
from pathlib import Path

from kvplugin.dashboards.alerts import ALERTS
from kvplugin.dashboards.overview import OVERVIEW
from kvplugin.dashboards.recordings import RECORDINGS

ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def documented() -> dict[str, str]:
    """Expressions of the documents' promql blocks; a blank line ends one."""
    found = {}
    for page in PAGES:
        for block in re.findall(r"```promql\n(.*?)```", page.read_text(), re.DOTALL):
            for number, expression in enumerate(filter(None, map(str.strip, block.split("\n\n")))):
                found[f"{page.name}: {expression[:60]} ({number})"] = expression
    return found


def expressions() -> dict[str, str]:
    """All of them by place."""
    panels = {
        f"panel {panel.title}, query {number}": query.expression
        for panel in OVERVIEW.panels
        for number, query in enumerate(panel.queries)
    }
    variables = {f"variable {variable.name}": variable.values[0] for variable in OVERVIEW.variables}
    recordings = {f"recording {rule.name}": rule.expression for rule in RECORDINGS}
    alerts = {f"alert {alert.name} {dict(alert.labels)}": alert.expression for alert in ALERTS}
    return {**panels, **variables, **recordings, **alerts, **documented()}
