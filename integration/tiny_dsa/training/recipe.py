"""The recipe: four stages in one process, a few minutes on two CPU cores.

1. ``short``: dense attention at length 64, where steps are cheap: the built-in circuits settle, the head learns words.
2. ``mixed``: dense, lengths 64 to 512 and gaps in the positions up to 2304. One fixed length would forget the others.
3. ``indexer``: attention stands still, the indexers learn to rank tokens as attention weighs them, for all layers of
   their group. They start as copies of their own layer's heads: from random weights they find content late (of two
   seeds, one in 350 steps), and later stages do not make up for it.
4. ``sparse``: everything trains on the tokens that the indexers select, for a new random budget at each step, so that
   no one budget is special, and with contexts up to 1024: what a head has to ignore grows with the context.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor, nn

from integration.tiny_dsa.training.losses import answer_accuracy, answer_loss, indexer_loss, parking_loss
from integration.tiny_dsa.training.model import TinyModel, Trace, top_k
from integration.tiny_dsa.training.tasks import TaskBatch, skipping_positions, training_batch
from integration.tiny_dsa.training.warm_start import build_in, copy_heads

SHORT_LENGTH = 64
SHORT_SEQUENCES = 32
LENGTHS = (64, 128, 192, 256, 384, 512)
SPARSE_LENGTHS = (64, 128, 256, 512, 1024, 1024)
TOKENS_A_STEP = 3072
BUDGETS = (12, 16, 24, 32, 64)
FURTHEST_POSITION = 2304
"""Beyond the 2048 tokens of the demo's engine."""
SKIPPING_SHARE = 0.4
ABSENT_SHARE = 0.15
GRADIENT_NORM = 1.0
PARKING_STEPS = 120
PARKING_WEIGHT = 0.2


@dataclass(frozen=True)
class Recipe:
    """What decides a model, apart from the machine's rounding.

    Attributes:
        seed: of weights and batches.
        sink: build in a resting place on ``<bos>``, and ask for keys that are absent, which is where it is needed.
        short, mixed, indexer, sparse: steps of each stage.
        parking: steps of the variant that :func:`park` makes.
    """

    seed: int = 1
    sink: bool = True
    short: int = 100
    mixed: int = 450
    indexer: int = 200
    sparse: int = 180
    parking: int = 0

    @property
    def steps(self) -> int:
        return self.short + self.mixed + self.indexer + self.sparse + self.parking


@dataclass(frozen=True)
class Step:
    """What one step shows: its stage, its loss, and the share of answers it got right."""

    stage: str
    loss: float
    accuracy: float


class Watch(Protocol):
    """Is told of each step."""

    def __call__(self, step: Step) -> None: ...


@dataclass(frozen=True)
class Trained:
    """A trained model, and the seconds that it took."""

    model: TinyModel
    recipe: Recipe
    seconds: float


def train(recipe: Recipe, watch: Watch) -> Trained:
    """Follow the recipe, on as many threads as torch has."""
    started = time.monotonic()
    model = TinyModel(recipe.seed)
    build_in(model, sink=recipe.sink)
    training = _Training(model, recipe, np.random.default_rng(recipe.seed), watch)
    training.dense("short", recipe.short, warm_up=50, decay=False)
    training.dense("mixed", recipe.mixed, warm_up=20, decay=True)
    training.indexers(recipe.indexer)
    training.sparse("sparse", recipe.sparse)
    return Trained(model.eval(), recipe, time.monotonic() - started)


def park(model: TinyModel, seed: int, watch: Watch, steps: int = PARKING_STEPS) -> Trained:
    """Train a finished model on until its matching head rests on ``<bos>`` wherever nothing matches.

    The result puts on the sink what large models put there, so that losing the sink can be seen to matter.
    """
    started = time.monotonic()
    recipe = Recipe(seed=seed, parking=steps)
    _Training(model.train(), recipe, np.random.default_rng(seed), watch).sparse("parking", steps, PARKING_WEIGHT)
    return Trained(model.eval(), recipe, time.monotonic() - started)


class _Training:
    """The state that stages hand on: weights, the main optimiser and the source of batches."""

    def __init__(self, model: TinyModel, recipe: Recipe, draw: np.random.Generator, watch: Watch) -> None:
        self._model, self._draw, self._watch = model, draw, watch
        self._absent = ABSENT_SHARE if recipe.sink else 0.0
        self._main, self._indexers = model.main_parameters(), model.indexer_parameters()
        self._optimizer = _adam([(self._main, 2e-3)])

    def dense(self, stage: str, steps: int, *, warm_up: int, decay: bool) -> None:
        for step in range(steps):
            _set_rate(self._optimizer, _schedule(step, steps, warm_up, decay))
            batch, positions = self._batch(LENGTHS) if decay else self._short_batch()
            logits = self._model(batch.tokens, positions=positions)
            self._descend(stage, self._optimizer, answer_loss(logits, batch), logits, batch)

    def indexers(self, steps: int) -> None:
        copy_heads(self._model)
        optimizer = _adam([(self._indexers, 3e-3)])
        with _frozen(self._main):
            for step in range(steps):
                _set_rate(optimizer, _schedule(step, steps, 20, decay=True))
                batch, positions = self._batch(LENGTHS)
                trace = Trace()
                logits = self._model(batch.tokens, positions=positions, trace=trace, score=True)
                self._descend("indexer", optimizer, indexer_loss(trace), logits, batch)

    def sparse(self, stage: str, steps: int, parking_weight: float = 0.0) -> None:
        optimizer = _adam([(self._main, 3e-4), (self._indexers, 6e-4)])
        for step in range(steps):
            _set_rate(optimizer, _schedule(step, steps, 20, decay=True))
            batch, positions = self._batch(SPARSE_LENGTHS)
            trace, select = Trace(), top_k(int(self._draw.choice(BUDGETS)))
            logits = self._model(batch.tokens, select=select, positions=positions, trace=trace, score=True)
            loss = answer_loss(logits, batch) + indexer_loss(trace)
            if parking_weight and trace.matching is not None:
                loss = loss + parking_weight * parking_loss(trace.matching, batch)
            self._descend(stage, optimizer, loss, logits, batch)

    def _short_batch(self) -> tuple[TaskBatch, None]:
        return training_batch(self._draw, SHORT_SEQUENCES, SHORT_LENGTH, self._absent), None

    def _batch(self, lengths: Sequence[int]) -> tuple[TaskBatch, Tensor | None]:
        length = int(self._draw.choice(lengths))
        sequences = max(3, min(SHORT_SEQUENCES, TOKENS_A_STEP // length))
        batch = training_batch(self._draw, sequences, length, self._absent)
        if self._draw.random() >= SKIPPING_SHARE:
            return batch, None
        return batch, skipping_positions(self._draw, sequences, length, FURTHEST_POSITION)

    def _descend(
        self, stage: str, optimizer: torch.optim.Optimizer, loss: Tensor, logits: Tensor, batch: TaskBatch
    ) -> None:
        optimizer.zero_grad()
        loss.backward()
        for group in optimizer.param_groups:
            nn.utils.clip_grad_norm_(group["params"], GRADIENT_NORM)
        optimizer.step()
        self._watch(Step(stage, float(loss.detach()), answer_accuracy(logits.detach(), batch)))


def _adam(groups: Sequence[tuple[list[nn.Parameter], float]]) -> torch.optim.AdamW:
    """A short memory of squared gradients (0.98): a thousand steps are too few for the usual 0.999."""
    described = [{"params": parameters, "lr": rate, "full": rate} for parameters, rate in groups]
    return torch.optim.AdamW(described, betas=(0.9, 0.98), weight_decay=0.0, fused=True)


def _schedule(step: int, steps: int, warm_up: int, decay: bool) -> float:
    """Share of the full learning rate: up over ``warm_up`` steps, down to a twentieth over the second half."""
    rising = min(1.0, (step + 1) / warm_up)
    return rising * min(1.0, max(0.05, 2 * (steps - step) / steps)) if decay else rising


def _set_rate(optimizer: torch.optim.Optimizer, share: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = group["full"] * share


@contextmanager
def _frozen(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    for parameter in parameters:
        parameter.requires_grad_(False)
    yield
    for parameter in parameters:
        parameter.requires_grad_(True)
