"""PromQL of dashboards, rules and documents: Prometheus can read it, and it names only what a scrape has."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import yaml
from promql_vocabulary import problems

from integration.observability.expressions import documented, expressions
from integration.programs import program
from kvplugin.dashboards.preview import filled_in

VALUES = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*", "$arm": ".*", "$baseline": "control"}


@pytest.mark.parametrize(("place", "expression"), expressions().items(), ids=list(expressions()))
def test_expressions_name_what_a_scrape_has(place: str, expression: str) -> None:
    assert not problems(expression), f"{place}: {expression}"


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("rate(kvplugin_policy_row_total[5m])", "no metric is called kvplugin_policy_row_total"),
        ('kvplugin_policy_rows_total{outcom="seen"}', "kvplugin_policy_rows_total has no label outcom"),
        ('kvplugin_policy_rows_total{outcome=~"seen|sean"}', "kvplugin_policy_rows_total never has outcome='sean'"),
        ("sum by (arms) (kvplugin_policy_rows_total)", "no metric has the label arms"),
        ("kvplugin_request_ttft_seconds", "no metric is called kvplugin_request_ttft_seconds"),
        (
            "instance:kvplugin_bypased:ratio_rate5m",
            "no rule records instance:kvplugin_bypased:ratio_rate5m",
        ),
    ],
)
def test_the_check_sees_a_wrong_name(expression: str, problem: str) -> None:
    assert problems(expression) == [problem]


def test_prometheus_reads_every_expression(tmp_path: Path) -> None:
    rules = [
        {"record": f"expression:{number}", "expr": filled_in(expression, VALUES)}
        for number, expression in enumerate(expressions().values())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "all", "rules": rules}]}))
    found = subprocess.run(
        [program("promtool"), "check", "rules", str(file)], capture_output=True, text=True, check=False, timeout=60
    )
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{len(rules)} rules found" in found.stdout


def test_no_variable_is_left_over() -> None:
    left = {place: text for place, text in expressions().items() if "$" in filled_in(text, VALUES)}
    assert not left


def test_documents_have_expressions() -> None:
    assert len(documented()) >= 8
