"""Recording rules and alerts as the files that Prometheus and its Kubernetes operator read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import yaml

from kvplugin.dashboards.alerts import ALERTS
from kvplugin.dashboards.recordings import RECORDINGS
from kvplugin.dashboards.rule import Alert

RUNBOOK = "docs/runbook.md"
"""Where the runbook is, if nobody says where it is published."""


def rule_file(runbook: str = RUNBOOK) -> str:
    """A rule file for Prometheus."""
    return _yaml(_groups(runbook))


def prometheus_rule(runbook: str = RUNBOOK) -> str:
    """The same as an object for the Prometheus operator."""
    return _yaml(
        {
            "apiVersion": "monitoring.coreos.com/v1",
            "kind": "PrometheusRule",
            "metadata": {"name": "kvplugin", "labels": {"app.kubernetes.io/name": "kvplugin"}},
            "spec": _groups(runbook),
        }
    )


def _groups(runbook: str) -> dict[str, Any]:
    recordings = [{"record": rule.name, "expr": rule.expression} for rule in RECORDINGS]
    alerts = [_alert(alert, runbook) for alert in ALERTS]
    return {"groups": [{"name": "kvplugin-recordings", "rules": recordings}, {"name": "kvplugin", "rules": alerts}]}


def _alert(alert: Alert, runbook: str) -> dict[str, Any]:
    return {
        "alert": alert.name,
        "expr": alert.expression,
        "for": alert.hold,
        "labels": {"severity": str(alert.severity), **alert.labels},
        "annotations": {"summary": alert.summary, "runbook_url": f"{runbook}#{alert.name.lower()}"},
    }


def _yaml(content: Mapping[str, Any]) -> str:
    return "# Generated: kvplugin dashboards build\n" + yaml.safe_dump(content, sort_keys=False, width=110)
