"""The quick start, played through: its server, Prometheus and Alertmanager, all of them real."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from integration.observability import fault
from integration.observability.quick_start import ROOT, QuickStart
from integration.observability.services import Receiver, free_port, running
from integration.programs import program
from integration.server import HOST, VLLM_SERVER, Server, ServerOptions
from kvplugin.dashboards.prometheus import Prometheus, Span
from kvplugin.dashboards.recordings import RECORDINGS
from kvplugin.metrics.definitions import REQUESTS
from kvplugin.metrics.export import DRAIN_INTERVAL_S

DEPLOYED = ROOT / "deploy" / "prometheus"
PUBLISHED_S = 2 * DRAIN_INTERVAL_S
"""Until the server shows what it has counted."""
SEEN_WITHIN_S = 60.0
"""Until Prometheus has it too: a scrape or an evaluation may fail or be late on a busy machine."""


@dataclass(frozen=True)
class Stack:
    """What runs, and what the page's commands printed.

    Attributes:
        server: the vLLM server.
        prometheus: scrapes it each second.
        receiver: gets the alerts.
        page: the quick start.
        folder: the run's files.
        printed: by section.
        healthy: when the page's requests had been counted, and nothing was broken yet.
    """

    server: Server
    prometheus: Prometheus
    receiver: Receiver
    page: QuickStart
    folder: Path
    printed: dict[str, str]
    healthy: float

    @property
    def fault(self) -> Path:
        """While this file exists, the server's top-k is broken."""
        return self.folder / "fault"

    def span(self, seconds: float = 5.0) -> Span:
        """The seconds before :attr:`healthy`."""
        return Span(self.healthy - seconds, self.healthy, 1.0)


@contextmanager
def playing(folder: Path) -> Iterator[Stack]:
    """Play the quick start in a folder, up to where it draws the dashboard."""
    ports = {written: free_port() for written in (8000, 9090, 9093)}
    addresses = {f"127.0.0.1:{written}": f"127.0.0.1:{used}" for written, used in ports.items()}
    page = QuickStart({**addresses, "build/quick-start": str(folder), "deploy/prometheus": str(folder / "rules")})
    programs = {name: program(name) for name in ("prometheus", "prometheus-alertmanager")}
    printed = {section: page.run(section) for section in ("Install", "A model and a rollout")}
    with Receiver() as receiver, Server(_server_options(page, folder, ports[8000])) as server:
        _write_configuration(folder / "rules", addresses, receiver.url)
        commands = [[path, *page.service(name)[1]] for name, path in programs.items()]
        urls = [f"http://{HOST}:{ports[port]}" for port in (9090, 9093)]
        with (
            running(commands[1], urls[1], folder / "alertmanager.log"),
            running(commands[0], urls[0], folder / "prometheus.log"),
        ):
            prometheus = Prometheus(urls[0])
            _scraped_anew(prometheus)  # a rate needs a value from before the first request
            for section in ("Serve", "Look"):
                printed[section] = page.run(section)
                scraped = _scraped_anew(prometheus)
                for rule in RECORDINGS:
                    _newer(prometheus, rule.name, scraped)
            yield Stack(server, prometheus, receiver, page, folder, printed, time.time())


def _scraped_anew(prometheus: Prometheus) -> float:
    """Wait for a scrape that has what the server has counted by now. Returns its time."""
    return _newer(prometheus, REQUESTS.name, time.time() + PUBLISHED_S)


def _newer(prometheus: Prometheus, name: str, than: float) -> float:
    """Wait until all series of this name have a sample from after a Unix time. Returns the time of the oldest one."""
    until = time.monotonic() + SEEN_WITHIN_S
    while time.monotonic() < until:
        for _, when in prometheus.now(f"min(timestamp({name}))"):
            if when > than:
                return when
        time.sleep(0.1)
    raise RuntimeError(f"Prometheus has no sample of {name} from the last {SEEN_WITHIN_S:g} s")


def _server_options(page: QuickStart, folder: Path, port: int) -> ServerOptions:
    exported, arguments = page.service("vllm serve")
    fault.entry_point(folder)
    environment = exported | fault.environment(folder, exported["VLLM_PLUGINS"])
    environment |= {
        "KVPLUGIN_STATE_DIR": str(folder / "state"),
        "VLLM_NO_USAGE_STATS": "1",
        "no_proxy": HOST,
    }
    # vLLM wants the model right after "serve".
    model, *options = arguments
    return ServerOptions(tuple(options), folder / "server.log", environment, port, command=(*VLLM_SERVER, model))


def _write_configuration(folder: Path, addresses: dict[str, str], receiver: str) -> None:
    """The committed files, with this run's addresses, a receiver, and no patience."""
    folder.mkdir()
    text = (DEPLOYED / "local.yml").read_text()
    for written, used in addresses.items():
        text = text.replace(written, used)
    (folder / "local.yml").write_text(text.replace("_interval: 5s", "_interval: 1s"))
    rules = yaml.safe_load((DEPLOYED / "kvplugin.rules.yml").read_text())
    for group in rules["groups"]:
        for rule in group["rules"]:
            if "for" in rule:
                rule["for"] = "0s"
    (folder / "kvplugin.rules.yml").write_text(yaml.safe_dump(rules))
    manager = yaml.safe_load((DEPLOYED / "alertmanager.yml").read_text())
    manager["route"] |= {"group_wait": "0s", "group_interval": "1s"}
    manager["receivers"][0]["webhook_configs"] = [{"url": receiver}]
    (folder / "alertmanager.yml").write_text(yaml.safe_dump(manager))
