"""Selection quality."""

from __future__ import annotations

from kvplugin.dashboards.panel import Panel, Query, Row, Unit


def _tokens(kinds: str, metric: str = "kvplugin_policy_tokens_total") -> str:
    selector = f'{{kind=~"{kinds}", arm=~"$arm", instance=~"$instance"}}'
    return f"sum by (arm) (rate({metric}{selector}[$__rate_interval]))"


def _share(part: str, whole: str, metric: str = "kvplugin_policy_tokens_total", legend: str = "{{arm}}") -> Query:
    return Query(f"{_tokens(part, metric)} / {_tokens(whole, metric)}", legend)


def _signal(signal: str) -> Query:
    """Mean of a signal over the rows that were looked at while they decoded."""
    selector = f'{{signal="{signal}", phase="decode", arm=~"$arm", instance=~"$instance"}}'
    total, count = (
        f"sum by (arm) (rate(kvplugin_policy_signal_ratio_{part}{selector}[$__rate_interval]))"
        for part in ("sum", "count")
    )
    return Query(f"{total} / {count}", "{{arm}}")


_SAMPLED = "kvplugin_policy_sampled_tokens_total"
_PREFIX = "kvplugin_policy_prefix_tokens_total"

ROW = Row(
    "Selection quality",
    (
        Panel(
            "Pre-merge sink hit rate",
            "Share of the sinks that the indexer had selected by itself, before the policy put them in. A fall says "
            "that the indexer lost its sinks, which forced sinks would otherwise hide: suspect the weights, the KV "
            "cache's dtype, or positions.",
            (_share("sink_hit", "sink_possible"),),
            Unit.SHARE,
        ),
        Panel(
            "Pre-merge local hit rate",
            "Share of the local window that the indexer had selected by itself. It moves with the text; a step without "
            "a deployment says that scores of recent tokens are wrong.",
            (_share("local_hit", "local_possible"),),
            Unit.SHARE,
        ),
        Panel(
            "Learned tokens evicted",
            "Share of the indexer's tokens that structure took the place of. High values mean much structure for the "
            "budget; under observe, what the policy would evict.",
            (_share("evicted", "kept|evicted"),),
            Unit.SHARE,
        ),
        Panel(
            "Selection injected",
            "Share of the selected tokens that are structure the indexer had not chosen. Far above its usual value, "
            "together with a low hit rate, the indexer has become worse.",
            (_share("injected", "kept|injected|backfilled"),),
            Unit.SHARE,
        ),
        Panel(
            "Overlap of consecutive steps",
            "Mean share of tokens that the indexer selects in two consecutive steps of a request, of those it selects "
            "in either. A fall without a change of traffic says that its scores have become noise.",
            (_signal("step_overlap"),),
            Unit.SHARE,
        ),
        Panel(
            "Overlap of consecutive indexers",
            "The same for an indexer and the one before it in the model, at the same step. One layer's indexer that "
            "fails alone shows here first.",
            (_signal("leader_overlap"),),
            Unit.SHARE,
        ),
        Panel(
            "Score evicted",
            "Mean share of the learned tokens' positive scores that leaves for structure. It is what the policy costs, "
            "by the indexer's own measure: near 0 with eviction lowest_score, large with any other.",
            (_signal("evicted_share"),),
            Unit.SHARE,
        ),
        Panel(
            "Slots without a valid token",
            "Mean share of the slots that could hold a token and do not. Anything above 0 says that the indexer's keys "
            "are missing, or that its kernel returns garbage.",
            (_signal("valid_deficit"),),
            Unit.SHARE,
            above=0.001,
        ),
        Panel(
            "Segments without a token",
            "Share of the coverage segments with no selected token, before and after the policy. After must be 0; "
            "before says how much of the context the indexer leaves out.",
            (
                _share("segments_empty_before", "segments", legend="{{arm}} before"),
                _share("segments_empty_after", "segments", legend="{{arm}} after"),
            ),
            Unit.SHARE,
            only_with="an arm with witness coverage",
        ),
        Panel(
            "Stable prefix not selected",
            "Share of the visible tokens of a request's stable prompt prefix that rows do not attend to. A rise after "
            "a change of prompts says that the model loses sight of its instructions.",
            (_share("unselected", "visible", _PREFIX),),
            Unit.SHARE,
            only_with="an arm with mode topology_compress_sparse, and sessions with a stable prefix",
        ),
        Panel(
            "Sampled: sink hit rate",
            "As the pre-merge sink hit rate, from the rows that placement before_topk computes both ways.",
            (_share("sink_hit", "sink_possible", _SAMPLED),),
            Unit.SHARE,
            only_with="placement before_topk",
        ),
        Panel(
            "Sampled: learned tokens evicted",
            "As learned tokens evicted, from the rows that placement before_topk computes both ways.",
            (_share("evicted", "kept|evicted", _SAMPLED),),
            Unit.SHARE,
            only_with="placement before_topk",
        ),
    ),
)
