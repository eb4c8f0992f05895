"""One model's part of a study: tasks x lengths x budgets x damages x contestants, in rectangles."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from integration.quality.damage import Damage, damages
from integration.quality.measure import Case, Measured, measure, reference
from integration.quality.policies import Contestant, contestants
from integration.tiny_dsa.training.evaluation import chunks, questions
from integration.tiny_dsa.training.model import TinyModel
from integration.tiny_dsa.training.tasks import TaskBatch

Found = dict[Case, Measured]
_Named = TypeVar("_Named", Damage, Contestant)


class Block(NamedTuple):
    """A rectangle of the study: every contestant under every damage, at one length and budget.

    ``scale`` multiplies the sequences of each task; no ``tasks`` means all.
    """

    length: int
    budget: int
    damages: tuple[str, ...]
    contestants: tuple[str, ...]
    scale: int = 1
    tasks: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Contestants under damages: the unit of progress."""
        return len(self.damages) * len(self.contestants)

    def questions(self) -> dict[str, TaskBatch]:
        """Batch by task."""
        every = questions(self.length, self.scale)
        return {task: every[task] for task in self.tasks or every}


def run(blocks: Sequence[Block], name: str, model: TinyModel, advance: Callable[[], None]) -> Found:
    """All blocks on the model of that name; ``advance`` is called once per unit of progress."""
    found: Found = {}
    for block in blocks:
        found.update(_run_block(block, name, model, advance))
    return found


def _run_block(
    block: Block, name: str, model: TinyModel, advance: Callable[[], None]
) -> Iterator[tuple[Case, Measured]]:
    chosen = _named(contestants(block.budget), block.contestants)
    references = [
        (task, [reference(model, part) for part in chunks(batch)]) for task, batch in block.questions().items()
    ]
    for damage in _named(damages(), block.damages):
        damaged = damage.weights(model)
        for contestant in chosen:
            for task, parts in references:
                sequences = (
                    each for part in parts for each in measure(damaged, part, contestant, damage, block.budget)
                )
                for sequence, each in enumerate(sequences):
                    case = Case(name, task, block.length, block.budget, damage.name, contestant.name, sequence)
                    yield case, each
            advance()


def _named(available: Sequence[_Named], names: Sequence[str]) -> list[_Named]:
    by_name = {each.name: each for each in available}
    return [by_name[name] for name in names]
