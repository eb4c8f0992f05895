"""What is committed below deploy/ is what the code builds, and Grafana's file is what Grafana needs."""

from __future__ import annotations

import json
import subprocess
import sys
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from kvplugin.cli.main import app
from kvplugin.dashboards.files import built_files
from kvplugin.dashboards.overview import OVERVIEW

DEPLOY = Path(__file__).parent.parent.parent / "deploy"
BOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboards" / "kvplugin.json").read_text())
PANELS = [panel for panel in BOARD["panels"] if panel["type"] != "row"]


@pytest.mark.parametrize("place", built_files())
def test_committed_files_are_current(place: Path) -> None:
    assert (DEPLOY / place).read_text() == built_files()[place], "run 'make dashboards'"


def test_the_command_writes_them_all(tmp_path: Path) -> None:
    found = CliRunner().invoke(app, ["dashboards", "build", "--out", str(tmp_path), "--runbook", "https://run.book/"])
    assert found.exit_code == 0, found.output
    assert {path.relative_to(tmp_path) for path in tmp_path.rglob("*.*")} == {Path(place) for place in built_files()}
    assert "https://run.book/#kvplugininactive" in (tmp_path / "prometheus" / "kvplugin.rules.yml").read_text()


def test_without_the_extra_the_cure_is_named() -> None:
    code = (
        "import sys; sys.modules['grafana_foundation_sdk'] = None\n"
        "from kvplugin.cli.main import main; sys.argv = ['kvplugin', 'dashboards', 'build']; main()"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert found.returncode == 1
    assert found.stderr == (
        "error: kvplugin dashboards: grafana-foundation-sdk is not installed; pip install 'kvplugin[dashboards]'\n"
    )


def test_every_panel_is_there_once_and_explained() -> None:
    assert [panel["title"] for panel in PANELS] == [panel.title for panel in OVERVIEW.panels]
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)
    for panel in PANELS:
        assert len(panel["description"]) > 80, panel["title"]


def test_rows_are_those_of_the_dashboard() -> None:
    rows = [panel["title"] for panel in BOARD["panels"] if panel["type"] == "row"]
    assert rows == ["Is it on?", "Selection quality", "A/B", "Remap", "Faults"]


def test_no_datasource_is_named_by_its_uid() -> None:
    sources = [panel["datasource"]["uid"] for panel in PANELS]
    sources += [variable["datasource"]["uid"] for variable in BOARD["templating"]["list"][1:]]
    assert set(sources) == {"${datasource}"}
    assert BOARD["templating"]["list"][0]["type"] == "datasource"


def test_variables_narrow_each_other_down() -> None:
    queries = {variable["name"]: variable["query"] for variable in BOARD["templating"]["list"]}
    assert list(queries) == ["datasource", "model", "instance", "arm", "baseline"]
    assert "$model" in queries["instance"]
    assert all("$instance" in queries[name] for name in ("arm", "baseline"))
    unnarrowed = [
        f"{panel['title']}: {target['expr']}"
        for panel in PANELS
        for target in panel["targets"]
        if target["expr"].count("kvplugin_") != target["expr"].count('instance=~"$instance"')
    ]
    assert not unnarrowed


def test_panels_do_not_overlap() -> None:
    for one, other in combinations(BOARD["panels"], 2):
        a, b = one["gridPos"], other["gridPos"]
        apart = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        assert apart or a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"], (one["title"], other["title"])
        assert a["x"] + a["w"] <= 24
