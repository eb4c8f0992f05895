"""Selections and damages on small random scores."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from integration.quality.damage import Damage, LostFirstBlock, LostNewest, damages
from integration.quality.policies import LEARNED, Contestant, contestants
from integration.quality.selection import Selector
from integration.tiny_dsa.training.model import IndexerState, TinyModel

BUDGET, LENGTH = 32, 96
CLEAN = Damage("clean")


@pytest.fixture
def scores() -> Tensor:
    drawn = torch.randn(2, LENGTH, LENGTH, generator=torch.Generator().manual_seed(0))
    return drawn.masked_fill(~torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril(), -torch.inf)


def named(name: str) -> Contestant:
    (found,) = (each for each in contestants(BUDGET) if each.name == name)
    return found


@pytest.mark.parametrize("contestant", contestants(BUDGET), ids=lambda each: each.name)
def test_rows_fill_their_budget_with_visible_tokens(scores: Tensor, contestant: Contestant) -> None:
    mask = Selector(contestant, CLEAN, BUDGET)(0, scores)
    assert not (mask & (scores == -torch.inf)).any()
    assert torch.equal(mask.sum(-1), torch.arange(1, LENGTH + 1).clamp(max=BUDGET).expand(2, -1))


def test_learned_is_the_top_k(scores: Tensor) -> None:
    selector = Selector(named(LEARNED), CLEAN, BUDGET)
    last = selector(0, scores)[:, -1]
    assert torch.equal(last, scores[:, -1] >= scores[:, -1].topk(BUDGET).values[:, -1:])
    assert torch.equal(selector.learned[0], selector.selected[0])


def test_default_has_sinks_and_window(scores: Tensor) -> None:
    mask = Selector(named("default"), CLEAN, BUDGET)(0, scores)
    assert mask[:, -1, :4].all()
    assert mask[:, -1, -4:].all()


def test_null_tail_avoids_the_learned(scores: Tensor) -> None:
    selector = Selector(named("null: learned tail"), CLEAN, BUDGET)
    mask = selector(0, scores)
    assert not (mask & selector.learned[0])[:, 2 * BUDGET :].any()


def test_policy_brings_back_what_is_lost(scores: Tensor) -> None:
    for damage, place in ((LostFirstBlock("first"), slice(0, 4)), (LostNewest("newest"), slice(-4, -1))):
        assert not Selector(named(LEARNED), damage, BUDGET)(0, scores)[:, -1, place].any()
        assert Selector(named("default"), damage, BUDGET)(0, scores)[:, -1, place].all()


@pytest.mark.parametrize("damage", damages(), ids=lambda each: each.name)
def test_damage_is_repeatable_and_only_the_clean_one_does_nothing(scores: Tensor, damage: Damage) -> None:
    draw = torch.Generator().manual_seed(1)
    state = IndexerState(torch.randn(2, 192, 2, 128, generator=draw), torch.randn(2, 192, 128, generator=draw), scores)
    model, leader = TinyModel(), damage.layers[0]
    selection = torch.arange(BUDGET, dtype=torch.int32).expand(2, LENGTH, BUDGET)

    def effect() -> list[Tensor]:
        hit = selection.clone()
        damage.selection(leader, hit)
        weights = torch.cat([each.flatten() for each in damage.weights(model).indexer_parameters()])
        return [weights, damage.state(leader, state).keys, damage.scores(leader, scores), hit]

    before = [torch.cat([each.flatten() for each in model.indexer_parameters()]), state.keys, scores, selection]
    found = effect()
    assert all(torch.equal(one, other) for one, other in zip(found, effect(), strict=True))
    same = all(torch.equal(one, other) for one, other in zip(found, before, strict=True))
    assert same == (damage.name == "clean")


def test_slot_order_leaves_out_good_tokens_in_some_rows_only(scores: Tensor) -> None:
    selector = Selector(named("default, slot order"), CLEAN, BUDGET)
    best = scores.argmax(-1, keepdim=True)
    kept = selector(0, scores).gather(2, best)[:, 2 * BUDGET :]
    assert 0.5 < kept.float().mean() < 1
