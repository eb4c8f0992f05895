"""One chunk of questions under many contestants and damages, each sequence measured against the dense model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from integration.quality.damage import Damage
from integration.quality.policies import Contestant
from integration.quality.selection import Selector
from integration.tiny_dsa.training.model import TinyModel, Trace, groups
from integration.tiny_dsa.training.tasks import TaskBatch

MATCHING_LEADER = max(groups())
"""The leader whose selection has to hold an answer's source."""


class Case(NamedTuple):
    """What was measured; ``model`` names a training, ``sequence`` is unique within model, task and length."""

    model: str
    task: str
    length: int
    budget: int
    damage: str
    contestant: str
    sequence: int


@dataclass(frozen=True)
class Measured:
    """One sequence. All but the first two are means over its answers' rows.

    Attributes:
        right, answers: answers that the most likely token got right, of how many.
        log_prob_change: log-probability of the right token, minus the dense model's.
        divergence: KL from the dense model's distribution to this one.
        overlap: IoU of what the row attends to with what its (damaged) indexer selected, mean over leaders; rows that
            may select everything are left out.
        target_hit: share of the answers whose source is attended to by the matching leader's layers.
        mass: dense attention mass, in the matching leader's layers, that falls on attended tokens. High for selections
            that answer nothing: see the guide.
    """

    right: int
    answers: int
    log_prob_change: float
    divergence: float
    overlap: float
    target_hit: float
    mass: float


@dataclass(frozen=True)
class Reference:
    """What the dense model makes of a chunk: log-probs and attention of the answers' rows only.

    Attributes:
        batch: the chunk.
        rows: bool ``[B, T]``, rows that predict an answer.
        targets: int64 ``[R]``, the right token of each such row.
        log_probs: ``[R, vocabulary]``.
        attention: by layer of the matching leader, ``[R, T]``.
    """

    batch: TaskBatch
    rows: Tensor
    targets: Tensor
    log_probs: Tensor
    attention: dict[int, Tensor]


@torch.no_grad()
def reference(model: TinyModel, batch: TaskBatch) -> Reference:
    """Run the chunk densely."""
    trace = Trace()
    logits = model(batch.tokens, trace=trace)
    rows = torch.zeros_like(batch.answers)
    rows[:, :-1] = batch.answers[:, 1:]
    attention = {layer: trace.attention[layer][rows] for layer in groups()[MATCHING_LEADER]}
    return Reference(batch, rows, batch.tokens[batch.answers], logits[rows].log_softmax(-1), attention)


@torch.no_grad()
def measure(
    model: TinyModel, dense: Reference, contestant: Contestant, damage: Damage, budget: int
) -> Iterator[Measured]:
    """Every sequence of the chunk.

    Args:
        model: with the damage's weights already.
        dense: of the undamaged model.
        contestant, damage, budget: how to select.
    """
    selector = Selector(contestant, damage, budget)
    logits = model(dense.batch.tokens, select=selector, change=damage.state)
    yield from compare(dense, logits, selector.selected, selector.learned, budget)


def compare(
    dense: Reference, logits: Tensor, selected: dict[int, Tensor], learned: dict[int, Tensor], budget: int
) -> Iterator[Measured]:
    """Logits ``[B, T, vocabulary]`` and selections (bool ``[B, T, T]`` by leader) against the dense model."""
    log_probs = logits[dense.rows].log_softmax(-1)
    own = log_probs.gather(1, dense.targets[:, None])[:, 0]
    before = dense.log_probs.gather(1, dense.targets[:, None])[:, 0]
    columns = {
        "right": (log_probs.argmax(-1) == dense.targets).float(),
        "log_prob_change": own - before,
        "divergence": (dense.log_probs.exp() * (dense.log_probs - log_probs)).sum(-1),
        "overlap": _overlap(dense.rows, selected, learned),
        "target_hit": _target_hit(dense, selected[MATCHING_LEADER]),
        "mass": _mass(dense, selected[MATCHING_LEADER]),
    }
    sequence, row = dense.rows.nonzero(as_tuple=True)
    for each in range(len(dense.rows)):
        mine = sequence == each
        means = {name: float(values[mine].mean()) for name, values in columns.items() if name != "right"}
        chose = mine & (row + 1 > budget)
        means["overlap"] = float(columns["overlap"][chose].mean()) if chose.any() else 1.0
        yield Measured(int(columns["right"][mine].sum()), int(mine.sum()), **means)


def mean_of(measured: Sequence[Measured], name: str) -> float:
    """Mean of one figure, each answer counted alike."""
    answers = sum(each.answers for each in measured)
    return sum(getattr(each, name) * each.answers for each in measured) / answers


def _overlap(rows: Tensor, selected: dict[int, Tensor], learned: dict[int, Tensor]) -> Tensor:
    shares = []
    for leader, mine in selected.items():
        own, other = mine[rows], learned[leader][rows]
        shares.append((own & other).sum(-1) / (own | other).sum(-1).clamp_min(1))
    return torch.stack(shares).mean(0)


def _target_hit(dense: Reference, selected: Tensor) -> Tensor:
    sources = dense.batch.sources[dense.batch.answers]
    return selected[dense.rows].gather(1, sources[:, None])[:, 0].float()


def _mass(dense: Reference, selected: Tensor) -> Tensor:
    shares = [(attention * selected[dense.rows]).sum(-1) for attention in dense.attention.values()]
    return torch.stack(shares).mean(0)
