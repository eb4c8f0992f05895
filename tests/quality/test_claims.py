"""Verdicts on the guide's claims, from cells made by hand."""

from __future__ import annotations

import pytest

from integration.quality.claims import CLAIMS, Claim, Expected, Verdict, judge
from integration.quality.damage import damages
from integration.quality.intervals import Interval
from integration.quality.plans import quick_plan
from integration.quality.policies import contestants
from integration.quality.summary import Cell, Place


def _cell(low: float, high: float, *, contestant: str = "default", damage: str = "clean", length: int = 256) -> Cell:
    change, none = Interval((low + high) / 2, low, high), Interval(0.0, 0.0, 0.0)
    place = Place(length, 32, damage)
    return Cell(place, contestant, 1, {}, change, (change.value,), none, none, none, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    ("expected", "holds", "undecided", "refuted"),
    [
        (Expected.FREE, (-0.009, 0.5), (-0.02, 0.5), (-0.5, -0.011)),
        (Expected.NOTHING, (-0.009, 0.009), (-0.009, 0.02), (0.011, 0.5)),
        (Expected.GAIN, (0.001, 0.5), (-0.001, 0.5), (-0.5, 0.0)),
        (Expected.LOSS, (-0.5, -0.001), (-0.5, 0.001), (0.0, 0.0)),
    ],
)
def test_verdict_of_one_cell(
    expected: Expected, holds: tuple[float, float], undecided: tuple[float, float], refuted: tuple[float, float]
) -> None:
    claim = Claim("", expected, ("default",))
    found = [judge([_cell(*change)], [claim])[0].verdict for change in (holds, undecided, refuted)]
    assert found == [Verdict.HOLDS, Verdict.UNDECIDED, Verdict.REFUTED]


def test_one_cell_against_it_is_enough() -> None:
    claim = Claim("", Expected.GAIN, ("default", "local"))
    cells = [_cell(0.2, 0.4), _cell(-0.2, -0.1, contestant="local", length=512), _cell(-0.1, 0.1)]
    others = [_cell(-1, -0.9, contestant="sinks"), _cell(-1, -0.9, damage="keys 1 bit")]
    (found,) = judge([*cells, *others], [claim])
    assert (found.verdict, found.cells) == (Verdict.REFUTED, 3)
    assert found.against is cells[1]


def test_the_weakest_of_those_that_hold_is_shown() -> None:
    weak = _cell(-0.2, -0.1, length=512)
    (found,) = judge([_cell(-0.9, -0.8), weak], [Claim("", Expected.LOSS, ("default",))])
    assert found.verdict is Verdict.HOLDS
    assert found.against is weak


def test_nothing_measured_is_no_verdict() -> None:
    (found,) = judge([], CLAIMS[:1])
    assert found.verdict is Verdict.NOT_MEASURED
    assert found.against is None


def test_claims_name_what_the_quick_plan_runs() -> None:
    assert {name for claim in CLAIMS for name in claim.contestants} <= {each.name for each in contestants(32)}
    assert {name for claim in CLAIMS for name in claim.damages} <= {each.name for each in damages()}
    run = {(name, damage) for block in quick_plan() for name in block.contestants for damage in block.damages}
    for claim in CLAIMS:
        assert {(name, damage) for name in claim.contestants for damage in claim.damages} <= run, claim.text
