"""Rules and alerts: Prometheus accepts them, each alert fires and stays silent, and the runbook knows each."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import yaml

from integration.programs import program
from kvplugin.dashboards.alerts import ALERTS
from kvplugin.dashboards.rule_files import prometheus_rule, rule_file

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "deploy" / "prometheus"
CASES = yaml.safe_load((FOLDER / "kvplugin.rules.test.yml").read_text())["tests"]
NAMES = sorted({alert.name for alert in ALERTS})


def promtool(*arguments: str, folder: Path = FOLDER) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [program("promtool"), *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=120
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "rules", "kvplugin.rules.yml"),
        ("test", "rules", "kvplugin.rules.test.yml"),
        ("check", "config", "prometheus.yml", "local.yml"),
    ],
    ids=lambda arguments: " ".join(arguments),
)
def test_promtool_is_content(arguments: tuple[str, ...]) -> None:
    found = promtool(*arguments)
    assert found.returncode == 0, found.stdout + found.stderr


def test_amtool_is_content() -> None:
    command = [program("amtool"), "check-config", "alertmanager.yml"]
    found = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False, timeout=60)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("name", NAMES)
def test_each_alert_has_a_firing_and_a_silent_case(name: str) -> None:
    expected = [
        bool(check["exp_samples"])
        for case in CASES
        for check in case["promql_expr_test"]
        if f'alertname="{name}"' in check["expr"]
    ]
    assert True in expected, f"{name} never fires"
    assert False in expected, f"{name} is never silent"


@pytest.mark.parametrize("name", NAMES)
def test_a_case_notices_an_alert_that_never_fires(name: str, tmp_path: Path) -> None:
    """The cases of the alert itself: a rule file without it must fail them."""
    content = yaml.safe_load(rule_file())
    for group in content["groups"]:
        group["rules"] = [rule for rule in group["rules"] if rule.get("alert") != name]
    (tmp_path / "kvplugin.rules.yml").write_text(yaml.safe_dump(content))
    cases = [case for case in CASES if name in str(case["promql_expr_test"])]
    tests = {"rule_files": ["kvplugin.rules.yml"], "evaluation_interval": "1m", "tests": cases}
    (tmp_path / "cases.yml").write_text(yaml.safe_dump(tests))
    found = promtool("test", "rules", "cases.yml", folder=tmp_path)
    assert found.returncode != 0
    assert name in found.stdout + found.stderr


def test_the_runbook_has_a_section_for_each_alert() -> None:
    sections = re.findall(r"^## (Kvplugin\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    assert sorted(sections) == NAMES


def test_links_lead_to_the_published_runbook() -> None:
    rules = yaml.safe_load(rule_file("https://example.org/runbook/"))["groups"][1]["rules"]
    links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules}
    assert links["KvpluginInactive"] == "https://example.org/runbook/#kvplugininactive"
    assert set(links) == set(NAMES)
    assert all(rule["annotations"]["summary"] and rule["labels"]["severity"] for rule in rules)


def test_the_operator_gets_the_same_rules() -> None:
    assert yaml.safe_load(prometheus_rule())["spec"] == yaml.safe_load(rule_file())
