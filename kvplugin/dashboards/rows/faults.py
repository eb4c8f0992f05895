"""Faults: all of these are 0 in good health."""

from __future__ import annotations

from kvplugin.dashboards.panel import Panel, Query, Row, Unit

_ARM = 'arm=~"$arm", instance=~"$instance"'

ROW = Row(
    "Faults",
    (
        Panel(
            "Rows in trouble",
            "Rows a second without a valid learned token (rescued), with indices outside the row (fallback), or left "
            "without any token (empty). Empty rows give garbage; the others lose structure or the learned tokens.",
            (
                Query(
                    "sum by (outcome) (rate(kvplugin_policy_rows_total"
                    f'{{outcome=~"rescued|fallback|empty", {_ARM}}}[$__rate_interval]))',
                    "{{outcome}}",
                ),
            ),
            Unit.PER_SECOND,
            above=0,
        ),
        Panel(
            "Invalid learned indices",
            "Slots a second in which the indexer returned neither -1 nor a token of the row, as top-k kernels do on "
            "NaN scores. They are never attended to; their cause is upstream.",
            (
                Query(
                    f'sum by (arm) (rate(kvplugin_policy_tokens_total{{kind="invalid", {_ARM}}}[$__rate_interval]))',
                    "{{arm}}",
                ),
            ),
            Unit.PER_SECOND,
            above=0,
        ),
        Panel(
            "Bypassed rows",
            "Rows a second that the policy left alone, by reason. phase is configured; limits may be too low for the "
            "traffic; no_scores and unknown_arm are faults.",
            (
                Query(
                    'sum by (reason) (rate(kvplugin_policy_bypass_total{instance=~"$instance"}[$__rate_interval]))',
                    "{{reason}}",
                ),
            ),
            Unit.PER_SECOND,
        ),
        Panel(
            "Rollout reload failures",
            "Times that the rollout file or the override turned bad, over the last hour. The last good one stays in "
            "force, so a change you believe in force is not.",
            (
                Query(
                    'sum by (process) (increase(kvplugin_rollout_reload_failures_total{instance=~"$instance"}[1h]))',
                    "{{process}}",
                ),
            ),
            Unit.COUNT,
            above=0,
        ),
        Panel(
            "Refused requests",
            "Requests a second that were answered 400 for one of the plugin's keys. A client was deployed with a wrong "
            "arm or key, or an arm was removed that clients still name.",
            (
                Query(
                    'sum by (key) (rate(kvplugin_request_errors_total{instance=~"$instance"}[$__rate_interval]))',
                    "{{key}}",
                ),
            ),
            Unit.PER_SECOND,
        ),
        Panel(
            "What invalidated stable prompts",
            "Fields that differed when a session's stable prompt was not the last one's. model, dtype, block_size and "
            "cache_layout change only with a deployment.",
            (
                Query(
                    "sum by (field) (rate("
                    'kvplugin_fingerprint_invalidations_total{instance=~"$instance"}[$__rate_interval]))',
                    "{{field}}",
                ),
            ),
            Unit.PER_SECOND,
        ),
    ),
)
