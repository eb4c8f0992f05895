"""Fixed sets of questions, and how many of them a model answers at each budget."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from integration.tiny_dsa.training import vocabulary as words
from integration.tiny_dsa.training.losses import answer_accuracy
from integration.tiny_dsa.training.model import TinyModel, Trace, top_k
from integration.tiny_dsa.training.tasks import TaskBatch, copy, recall

BUDGETS = (None, 16, 32, 64)
"""``None`` = dense attention."""
BAR = 0.97
BAR_LENGTH = 1024
BARRED = ("recall", "needle", "copy")
"""What a model must answer at ``BAR_LENGTH``; the other tasks are reported."""
CARD_SCALE = 3
SEED = 7
TOKENS_AT_ONCE = 2048


class Accuracy(NamedTuple):
    """Right answers of one task at one context length and budget (``None`` = dense)."""

    task: str
    length: int
    budget: int | None
    right: int
    total: int

    @property
    def share(self) -> float:
        return self.right / self.total


def questions(length: int, scale: int = 1) -> dict[str, TaskBatch]:
    """The sets at one context length, the same in every run.

    * ``recall``: up to 64 pairs, 32 questions. ``needle``: 8 pairs, all asked for. ``copy``: a segment of 96 words at
      most. These three need the far context, which no window holds.
    * ``header``: the pair behind ``<bos>``, in reach of four sink tokens. ``absent``: keys without a value, whose rows
      rest on ``<bos>`` in a model with a sink.

    Args:
        length: tokens of each sequence, at least 128.
        scale: multiplies the number of sequences.
    """
    draw = np.random.default_rng(SEED + length)
    asked = min(32, length // 16)
    return {
        "recall": recall(draw, 2 * scale, length, min(64, length // 6), asked),
        "needle": recall(draw, 4 * scale, length, 8, 8),
        "copy": copy(draw, 2 * scale, length, min(96, length // 4)),
        "header": recall(draw, 6 * scale, length, 32, 1, header=True),
        "absent": recall(draw, 4 * scale, length, min(48, length // 6), 8, absent=1.0),
    }


def accuracies(model: TinyModel, lengths: Sequence[int], scale: int = CARD_SCALE) -> list[Accuracy]:
    """Every task at every length and budget."""
    return [
        _accuracy(model, name, length, budget, batch)
        for length in lengths
        for name, batch in questions(length, scale).items()
        for budget in BUDGETS
    ]


def below_bar(found: Sequence[Accuracy]) -> list[Accuracy]:
    """What keeps a model from being good enough."""
    return [
        each
        for each in found
        if each.length == BAR_LENGTH and each.task in BARRED and each.budget is not None and each.share < BAR
    ]


@torch.no_grad()
def sink_mass(model: TinyModel, length: int = 512) -> list[float]:
    """Share of each layer's dense attention that falls on ``<bos>``, mean over heads and over the rows past 64."""
    trace = Trace()
    model(questions(length)["recall"].tokens, trace=trace)
    return [float(attention[:, 64:, words.BOS].mean()) for attention in trace.attention.values()]


def chunks(batch: TaskBatch, tokens_at_once: int = TOKENS_AT_ONCE) -> Iterator[TaskBatch]:
    """The batch in parts of a few sequences, because memory grows with the square of the length."""
    step = max(1, tokens_at_once // batch.tokens.shape[1])
    for start in range(0, len(batch.tokens), step):
        yield TaskBatch(*(field[start : start + step] for field in batch))


@torch.no_grad()
def _accuracy(model: TinyModel, task: str, length: int, budget: int | None, batch: TaskBatch) -> Accuracy:
    select = None if budget is None else top_k(budget)
    right = 0.0
    for part in chunks(batch):
        right += answer_accuracy(model(part.tokens, select=select), part) * int(part.answers.sum())
    return Accuracy(task, length, budget, round(right), int(batch.answers.sum()))
