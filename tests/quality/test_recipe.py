from __future__ import annotations

import numpy as np
import pytest
import torch

from integration.tiny_dsa.training import recipe
from integration.tiny_dsa.training.evaluation import BAR, Accuracy, below_bar
from integration.tiny_dsa.training.model import MATCHING_LAYER, TinyModel, Trace, top_k
from integration.tiny_dsa.training.recipe import Recipe, Step, train
from integration.tiny_dsa.training.tasks import copy
from integration.tiny_dsa.training.warm_start import build_in, copy_heads

SHORT = Recipe(seed=4, short=2, mixed=1, indexer=1, sparse=1)


def test_the_same_seed_gives_the_same_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recipe, "LENGTHS", (64,))
    monkeypatch.setattr(recipe, "SPARSE_LENGTHS", (64,))
    monkeypatch.setattr(recipe, "TOKENS_A_STEP", 256)
    seen: list[Step] = []
    first = train(SHORT, seen.append).model.state_dict()
    assert [step.stage for step in seen] == ["short", "short", "mixed", "indexer", "sparse"]
    second = train(SHORT, lambda step: None).model.state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@torch.no_grad()
def test_the_built_in_circuit_looks_back_and_matches() -> None:
    model = TinyModel(0)
    build_in(model, sink=False)
    batch, trace = copy(np.random.default_rng(0), 4, 64, 16), Trace()
    model(batch.tokens, trace=trace)
    previous = torch.arange(1, 64)
    # Mean over two heads, of which one has the circuit.
    assert trace.attention[0][:, previous, previous - 1].mean() > 0.35
    rows = batch.answers[:, 1:]
    found = trace.attention[1][:, :-1].gather(2, batch.sources[:, 1:].clamp_min(0)[..., None])[..., 0][rows]
    assert found.mean() > 0.15


@torch.no_grad()
def test_indexers_that_start_as_copies_of_heads_find_what_the_heads_match() -> None:
    def found(model: TinyModel) -> float:
        batch, trace = copy(np.random.default_rng(0), 4, 128, 32), Trace()
        model(batch.tokens, trace=trace, select=top_k(16))
        sources = batch.sources[:, 1:].clamp_min(0)[..., None]
        return float(
            trace.selected[MATCHING_LAYER][:, :-1].gather(2, sources)[..., 0][batch.answers[:, 1:]].float().mean()
        )

    model = TinyModel(0)
    build_in(model, sink=True)
    by_chance = found(model)
    copy_heads(model)
    assert by_chance < 0.5 < 0.8 < found(model)


def test_the_bar_is_for_three_tasks_at_one_length() -> None:
    low, high = Accuracy("recall", 1024, 16, 1, 2), Accuracy("copy", 1024, 16, 99, 100)
    asked = [("absent", 1024, 16), ("recall", 2048, 16), ("recall", 1024, None)]
    others = [Accuracy(*each, 0, 2) for each in asked]
    assert low.share < BAR < high.share
    assert below_bar([low, high, *others]) == [low]
