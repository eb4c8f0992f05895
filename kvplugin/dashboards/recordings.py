"""Recording rules: the ratios and means that alerts compare, by instance and arm."""

from __future__ import annotations

from kvplugin.dashboards.rule import Recording

SINK_HITS = "instance_arm:kvplugin_policy_sink_hit:ratio_rate15m"
BYPASSED = "instance:kvplugin_policy_bypassed:ratio_rate5m"
FALLBACK_ROWS = "instance_arm:kvplugin_policy_fallback_rows:ratio_rate5m"
REMAP_FALLBACKS = "instance:kvplugin_remap_fallback:ratio_rate5m"
LATENCIES = {
    "ttft": "instance_arm:kvplugin_request_ttft_seconds:mean_rate15m",
    "inter_token": "instance_arm:kvplugin_request_inter_token_seconds:mean_rate15m",
}
"""Mean latencies, by the value of the alert's label ``latency``."""


def _rate(series: str, window: str, by: str) -> str:
    return f"sum by (job, instance{by}) (rate({series}[{window}]))"


def _share(part: str, whole: str, window: str, by: str) -> str:
    """Without a series where nothing happened: NaN would spoil every average over time."""
    return f"{_rate(part, window, by)} / ({_rate(whole, window, by)} > 0)"


def _tokens(kind: str) -> str:
    return f'kvplugin_policy_tokens_total{{kind="{kind}"}}'


def _rows(outcome: str) -> str:
    return f'kvplugin_policy_rows_total{{outcome="{outcome}"}}'


def _mean(histogram: str) -> str:
    return _share(f"{histogram}_sum", f"{histogram}_count", "15m", ", arm")


_LAYERS = "kvplugin_remap_conversions_total"

RECORDINGS = (
    Recording(SINK_HITS, _share(_tokens("sink_hit"), _tokens("sink_possible"), "15m", ", arm")),
    # Rows of a phase that the policy leaves out are bypassed on purpose.
    Recording(BYPASSED, _share('kvplugin_policy_bypass_total{reason!="phase"}', _rows("seen"), "5m", "")),
    Recording(FALLBACK_ROWS, _share(_rows("fallback"), _rows("seen"), "5m", ", arm")),
    Recording(REMAP_FALLBACKS, _share(f'{_LAYERS}{{path="fallback"}}', _LAYERS, "5m", "")),
    Recording(LATENCIES["ttft"], _mean("kvplugin_request_ttft_seconds")),
    Recording(LATENCIES["inter_token"], _mean("kvplugin_request_inter_token_seconds")),
)
