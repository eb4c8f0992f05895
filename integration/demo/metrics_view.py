"""What a server's ``/metrics`` says about the policy, and when it has said everything."""

from __future__ import annotations

import time
from dataclasses import dataclass

from integration.demo.scrape import MetricsError, Scrape, scrape
from kvplugin.metrics.definitions import ACTIVE, ACTIVE_STATE, POLICY_ROWS, POLICY_TOKENS, REQUESTS

_SETTLED_S = 1.5
"""Workers publish their counters every quarter of a second, and a loaded machine is late."""
_GIVE_UP_S = 20.0
_ACTIVE_WITHIN_S = 5.0
_POLL_S = 0.25


@dataclass(frozen=True)
class PolicyCounts:
    """What happened to an arm. Rows and tokens are counted once per index group."""

    requests: int
    rows_seen: int
    rows_rewritten: int
    learned_kept: int
    learned_evicted: int
    structural_injected: int
    sink_hits: int
    sinks_possible: int
    local_hits: int
    locals_possible: int

    @property
    def sink_hit_rate(self) -> float | None:
        """Share of the sinks that the indexer had selected by itself; ``None`` without any."""
        return _share(self.sink_hits, self.sinks_possible)

    @property
    def local_hit_rate(self) -> float | None:
        """The same of the local window."""
        return _share(self.local_hits, self.locals_possible)


def read_counts(reading: Scrape, arm: str) -> PolicyCounts:
    """An arm's totals in one scrape.

    Raises:
        MetricsError: a series is missing.
    """

    def rows(outcome: str) -> int:
        return reading.total(POLICY_ROWS.name, arm=arm, outcome=outcome)

    def tokens(kind: str) -> int:
        return reading.total(POLICY_TOKENS.name, arm=arm, kind=kind)

    return PolicyCounts(
        requests=reading.total(REQUESTS.name, arm=arm),
        rows_seen=rows("seen"),
        rows_rewritten=rows("rewritten"),
        learned_kept=tokens("kept"),
        learned_evicted=tokens("evicted"),
        structural_injected=tokens("injected"),
        sink_hits=tokens("sink_hit"),
        sinks_possible=tokens("sink_possible"),
        local_hits=tokens("local_hit"),
        locals_possible=tokens("local_possible"),
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
    """Read ``/metrics`` until the plugin's counters stand still.

    Raises:
        MetricsError: they never do, or there are none.
    """
    deadline = time.monotonic() + _GIVE_UP_S
    latest, since = scrape(url), time.monotonic()
    while time.monotonic() - since < _SETTLED_S:
        if time.monotonic() > deadline:
            raise MetricsError(f"the counters at {url}/metrics still move {_GIVE_UP_S:.0f} s after the last answer")
        time.sleep(_POLL_S)
        current = scrape(url)
        if current.counters("kvplugin_") != latest.counters("kvplugin_"):
            since = time.monotonic()
        latest = current
    latest.total(POLICY_ROWS.name)
    return latest


def _share(part: int, whole: int) -> float | None:
    return part / whole if whole else None
