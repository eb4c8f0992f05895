"""Read a server's ``/metrics``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from kvplugin.metrics.definitions import ACTIVE_STATE, BUILD_INFO


class MetricsError(RuntimeError):
    """``/metrics`` cannot be read, lacks what the demo reports, or never comes to rest."""


Labels = frozenset[tuple[str, str]]


@dataclass(frozen=True)
class Scrape:
    """One reading of ``/metrics``: the value of each sample by name and labels."""

    values: dict[tuple[str, Labels], float]

    def total(self, name: str, **labels: str) -> int:
        """Sum of a counter over all series that carry these labels.

        Raises:
            MetricsError: there is no such series.
        """
        found = [self.values[name, series] for series in self._series(name) if labels.items() <= dict(series).items()]
        if not found:
            wanted = ", ".join(f'{key}="{value}"' for key, value in labels.items())
            raise MetricsError(f"/metrics has no {name}{{{wanted}}}; is kvplugin's export of metrics working?")
        return round(sum(found))

    def counters(self, prefix: str) -> dict[tuple[str, Labels], float]:
        """The counters whose names begin so."""
        return {
            (name, labels): value
            for (name, labels), value in self.values.items()
            if name.startswith(prefix) and name.endswith("_total")
        }

    def policy_state(self) -> str | None:
        """``active``, or the reason why the policy is not, from ``kvplugin_active``; ``None`` without that metric."""
        return next((dict(series)["reason"] for series in self._series(ACTIVE_STATE.name)), None)

    def versions(self) -> dict[str, str]:
        """Version by product, from the labels of ``kvplugin_build_info``; empty where it is missing."""
        labels = next(self._series(BUILD_INFO.name), frozenset())
        # The plugin's own version has no prefix; "" sorts it first.
        found = sorted((label.removesuffix("version").removesuffix("_"), version) for label, version in labels)
        return {product or "kvplugin": version for product, version in found}

    def _series(self, name: str) -> Iterator[Labels]:
        return (series for sample, series in self.values if sample == name)


def scrape(url: str) -> Scrape:
    """Read ``/metrics`` once.

    Raises:
        MetricsError: it does not answer.
    """
    try:
        response = httpx.get(f"{url}/metrics", timeout=10, trust_env=False).raise_for_status()
    except httpx.HTTPError as error:
        raise MetricsError(f"{url}/metrics cannot be read: {error}") from None
    return parse(response.text)


def parse(text: str) -> Scrape:
    """Parse the text exposition format."""
    return Scrape(
        {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
    )
