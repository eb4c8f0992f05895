"""What docs/quality.md says follows from the figures, each sentence judged by the cells it speaks of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from integration.quality.damage import CLEAN
from integration.quality.intervals import Interval
from integration.quality.summary import Cell

MARGIN = 0.01
"""A change of accuracy that is called none: one point."""


class Expected(StrEnum):
    """What a claim says of the change against the indexer's own selection, under the same damage."""

    FREE = "costs at most a point"
    NOTHING = "changes by at most a point"
    GAIN = "gains"
    LOSS = "loses"


class Verdict(StrEnum):
    """In order: the first that any cell gives is the claim's."""

    REFUTED = "refuted"
    UNDECIDED = "undecided"
    HOLDS = "holds"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Claim:
    """One sentence of the guide, and the cells that it speaks of, at every length and budget that was run."""

    text: str
    expected: Expected
    contestants: tuple[str, ...]
    damages: tuple[str, ...] = (CLEAN,)

    def speaks_of(self, cell: Cell) -> bool:
        return cell.contestant in self.contestants and cell.place.damage in self.damages


@dataclass(frozen=True)
class Judgement:
    """A claim, its verdict, how many cells it rests on, and the one that speaks most against it."""

    claim: Claim
    verdict: Verdict
    cells: int = 0
    against: Cell | None = None


_FREE_RULES = ("default", "sinks", "local", "sink 1 + local 4", "witnesses", "coverage", "half structural")
CLAIMS = (
    Claim("A policy that evicts the lowest scores is free on a clean indexer", Expected.FREE, _FREE_RULES),
    Claim("Evicting the oldest tokens costs answers", Expected.LOSS, ("default, oldest",)),
    Claim("Evicting by an arbitrary slot order costs answers", Expected.LOSS, ("default, slot order",)),
    Claim(
        "Structure alone, random and newest tokens and the ranks behind K answer little",
        Expected.LOSS,
        ("structure only", "null: random", "null: recent", "null: learned tail"),
    ),
    Claim("Late keys: the window wins answers back", Expected.GAIN, ("default", "local"), ("newest 3 lost",)),
    Claim("Lost sinks: the default wins answers back", Expected.GAIN, ("default",), ("first block lost",)),
    Claim("Lost sinks: a window alone brings nothing back", Expected.NOTHING, ("local",), ("first block lost",)),
    Claim("Lost blocks: the default wins answers back", Expected.GAIN, ("default",), ("30 % of blocks lost",)),
    Claim("Rows of NaN: the default wins answers back", Expected.GAIN, ("default",), ("10 % NaN rows",)),
)


def judge(cells: Sequence[Cell], claims: Iterable[Claim] = CLAIMS) -> list[Judgement]:
    """Each claim over all the cells it speaks of; where one of them is against it, it does not hold."""
    return [_judge(claim, [cell for cell in cells if claim.speaks_of(cell)]) for claim in claims]


def _judge(claim: Claim, cells: Sequence[Cell]) -> Judgement:
    if not cells:
        return Judgement(claim, Verdict.NOT_MEASURED)
    order = list(Verdict)
    against = min(cells, key=lambda cell: (order.index(_verdict(claim, cell.change)), _support(claim, cell.change)))
    return Judgement(claim, _verdict(claim, against.change), len(cells), against)


def _verdict(claim: Claim, change: Interval) -> Verdict:
    holds, refuted = {
        Expected.FREE: (change.low >= -MARGIN, change.high < -MARGIN),
        Expected.NOTHING: (
            change.low >= -MARGIN and change.high <= MARGIN,
            change.high < -MARGIN or change.low > MARGIN,
        ),
        Expected.GAIN: (change.low > 0, change.high <= 0),
        Expected.LOSS: (change.high < 0, change.low >= 0),
    }[claim.expected]
    return Verdict.HOLDS if holds else Verdict.REFUTED if refuted else Verdict.UNDECIDED


def _support(claim: Claim, change: Interval) -> float:
    """Higher = further on the claim's side."""
    if claim.expected is Expected.NOTHING:
        return -abs(change.value)
    return -change.value if claim.expected is Expected.LOSS else change.value
