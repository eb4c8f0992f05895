"""What is asked of a Prometheus server: values over time, and the values of a label."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.error import HTTPError, URLError
from urllib.parse import urlencode
from urllib.request import ProxyHandler, build_opener

from kvplugin.dashboards.errors import PrometheusError

PATIENCE_S = 30.0


class Span(NamedTuple):
    """A stretch of time: Unix seconds, and seconds between two points."""

    start: float
    end: float
    step: float


@dataclass(frozen=True)
class Series:
    """One series: its labels, and the points that are numbers."""

    labels: Mapping[str, str]
    times: tuple[float, ...]
    values: tuple[float, ...]


class Prometheus:
    """A Prometheus server.

    Args:
        url: its address; proxies are left aside.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._opener = build_opener(ProxyHandler({}))

    def over_time(self, expression: str, span: Span) -> list[Series]:
        """The series that an expression gives over a stretch of time; those without a number are left out.

        Raises:
            PrometheusError: nothing answers there, or the expression is refused.
        """
        asked = {"query": expression, "start": span.start, "end": span.end, "step": span.step}
        found = []
        for series in self._get("query_range", asked)["result"]:
            points = [(float(time), float(value)) for time, value in series["values"]]
            points = [(time, value) for time, value in points if math.isfinite(value)]
            if points:
                times, values = zip(*points, strict=True)
                found.append(Series(series["metric"], times, values))
        return found

    def now(self, expression: str) -> list[tuple[dict[str, str], float]]:
        """Labels and value of each series that an expression gives now.

        Raises:
            PrometheusError: nothing answers there, or the expression is refused.
        """
        return [
            (series["metric"], float(series["value"][1]))
            for series in self._get("query", {"query": expression})["result"]
        ]

    def label_values(self, selector: str, label: str, span: Span) -> list[str]:
        """The values of a label among the series that a selector finds, sorted.

        Raises:
            PrometheusError: nothing answers there, or the selector is refused.
        """
        asked = {"match[]": selector, "start": span.start, "end": span.end}
        return sorted(self._get(f"label/{label}/values", asked))

    def _get(self, what: str, asked: Mapping[str, object]) -> Any:
        cure = "give --prometheus the address of a Prometheus server"
        try:
            with self._opener.open(f"{self.url}/api/v1/{what}?{urlencode(asked)}", timeout=PATIENCE_S) as answer:
                return json.load(answer)["data"]
        except HTTPError as error:
            raise PrometheusError(self.url, _refusal(error), cure) from None
        except (URLError, OSError) as error:
            raise PrometheusError(self.url, str(getattr(error, "reason", error)), cure) from None
        except (ValueError, KeyError, TypeError):
            raise PrometheusError(self.url, "answers, and not as Prometheus does", cure) from None


def _refusal(error: HTTPError) -> str:
    """Prometheus's own words, where the answer is Prometheus's."""
    try:
        return str(json.load(error)["error"])
    except (ValueError, KeyError, TypeError):
        return f"HTTP {error.code}"
