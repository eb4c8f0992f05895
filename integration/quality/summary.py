"""Figures with intervals: accuracies over seeds, and differences to the learned selection, paired by sequence."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from integration.quality.intervals import Interval, mean_interval, wilson
from integration.quality.measure import Case, Measured, mean_of
from integration.quality.policies import LEARNED


class Place(NamedTuple):
    """Where contestants meet: the same questions, budget and damage."""

    length: int
    budget: int
    damage: str


@dataclass(frozen=True)
class TaskFigures:
    """One task of a cell.

    Attributes:
        accuracy: share of right answers, Wilson's interval.
        change: accuracy minus the learned selection's, paired by sequence.
        answers: how many.
    """

    accuracy: Interval
    change: Interval
    answers: int


@dataclass(frozen=True)
class Cell:
    """One contestant at one place, over all seeds.

    Attributes:
        place, contestant: which.
        seeds: how many trainings.
        tasks: by task.
        change: accuracy minus the learned selection's, all tasks, each sequence counted alike.
        by_seed: the same for each training, in the order in which they were run.
        log_prob_change: log-probability of the right answer minus the dense model's, by sequence.
        log_prob_gain: the same minus the learned selection's, paired.
        divergence: KL from the dense model's distribution.
        overlap, target_hit, mass: means, as in ``Measured``.
    """

    place: Place
    contestant: str
    seeds: int
    tasks: Mapping[str, TaskFigures]
    change: Interval
    by_seed: tuple[float, ...]
    log_prob_change: Interval
    log_prob_gain: Interval
    divergence: Interval
    overlap: float
    target_hit: float
    mass: float


def summarise(found: Mapping[Case, Measured]) -> list[Cell]:
    """A cell per place and contestant, in the order in which they were run."""
    grouped: dict[tuple[Place, str], dict[Case, Measured]] = defaultdict(dict)
    for case, measured in found.items():
        grouped[Place(case.length, case.budget, case.damage), case.contestant][case] = measured
    return [_cell(place, contestant, own, found) for (place, contestant), own in grouped.items()]


def _cell(place: Place, contestant: str, own: Mapping[Case, Measured], found: Mapping[Case, Measured]) -> Cell:
    values = list(own.values())
    pairs = {case: (mine, found[case._replace(contestant=LEARNED)]) for case, mine in own.items()}
    tasks = {
        task: _figures({case: pair for case, pair in pairs.items() if case.task == task})
        for task in dict.fromkeys(case.task for case in own)
    }
    models = list(dict.fromkeys(case.model for case in own))
    by_seed = (_share_change(pair for case, pair in pairs.items() if case.model == model).value for model in models)
    return Cell(
        place,
        contestant,
        len(models),
        tasks,
        _share_change(pairs.values()),
        tuple(by_seed),
        mean_interval([each.log_prob_change for each in values]),
        mean_interval([mine.log_prob_change - other.log_prob_change for mine, other in pairs.values()]),
        mean_interval([each.divergence for each in values]),
        *(mean_of(values, name) for name in ("overlap", "target_hit", "mass")),
    )


def _figures(pairs: Mapping[Case, tuple[Measured, Measured]]) -> TaskFigures:
    mine: Sequence[Measured] = [pair[0] for pair in pairs.values()]
    answers = sum(each.answers for each in mine)
    return TaskFigures(wilson(sum(each.right for each in mine), answers), _share_change(pairs.values()), answers)


def _share_change(pairs: Iterable[tuple[Measured, Measured]]) -> Interval:
    return mean_interval([mine.right / mine.answers - other.right / other.answers for mine, other in pairs])
