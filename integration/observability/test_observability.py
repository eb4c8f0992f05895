"""The operator's view, end to end: quick start, scrape, every expression, the page in a browser, alerts that arrive."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator

import httpx
import pytest

from integration.observability.expressions import documented
from integration.observability.quick_start import run
from integration.observability.stack import Stack, playing
from integration.programs import program
from kvplugin.dashboards.alerts import ALERTS
from kvplugin.dashboards.overview import OVERVIEW
from kvplugin.dashboards.panel import Panel, Variable
from kvplugin.dashboards.preview import Choices, chosen_values, filled_in
from kvplugin.dashboards.recordings import RECORDINGS
from kvplugin.dashboards.rule import Recording
from kvplugin.metrics.definitions import METRICS

ARRIVES_WITHIN_S = 20.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with playing(tmp_path_factory.mktemp("quick-start")) as running:
        yield running


def test_the_quick_start_shows_what_it_says(stack: Stack) -> None:
    arms = re.findall(r"^(\w+): (\w+)$", stack.printed["Serve"], re.MULTILINE)
    assert len(arms) == 12
    assert len(set(arms)) == 4, "a session changed its arm"
    assert {arm for _, arm in arms} == {"control", "candidate"}
    assert 'kvplugin_requests_total{arm="candidate",choice="session"}' in stack.printed["Serve"]
    assert "topology_compress_sparse" in stack.printed["A model and a rollout"]


def test_promtool_accepts_the_scrape(stack: Stack) -> None:
    scrape = httpx.get(f"{stack.server.url}/metrics", trust_env=False).text
    ours = "\n".join(line for line in scrape.splitlines() if "kvplugin_" in line) + "\n"
    assert {metric.family for metric in METRICS} <= set(re.findall(r"^# TYPE (kvplugin_\w+?)(?:_total)? ", ours, re.M))
    found = subprocess.run(
        [program("promtool"), "check", "metrics"], input=ours, capture_output=True, text=True, check=False, timeout=60
    )
    assert (found.returncode, found.stdout + found.stderr) == (0, "")


@pytest.mark.parametrize("panel", OVERVIEW.panels, ids=lambda panel: panel.title)
def test_every_panel_has_data(stack: Stack, panel: Panel) -> None:
    values = chosen_values(OVERVIEW, stack.prometheus, Choices(stack.span(), "1m", {}))
    assert values["$baseline"] == "control"
    for query in panel.queries:
        found = stack.prometheus.over_time(filled_in(query.expression, values), stack.span())
        wanted = panel.only_with != "placement before_topk"
        assert bool(found) == wanted, query.expression
        for label in re.findall(r"\{\{(\w+)\}\}", query.legend):
            assert all(label in series.labels for series in found), f"{query.legend}: {found}"


@pytest.mark.parametrize("variable", OVERVIEW.variables, ids=lambda variable: variable.name)
def test_every_variable_has_a_value(stack: Stack, variable: Variable) -> None:
    selector, label = variable.values
    values = {"$model": "tiny", "$instance": ".*"}
    assert stack.prometheus.label_values(filled_in(selector, values), label, stack.span())


@pytest.mark.parametrize("rule", RECORDINGS, ids=lambda rule: rule.name)
def test_every_recording_has_data(stack: Stack, rule: Recording) -> None:
    assert stack.prometheus.over_time(rule.name, stack.span())


@pytest.mark.parametrize(("place", "expression"), documented().items(), ids=list(documented()))
def test_documented_expressions_have_data(stack: Stack, place: str, expression: str) -> None:
    found = stack.prometheus.over_time(expression, stack.span())
    # A comparison shows nothing in good health.
    assert bool(found) != bool(re.search(r"[=><] *\d", expression)), f"{place}: {found}"


def test_nothing_fires_in_good_health(stack: Stack) -> None:
    assert not stack.prometheus.over_time("ALERTS", stack.span())


def test_the_page_stands_in_a_browser(stack: Stack) -> None:
    page = stack.folder / "dashboard.html"
    chromium = [program("chromium"), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1280,900"]
    picture = stack.folder / "dashboard.png"
    shown = subprocess.run(
        [*chromium, "--dump-dom", f"--screenshot={picture}", page.as_uri()],
        capture_output=True, text=True, check=True, timeout=120,
    )  # fmt: skip
    assert "Refused to" not in shown.stderr, shown.stderr
    sections = dict(re.findall(r'data-title="([^"]*)" data-series="(\d+)"', shown.stdout))
    assert list(sections) == [panel.title.replace("&", "&amp;") for panel in OVERVIEW.panels]
    empty = [title for title, series in sections.items() if series == "0"]
    assert empty == [panel.title for panel in OVERVIEW.panels if panel.only_with == "placement before_topk"]
    assert shown.stdout.count("<polyline") > 40
    assert picture.stat().st_size > 40_000, "an empty picture"


def test_a_broken_topk_pages_somebody(stack: Stack) -> None:
    stack.fault.touch()
    try:
        _chat(stack)
    finally:
        stack.fault.unlink()
    # The observing arm hands the bad indices on, and the remap refuses them.
    for name in ("KvpluginInvalidLearnedIndices", "KvpluginCoordinateFallbacks", "KvpluginRemapInvalidSlots"):
        _arrived(stack, name)


def test_a_bad_rollout_file_pages_somebody(stack: Stack) -> None:
    rollout = stack.folder / "rollout.yaml"
    good = rollout.read_text()
    rollout.write_text(good.replace("observe", "obsreve"))
    try:
        _arrived(stack, "KvpluginRolloutReloadFailure")
    finally:
        rollout.write_text(good)


def test_the_way_back_is_quick_and_pages_somebody(stack: Stack) -> None:
    """The page's last section: shares, comparison, kill switch, and everything as it was."""
    shift, switch = stack.page.commands("Shift traffic, and take it back")
    assert "candidate" in run(shift)
    disable, clear = switch.splitlines()
    assert "SWITCHED OFF" in run(disable)
    _chat(stack)  # the engine takes a change up with its next step
    _arrived(stack, "KvpluginKillSwitchPulled")
    assert "SWITCHED OFF" not in run(clear)


def _chat(stack: Stack) -> None:
    """Send the page's requests once more."""
    run(stack.page.commands("Serve")[0])


def _arrived(stack: Stack, name: str) -> None:
    """The alert has come through Alertmanager, with all that its reader needs."""
    (alert,) = {alert.name: alert for alert in ALERTS if alert.name == name}.values()
    found = stack.receiver.wait_for(name, ARRIVES_WITHIN_S)
    assert found["labels"]["severity"] == alert.severity
    assert found["labels"]["instance"] == stack.server.url.removeprefix("http://")
    assert found["annotations"]["runbook_url"] == f"docs/runbook.md#{name.lower()}"
    assert found["labels"]["instance"] in found["annotations"]["summary"]
    assert "{{" not in found["annotations"]["summary"]
