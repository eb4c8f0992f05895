"""What a server's ``/metrics`` says about the policy, and when it has said everything."""

from __future__ import annotations

import time
from dataclasses import dataclass

from integration.demo.scrape import MetricsError, Scrape, scrape
from kvplugin.metrics.definitions import ACTIVE, ACTIVE_STATE, POLICY_ROWS, POLICY_TOKENS

_SETTLED_S = 1.5
"""Workers publish their counters every quarter of a second, and a loaded machine is late."""
_GIVE_UP_S = 20.0
_ACTIVE_WITHIN_S = 5.0
_POLL_S = 0.25


@dataclass(frozen=True)
class PolicyCounts:
    """What happened between two scrapes. Rows and tokens are counted once per index group."""

    requests: int
    prompt_tokens: int
    generated_tokens: int
    rows_seen: int
    rows_rewritten: int
    learned_kept: int
    learned_evicted: int
    structural_injected: int
    sink_hits: int
    sinks_possible: int

    @property
    def sink_hit_rate(self) -> float | None:
        """Share of the sinks that the indexer had selected by itself; ``None`` without any."""
        return self.sink_hits / self.sinks_possible if self.sinks_possible else None


def read_counts(reading: Scrape) -> PolicyCounts:
    """The totals of one scrape.

    Raises:
        MetricsError: a series is missing.
    """
    return PolicyCounts(
        requests=reading.total("vllm:request_success_total"),
        prompt_tokens=reading.total("vllm:prompt_tokens_total"),
        generated_tokens=reading.total("vllm:generation_tokens_total"),
        rows_seen=reading.total(POLICY_ROWS.name, outcome="seen"),
        rows_rewritten=reading.total(POLICY_ROWS.name, outcome="rewritten"),
        learned_kept=reading.total(POLICY_TOKENS.name, kind="kept"),
        learned_evicted=reading.total(POLICY_TOKENS.name, kind="evicted"),
        structural_injected=reading.total(POLICY_TOKENS.name, kind="injected"),
        sink_hits=reading.total(POLICY_TOKENS.name, kind="sink_hit"),
        sinks_possible=reading.total(POLICY_TOKENS.name, kind="sink_possible"),
    )


def difference(before: PolicyCounts, after: PolicyCounts) -> PolicyCounts:
    """What was counted from ``before`` to ``after``."""
    return PolicyCounts(**{name: value - vars(before)[name] for name, value in vars(after).items()})


def require_active(url: str) -> None:
    """Wait until the server says that the policy is active.

    Raises:
        MetricsError: it is not, with the reason, or the server runs without the plugin.
    """
    deadline = time.monotonic() + _ACTIVE_WITHIN_S
    while (state := scrape(url).policy_state()) != ACTIVE:
        if time.monotonic() > deadline:
            if state is None:
                raise MetricsError(
                    f"/metrics has no {ACTIVE_STATE.name}: the server runs without kvplugin; "
                    "look at VLLM_PLUGINS and KVPLUGIN_DISABLE, and run 'kvplugin doctor'"
                )
            raise MetricsError(f"the policy is inactive: {state}; run 'kvplugin doctor'")
        time.sleep(_POLL_S)


def settled_scrape(url: str) -> Scrape:
    """Read ``/metrics`` until its counts stand still.

    Raises:
        MetricsError: they never do, or series are missing.
    """
    deadline = time.monotonic() + _GIVE_UP_S
    latest, since = scrape(url), time.monotonic()
    while time.monotonic() - since < _SETTLED_S:
        if time.monotonic() > deadline:
            raise MetricsError(f"the counters at {url}/metrics still move {_GIVE_UP_S:.0f} s after the last answer")
        time.sleep(_POLL_S)
        current = scrape(url)
        if read_counts(current) != read_counts(latest):
            since = time.monotonic()
        latest = current
    return latest
