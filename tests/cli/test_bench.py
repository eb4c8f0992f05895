"""``kvplugin bench policy`` on small shapes: what it prints and what it refuses; nothing about how long it takes."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from kvplugin.cli.main import app

SMALL = ["bench", "policy", "--rows", "3", "--width", "64", "--length", "200", "--repeats", "7"]


def test_json_has_medians_and_ratios() -> None:
    found = CliRunner().invoke(app, [*SMALL, "--json"])
    assert found.exit_code == 0, found.output
    report = json.loads(found.stdout)
    medians = report["medians_ms"]
    assert set(medians) == {"reference", "torch", "numba", "clone"}
    assert min(medians.values()) > 0
    for name in ("reference/numba", "reference/torch", "numba/clone"):
        a, b = name.split("/")
        assert report["ratios"][name] == pytest.approx(medians[a] / medians[b])
    assert (report["rows"], report["width"], report["length"]) == (3, 64, 200)


def test_table_names_every_contestant() -> None:
    found = CliRunner().invoke(app, SMALL)
    assert found.exit_code == 0, found.output
    assert all(name in found.stdout for name in ("reference", "torch", "numba", "clone", "numba/clone"))


@pytest.mark.parametrize("eviction", ["lowest_score", "none", "oldest", "input_order"])
def test_every_eviction_rule(eviction: str) -> None:
    found = CliRunner().invoke(app, [*SMALL, "--eviction", eviction, "--json"])
    assert found.exit_code == 0, found.output
    assert json.loads(found.stdout)["eviction"] == eviction


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rows", "0"], "--rows"),
        (["--repeats", "3"], "--repeats"),
        (["--eviction", "newest"], "lowest_score"),
        (["--structure", "huge"], "wide"),
        (["--structure", "wide", "--width", "64"], "exceed the cap"),
    ],
)
def test_refuses(arguments: list[str], message: str) -> None:
    found = CliRunner().invoke(app, [*SMALL, *arguments], env={"COLUMNS": "200"})
    assert found.exit_code == 2, found.output
    assert message in found.output
