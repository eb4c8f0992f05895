"""The files made of dashboards and rules, by their place below ``deploy/``."""

from __future__ import annotations

from pathlib import PurePosixPath

from kvplugin.dashboards.grafana import grafana_json
from kvplugin.dashboards.overview import OVERVIEW
from kvplugin.dashboards.rule_files import RUNBOOK, prometheus_rule, rule_file


def built_files(runbook: str = RUNBOOK) -> dict[PurePosixPath, str]:
    """Path and text of each file.

    Args:
        runbook: address of the runbook, for the alerts' links.

    Raises:
        MissingDashboardsExtra: grafana-foundation-sdk is not installed.
    """
    return {
        PurePosixPath("grafana/dashboards/kvplugin.json"): grafana_json(OVERVIEW),
        PurePosixPath("prometheus/kvplugin.rules.yml"): rule_file(runbook),
        PurePosixPath("prometheus/prometheusrule.yaml"): prometheus_rule(runbook),
    }
