"""``kvplugin rollout compare``: the arms side by side, from Prometheus."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from kvplugin.dashboards.prometheus import Prometheus
from kvplugin.errors import ArgumentError
from kvplugin.requests.comparison import (
    ArmFigures,
    Distribution,
    Estimate,
    distribution,
    mean_difference,
    mean_estimate,
    rate_estimate,
    verdict,
)

LATENCIES = {
    "time to first token": "kvplugin_request_ttft_seconds",
    "between tokens": "kvplugin_request_inter_token_seconds",
    "end to end": "kvplugin_request_e2e_seconds",
}
TOKENS = {
    "prompt tokens": "kvplugin_request_prompt_tokens_total",
    "generated tokens": "kvplugin_request_generation_tokens_total",
}
RATES = {
    "sinks the indexer found": (["sink_hit"], ["sink_possible"]),
    "local window it found": (["local_hit"], ["local_possible"]),
    "learned tokens evicted": (["evicted"], ["kept", "evicted"]),
    "selection injected": (["injected"], ["kept", "injected", "backfilled"]),
}
"""Kinds of kvplugin_policy_tokens_total that make up the part, and the whole."""


def figures_of(prometheus: Prometheus, window: str, selector: str) -> dict[str, ArmFigures]:
    """What was counted of each arm in a window that ends now."""

    def by_arm(metric: str) -> dict[str, float]:
        rows = prometheus.now(f"sum by (arm) (increase({metric}{selector}[{window}]))")
        return {labels["arm"]: value for labels, value in rows if "arm" in labels}

    requests = by_arm("kvplugin_request_finished_total")
    latencies = {name: _distributions(prometheus, metric, window, selector) for name, metric in LATENCIES.items()}
    tokens = {name: by_arm(metric) for name, metric in TOKENS.items()}
    kinds: dict[tuple[str, str], float] = defaultdict(float)
    for labels, value in prometheus.now(
        f"sum by (arm, kind) (increase(kvplugin_policy_tokens_total{selector}[{window}]))"
    ):
        kinds[labels.get("arm", ""), labels.get("kind", "")] = value
    return {
        arm: ArmFigures(
            requests[arm],
            {name: found.get(arm, Distribution((math.inf,), (0.0,), 0.0)) for name, found in latencies.items()},
            {name: found.get(arm, 0.0) for name, found in tokens.items()},
            {
                name: (sum(kinds[arm, kind] for kind in part), sum(kinds[arm, kind] for kind in whole))
                for name, (part, whole) in RATES.items()
            },
        )
        for arm in sorted(requests)
    }


def _distributions(prometheus: Prometheus, metric: str, window: str, selector: str) -> dict[str, Distribution]:
    buckets: dict[str, dict[float, float]] = defaultdict(dict)
    for labels, value in prometheus.now(f"sum by (arm, le) (increase({metric}_bucket{selector}[{window}]))"):
        buckets[labels["arm"]][float(labels["le"])] = value
    totals = {
        labels["arm"]: value
        for labels, value in prometheus.now(f"sum by (arm) (increase({metric}_sum{selector}[{window}]))")
    }
    return {arm: distribution(cumulative, totals.get(arm, 0.0)) for arm, cumulative in buckets.items()}


def report(figures: Mapping[str, ArmFigures], baseline: str) -> dict[str, Any]:
    """The comparison as plain data; NaN, where nothing was counted, as null."""
    base = figures[baseline]
    arms = {
        arm: {
            "requests": round(found.requests, 1),
            "latencies": {
                name: {
                    "mean_s": _plain(mean_estimate(values, found.requests)),
                    "p50_s": _number(values.quantile(0.5)),
                    "p95_s": _number(values.quantile(0.95)),
                    "against_baseline": _plain(
                        mean_difference(values, found.requests, base.latencies[name], base.requests)
                    ),
                }
                for name, values in found.latencies.items()
            },
            "tokens": {name: round(count, 1) for name, count in found.tokens.items()},
            "rates": {name: _plain(rate_estimate(*parts, found.requests)) for name, parts in found.rates.items()},
        }
        for arm, found in figures.items()
    }
    return {"baseline": baseline, "arms": arms, "verdict": verdict(figures, baseline)}


def _plain(estimate: Estimate) -> dict[str, float | None]:
    return {name: _number(value) for name, value in asdict(estimate).items()}


def _number(value: float) -> float | None:
    return None if math.isnan(value) else value


def render(found: Mapping[str, Any], window: str) -> Table:
    """The comparison for people."""
    baseline = found["baseline"]
    table = Table(
        title=f"the last {window}; means and shares with 95 % intervals, against {baseline}",
        caption="\n".join(found["verdict"]),
        title_justify="left",
        caption_justify="left",
        title_style="",
        caption_style="bold",
    )
    table.add_column("")
    for arm in found["arms"]:
        table.add_column(arm)
    arms = found["arms"].values()
    table.add_row("requests ended", *(f"{arm['requests']:,.0f}" for arm in arms))
    for name in LATENCIES:
        table.add_row(f"{name}, ms", *(_latency(arm["latencies"][name]) for arm in arms))
        table.add_row("  p50 / p95", *(_quantiles(arm["latencies"][name]) for arm in arms))
    for name in TOKENS:
        table.add_row(name, *(f"{arm['tokens'][name]:,.0f}" for arm in arms))
    for name in RATES:
        table.add_row(name, *(_rate(arm["rates"][name]) for arm in arms))
    return table


def _latency(found: Mapping[str, Any]) -> str:
    mean, against = found["mean_s"], found["against_baseline"]
    if mean["value"] is None:
        return "-"
    if mean["low"] is None:
        return f"{mean['value'] * 1e3:.1f}"
    text = f"{mean['value'] * 1e3:.1f} ({mean['low'] * 1e3:.1f} to {mean['high'] * 1e3:.1f})"
    return text if not against["value"] else f"{text}, {against['value']:+.1%}"


def _quantiles(found: Mapping[str, Any]) -> str:
    values = (found["p50_s"], found["p95_s"])
    return " / ".join("-" if value is None else f"{value * 1e3:.1f}" for value in values)


def _rate(found: Mapping[str, Any]) -> str:
    if found["value"] is None:
        return "-"
    return f"{found['value']:.1%} ({found['low']:.1%} to {found['high']:.1%})"


def compare(
    prometheus: str = typer.Option(..., help="A Prometheus server that scrapes the vLLM server."),
    window: str = typer.Option("1h", help="How far back, as Prometheus writes it."),
    baseline: str | None = typer.Option(None, help="The arm to compare with; default the one with most requests."),
    selector: str = typer.Option("", help='More labels of the series, such as job="vllm".'),
    json_: bool = typer.Option(False, "--json", help="Print JSON."),
) -> None:
    """Latency, tokens and signals of each arm, with intervals; says when samples are too few."""
    if not re.fullmatch(r"[1-9]\d*[smhdw]", window):
        raise typer.BadParameter(f"{window!r}: give a number and s, m, h, d or w, such as 30m", param_hint="--window")
    figures = figures_of(Prometheus(prometheus), window, f"{{{selector}}}" if selector else "")
    if not figures:
        raise ArgumentError(
            "kvplugin rollout compare",
            f"no request of any arm ended in the last {window}",
            "see that Prometheus scrapes a server with a rollout, or widen --window",
        )
    chosen = baseline or max(figures, key=lambda arm: figures[arm].requests)
    if chosen not in figures:
        raise ArgumentError("--baseline", f"{chosen!r} is an unknown arm", f"use {', '.join(figures)}")
    found = report(figures, chosen)
    if json_:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(render(found, window))
