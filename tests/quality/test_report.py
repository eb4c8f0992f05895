"""The suite from plan to page, on an untrained model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from integration.quality.claims import Judgement, judge
from integration.quality.measure import Case, Measured
from integration.quality.page import page
from integration.quality.plans import quick_plan, whole_plan
from integration.quality.results import as_json, read_found, write_found
from integration.quality.suite import Block, run
from integration.quality.summary import Cell, summarise
from integration.tiny_dsa.training.model import TinyModel

BLOCK = Block(128, 32, ("clean", "10 % NaN rows"), ("learned", "default"), tasks=("needle", "copy"))


@pytest.fixture(scope="module")
def found() -> dict[Case, Measured]:
    return run((BLOCK,), "untrained", TinyModel().eval(), lambda: None)


def _judged(found: dict[Case, Measured]) -> tuple[list[Cell], list[Judgement]]:
    cells = summarise(found)
    return cells, judge(cells)


def test_every_case_is_measured(found: dict[Case, Measured]) -> None:
    assert len(found) == BLOCK.size * sum(len(batch.tokens) for batch in BLOCK.questions().values())
    assert all(0 <= each.right <= each.answers for each in found.values())


def test_results_survive_the_disk(found: dict[Case, Measured], tmp_path: Path) -> None:
    write_found(found, tmp_path / "one.jsonl")
    assert read_found([tmp_path / "one.jsonl"]) == found


def test_learned_does_not_differ_from_itself(found: dict[Case, Measured]) -> None:
    for cell in summarise(found):
        if cell.contestant == "learned":
            assert tuple(cell.change) == (0, 0, 0)
            assert cell.place.damage != "clean" or cell.overlap == 1


def test_changes_are_paired_by_sequence() -> None:
    def case(contestant: str, sequence: int) -> Case:
        return Case("one", "copy", 128, 32, "clean", contestant, sequence)

    def measured(right: int) -> Measured:
        return Measured(right, 4, 0.0, 0.0, 1.0, 1.0, 1.0)

    # Sequences differ a lot, their pairs by exactly one answer in four.
    rights = {0: 1, 1: 2, 2: 3}
    found = {case("learned", each): measured(right) for each, right in rights.items()}
    found |= {case("default", each): measured(right + 1) for each, right in rights.items()}
    _, default = summarise(found)
    assert default.by_seed == pytest.approx((0.25,))
    assert tuple(default.change) == pytest.approx((0.25, 0.25, 0.25))
    assert default.tasks["copy"].accuracy.value == 0.75


def test_json_gives_every_difference_an_interval(found: dict[Case, Measured]) -> None:
    report = json.loads(as_json(*_judged(found)))
    assert "misleads" in report["mass_warning"]
    assert {each["verdict"] for each in report["claims"]} >= {"not measured"}
    for cell in report["cells"]:
        for figure in (cell["change"], cell["log_prob_gain"], *(task["change"] for task in cell["tasks"].values())):
            value, low, high = figure
            assert low <= value <= high


def test_page_stands_offline(found: dict[Case, Measured]) -> None:
    html = page(*_judged(found))
    assert not re.findall(r'(?:src|href)="http', html)
    assert html.count("<svg") == 4
    assert "Attention mass misleads" in html


def test_plans_name_what_exists() -> None:
    for block in (*whole_plan(), *quick_plan()):
        assert "learned" in block.contestants, "nothing to compare with"
        assert block.size
