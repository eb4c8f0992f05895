"""A/B: the arms beside each other."""

from __future__ import annotations

from kvplugin.dashboards.panel import Panel, Query, Row, Unit

_WHERE = '{arm=~"$arm", instance=~"$instance"}'
_ALL = '{instance=~"$instance"}'
_BADLY = '{reason=~"abort|error", arm=~"$arm", instance=~"$instance"}'
_BASE = '{arm="$baseline", instance=~"$instance"}'


def _rate(metric: str, selector: str = _WHERE, by: str = "arm") -> str:
    return f"sum by ({by}) (rate({metric}{selector}[$__rate_interval]))"


def _quantile(metric: str, quantile: float) -> Query:
    buckets = _rate(f"{metric}_bucket", by="arm, le")
    return Query(f"histogram_quantile({quantile}, {buckets})", f"{{{{arm}}}} p{quantile * 100:.0f}")


def _mean(metric: str, selector: str, by: str) -> str:
    return f"{_rate(f'{metric}_sum', selector, by)} / {_rate(f'{metric}_count', selector, by)}"


def _difference(metric: str, name: str) -> Query:
    """An arm's mean against the baseline's; an empty ``by ()`` leaves a series without labels."""
    arms, baseline = _mean(metric, _WHERE, "arm"), _mean(metric, _BASE, "")
    return Query(f"({arms}) / on () group_left () ({baseline}) - 1", f"{{{{arm}}}} {name}")


def _latency(title: str, metric: str, bad: str) -> Panel:
    return Panel(title, bad, (_quantile(metric, 0.5), _quantile(metric, 0.95)), Unit.SECONDS)


ROW = Row(
    "A/B",
    (
        Panel(
            "Shares wanted and given",
            "The rollout's shares, and the part of the requests that each arm got. Requests that name their arm, and "
            "sessions that keep theirs, pull the two apart; a lasting gap otherwise is a fault.",
            (
                Query(f"max by (arm) (kvplugin_rollout_share{_WHERE})", "{{arm}} wanted"),
                Query(
                    f"{_rate('kvplugin_requests_total')} / on () group_left () "
                    f"{_rate('kvplugin_requests_total', _ALL, '')}",
                    "{{arm}} given",
                ),
            ),
            Unit.SHARE,
        ),
        Panel(
            "Fallen back",
            "1 while the guard has taken an arm's policy away. kvplugin rollout show says why; the arm stays so until "
            "it is re-armed.",
            (Query(f"max by (arm) (kvplugin_guard_tripped{_WHERE})", "{{arm}}"),),
            Unit.COUNT,
            above=0.5,
        ),
        Panel(
            "Requests by what chose the arm",
            "Requests a second, by what decided their arm. Most should be sessions: without one, each request of a "
            "conversation draws anew.",
            (Query(_rate("kvplugin_requests_total", by="choice"), "{{choice}}"),),
            Unit.PER_SECOND,
        ),
        Panel(
            "Requests not ended well",
            "Share of the ended requests that the client left, or that failed. An arm that clients leave more often is "
            "slower, or worse.",
            (
                Query(
                    f"{_rate('kvplugin_request_finished_total', _BADLY)} / {_rate('kvplugin_request_finished_total')}",
                    "{{arm}}",
                ),
            ),
            Unit.SHARE,
            above=0.05,
        ),
        _latency(
            "Time to first token",
            "kvplugin_request_ttft_seconds",
            "Median and 95th percentile by arm. An arm above the others has longer prompts, or misses the prefix "
            "cache, as it must right after its policy changed.",
        ),
        _latency(
            "Between tokens",
            "kvplugin_request_inter_token_seconds",
            "Median and 95th percentile by arm. All arms share the engine's steps, so a lasting difference means that "
            "their requests differ (longer, busier hours), not their policies.",
        ),
        _latency(
            "End to end",
            "kvplugin_request_e2e_seconds",
            "Median and 95th percentile by arm. An arm that takes longer at equal time between tokens writes more: see "
            "generated tokens per request.",
        ),
        Panel(
            "Mean latency against the baseline",
            "Each arm's mean divided by the baseline's, minus 1: 0.1 is 10 % slower. `kvplugin rollout compare` gives "
            "intervals; this line alone proves nothing.",
            (
                _difference("kvplugin_request_ttft_seconds", "first token"),
                _difference("kvplugin_request_inter_token_seconds", "between tokens"),
                _difference("kvplugin_request_e2e_seconds", "end to end"),
            ),
            Unit.SHARE,
            above=0.25,
        ),
        Panel(
            "Tokens",
            "Prompt and generated tokens a second by arm. Far from the arm's share: its requests are of another kind, "
            "and no comparison of means holds.",
            (
                Query(_rate("kvplugin_request_prompt_tokens_total"), "{{arm}} prompt"),
                Query(_rate("kvplugin_request_generation_tokens_total"), "{{arm}} generated"),
            ),
            Unit.PER_SECOND,
        ),
        Panel(
            "Generated tokens per request",
            "Mean length of an answer by arm. An arm that writes much longer or shorter answers has changed what the "
            "model says: look at the texts.",
            (
                Query(
                    f"{_rate('kvplugin_request_generation_tokens_total')} / {_rate('kvplugin_request_finished_total')}",
                    "{{arm}}",
                ),
            ),
            Unit.COUNT,
        ),
        Panel(
            "Sessions' stable prompts",
            "Requests of sessions a second, by how the stable part of their prompt stands to the last one. Many "
            "invalidated: a template or a tool list changes within sessions, and the prefix cache is lost each time.",
            (
                Query(
                    f"sum by (result) (rate(kvplugin_fingerprints_total{_ALL}[$__rate_interval]))",
                    "{{result}}",
                ),
            ),
            Unit.PER_SECOND,
        ),
    ),
)
