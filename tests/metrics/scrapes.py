"""Scraping a registry as Prometheus does, and running a piece of code in a fresh process."""

from __future__ import annotations

import os
import subprocess
import sys
import urllib.request
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.parser import text_string_to_metric_families

from kvplugin.metrics.directory import DIRECTORY_VARIABLE, PROMETHEUS_VARIABLE

Scrape = dict[tuple[str, frozenset[tuple[str, str]]], float]


def scrape(registry: CollectorRegistry) -> Scrape:
    """One HTTP scrape of a registry."""
    server, thread = start_http_server(0, addr="127.0.0.1", registry=registry)
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_port}/metrics", timeout=10) as answer:
            return parse(answer.read().decode())
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def parse(exposition: str) -> Scrape:
    """kvplugin's samples of an exposition; a series that appears twice is an error."""
    found: Scrape = {}
    for family in text_string_to_metric_families(exposition):
        for sample in family.samples:
            if sample.name.startswith("kvplugin_"):
                series = (sample.name, frozenset(sample.labels.items()))
                assert series not in found, f"{series} appears twice"
                found[series] = sample.value
    return found


def value(found: Scrape, name: str, **labels: str) -> float | None:
    """Value of one series, or None where it does not exist."""
    return found.get((name, frozenset(labels.items())))


def run_python(*arguments: str, environment: Mapping[str, str] | None = None) -> str:
    """Standard output of ``python <arguments>``, started as if from a clean shell, plus ``environment``."""
    inherited = {key: text for key, text in os.environ.items() if key not in (PROMETHEUS_VARIABLE, DIRECTORY_VARIABLE)}
    done = subprocess.run(
        [sys.executable, *arguments],
        env=inherited | dict(environment or {}),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
