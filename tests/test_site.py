"""The documentation's site: strict build, and what other places link to."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvplugin.dashboards.alerts import ALERTS

ROOT = Path(__file__).parent.parent


def build(configuration: Path, out: Path) -> subprocess.CompletedProcess[str]:
    """Strict: a link or anchor that leads nowhere, or a page that no menu has, is an error."""
    return subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(configuration), "-d", str(out)],
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site")
    found = build(ROOT / "mkdocs.yml", out)
    problems = [line for line in found.stderr.splitlines() if not line.startswith("INFO")]
    assert found.returncode == 0, "\n".join(problems)
    return out


def test_every_page_is_built(site: Path) -> None:
    assert {path.stem for path in (ROOT / "docs").glob("*.md")} <= {path.stem for path in site.glob("*.html")}


def test_alerts_lead_to_their_section(site: Path) -> None:
    anchors = set(re.findall(r'<h2 id="([^"]+)"', (site / "runbook.html").read_text()))
    assert {alert.name.lower() for alert in ALERTS} <= anchors


def test_the_api_page_has_the_docstrings(site: Path) -> None:
    page = (site / "api.html").read_text()
    for name in (
        "kvplugin.topology.apply_topology_policy",
        "kvplugin.remap.remap_grouped",
        "kvplugin.errors.ConfigError",
    ):
        assert f'id="{name}"' in page, name


def test_the_site_stands_offline(site: Path) -> None:
    loaded = [
        f"{page.name}: {address}"
        for page in site.glob("*.html")
        for address in re.findall(
            r'<(?:script|img|link rel="stylesheet")[^>]+(?:src|href)="(https?:[^"]+)"', page.read_text()
        )
    ]
    assert not loaded


def test_the_build_sees_a_broken_link(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[gone](gone.md)")
    (tmp_path / "mkdocs.yml").write_text("site_name: x\n")
    found = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert found.returncode != 0
    assert "gone.md" in found.stderr
