"""Run the demo: two servers, one after the other, and the same requests to both."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from integration.demo.client import send_all
from integration.demo.metrics_view import difference, read_counts, require_active, settled_scrape
from integration.demo.prompts import DemoRequest, demo_requests
from integration.demo.report import DemoReport, ModeRun
from integration.recipes import cpu_environment, model_arguments, plugin_arguments
from integration.server import VLLM_SERVER, Server, ServerOptions
from integration.startup_view import StartupView
from kvplugin.config import Mode


@dataclass(frozen=True)
class DemoOptions:
    """How to run the demo.

    Attributes:
        model: checkpoint directory.
        logs: directory that receives one server log per mode.
        port: port of the servers; 0 = any free one.
        command: the server program; a stand-in for tests.
    """

    model: Path
    logs: Path
    port: int = 0
    command: tuple[str, ...] = VLLM_SERVER


def run_demo(options: DemoOptions, console: Console) -> DemoReport:
    """Send the demo's requests to a merging and to an observing server.

    Raises:
        ServerError: a server could not be started, or died.
        MetricsError: the policy is not active, or ``/metrics`` does not say what it did.
    """
    requests = demo_requests()
    with _served(options, Mode.SPARSE_MERGE, console) as server:
        merge = _measure(server, Mode.SPARSE_MERGE, requests, console)
    with _served(options, Mode.OBSERVE, console) as server:
        observe = _measure(server, Mode.OBSERVE, requests, console)
        repeated = send_all(server.url, requests).answers
        versions = settled_scrape(server.url).versions()
    return DemoReport(merge, observe, repeated, versions)


@contextmanager
def _served(options: DemoOptions, mode: Mode, console: Console) -> Iterator[Server]:
    server_options = ServerOptions(
        arguments=model_arguments(options.model) + plugin_arguments(mode),
        log=options.logs / f"{mode}.log",
        environment=cpu_environment(),
        port=options.port,
        command=options.command,
    )
    with StartupView(console, mode) as view, Server(server_options, view) as server:
        yield server


def _measure(server: Server, mode: Mode, requests: Sequence[DemoRequest], console: Console) -> ModeRun:
    require_active(server.url)
    before = read_counts(settled_scrape(server.url))
    console.print(f"{mode}  sending {len(requests)} requests at once", highlight=False)
    batch = send_all(server.url, requests)
    server.check_alive()
    counts = difference(before, read_counts(settled_scrape(server.url)))
    return ModeRun(mode, batch.answers, batch.seconds, counts)
