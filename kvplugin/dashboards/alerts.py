"""Alerts; what to do about each is in ``docs/runbook.md``."""

from __future__ import annotations

from collections.abc import Iterator

from kvplugin.dashboards.recordings import BYPASSED, FALLBACK_ROWS, LATENCIES, REMAP_FALLBACKS, SINK_HITS
from kvplugin.dashboards.rule import Alert, Severity

_HERE = "{{ $labels.instance }}"
_ARM_HERE = "arm {{ $labels.arm }} of {{ $labels.instance }}"
_SHARE = "{{ $value | humanizePercentage }}"
_LATENCY_NAMES = {"ttft": "to the first token", "inter_token": "between tokens"}
LEAST_REQUESTS = 100
"""Ended requests in 15 minutes, of either arm, below which means say nothing."""


def _latency_alert(latency: str) -> Alert:
    requests = "sum by (job, instance, arm) (increase(kvplugin_request_finished_total[15m]))"
    known = f"{LATENCIES[latency]} and on (job, instance, arm) {requests} > {LEAST_REQUESTS}"
    largest = "topk by (job, instance) (1, kvplugin_rollout_share)"
    return Alert(
        "KvpluginArmLatencyRegression",
        f"({known}) / on (job, instance) group_left () "
        f"max by (job, instance) ({known} and on (job, instance, arm) {largest}) > 1.25",
        "15m",
        Severity.WARNING,
        f"The mean time {_LATENCY_NAMES[latency]} of {_ARM_HERE} is {{{{ $value | humanize }}}} times that of the arm "
        "with the largest share.",
        {"latency": latency},
    )


def _alerts() -> Iterator[Alert]:
    yield Alert(
        "KvpluginInactive",
        'kvplugin_active{reason!~"active|not_configured|policy_disabled"} == 0',
        "5m",
        Severity.CRITICAL,
        f"{_HERE} does not report the policy it is configured for as active: {{{{ $labels.reason }}}}.",
    )
    yield Alert(
        "KvpluginMetricsGone",
        "(max by (job, instance) (present_over_time(kvplugin_build_info[1h])) unless on (job, instance) "
        "kvplugin_build_info) and on (job, instance) up == 1",
        "10m",
        Severity.WARNING,
        f"{_HERE} had kvplugin's metrics within the last hour and answers without them now.",
    )
    yield Alert(
        "KvpluginEmptyRows",
        'sum by (job, instance, arm) (rate(kvplugin_policy_rows_total{outcome="empty"}[5m])) > 0',
        "1m",
        Severity.CRITICAL,
        f"Rows of {_ARM_HERE} attend to nothing: {{{{ $value | humanize }}}} a second.",
    )
    yield Alert(
        "KvpluginInvalidLearnedIndices",
        'sum by (job, instance, arm) (rate(kvplugin_policy_tokens_total{kind="invalid"}[5m])) > 0',
        "5m",
        Severity.WARNING,
        f"The indexer returns indices outside the rows of {_ARM_HERE}: {{{{ $value | humanize }}}} a second.",
    )
    yield Alert(
        "KvpluginCoordinateFallbacks",
        f"{FALLBACK_ROWS} > 0.01",
        "5m",
        Severity.CRITICAL,
        f"{_SHARE} of the rows of {_ARM_HERE} get no structure, because their learned indices are invalid.",
    )
    yield Alert(
        "KvpluginSinkHitRateCollapse",
        f"{SINK_HITS} < 0.5 * avg_over_time({SINK_HITS}[6h] offset 1h)",
        "15m",
        Severity.WARNING,
        f"The indexer finds {_SHARE} of the sinks of {_ARM_HERE}, less than half of what it found earlier.",
    )
    yield Alert(
        "KvpluginBypassShare",
        f"{BYPASSED} > 0.05",
        "10m",
        Severity.WARNING,
        f"The policy leaves {_SHARE} of the rows of {_HERE} alone.",
    )
    yield Alert(
        "KvpluginRolloutReloadFailure",
        "sum by (job, instance, process) (increase(kvplugin_rollout_reload_failures_total[15m])) > 0",
        "0s",
        Severity.WARNING,
        f"{_HERE} refused a rollout file or override; the last good one stays in force.",
    )
    yield Alert(
        "KvpluginKillSwitchPulled",
        "kvplugin_rollout_enabled == 0",
        "1h",
        Severity.WARNING,
        f"The kill switch of {_HERE} has been pulled for an hour; no arm's policy is in force.",
    )
    yield Alert(
        "KvpluginGuardFallback",
        "kvplugin_guard_tripped == 1",
        "0s",
        Severity.CRITICAL,
        f"The guard took the policy of {_ARM_HERE} away; kvplugin rollout show says why.",
    )
    yield Alert(
        "KvpluginGuardFailed",
        "sum by (job, instance, arm) (increase(kvplugin_guard_failures_total[15m])) > 0",
        "0s",
        Severity.CRITICAL,
        f"The guard cannot take the policy of {_ARM_HERE} away, because the override cannot be written.",
    )
    yield Alert(
        "KvpluginRemapInvalidSlots",
        "sum by (job, instance, reason) (rate(kvplugin_remap_invalid_total[5m])) > 0",
        "5m",
        Severity.CRITICAL,
        f"Selected tokens of {_HERE} have no row in the KV pool ({{{{ $labels.reason }}}}).",
    )
    yield Alert(
        "KvpluginRemapFallbacks",
        f"{REMAP_FALLBACKS} > 0.05",
        "15m",
        Severity.WARNING,
        f"{_SHARE} of the layers of {_HERE} cannot use their index group's conversion.",
    )
    yield from map(_latency_alert, LATENCIES)


ALERTS = tuple(_alerts())
