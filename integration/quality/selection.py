"""From scores to a selection, as an engine does it: top-k, then the product's own policy, on every row of a batch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from integration.quality.damage import Damage
from integration.quality.policies import Contestant, Null
from kvplugin.topology import apply_topology_policy, lower
from kvplugin.vllm.cpu.scoring import topk_rows


@dataclass
class Selector:
    """The ``Select`` of one contestant under one damage.

    Attributes:
        contestant, damage: what runs.
        budget: top-k slots of a row.
        learned: by leader, bool ``[B, T, T]``: what the (damaged) indexer selected.
        selected: by leader, bool ``[B, T, T]``: what rows attend to.
        watch: called with each leader, its scores ``[B, T, T]`` and its top-k int32 ``[B, T, K]``, before the policy.
    """

    contestant: Contestant
    damage: Damage
    budget: int
    learned: dict[int, Tensor] = field(default_factory=dict)
    selected: dict[int, Tensor] = field(default_factory=dict)
    watch: Callable[[int, Tensor, Tensor], None] = lambda layer, scores, selection: None

    def __call__(self, layer: int, scores: Tensor) -> Tensor:
        scores = self.damage.scores(layer, scores)
        batch, length, _ = scores.shape
        rows = scores.flatten(0, 1)
        lengths = torch.arange(1, length + 1, dtype=torch.int32).repeat(batch)
        selection = _top(rows, lengths, self.budget)
        self.damage.selection(layer, selection.view(batch, length, -1))
        self.watch(layer, scores, selection.view(batch, length, -1))
        self.learned[layer] = _as_mask(selection, length).view_as(scores)
        if self.contestant.null is not None:
            selection = self._null(self.contestant.null, layer, rows, lengths)
        if self.contestant.config is not None:
            selection = _in_arbitrary_order(selection, self.damage.chance(layer))
            policy = lower(self.contestant.config, self.budget)
            apply_topology_policy(selection, lengths, config=policy, scores=rows.contiguous())
        self.selected[layer] = _as_mask(selection, length).view_as(scores)
        return self.selected[layer]

    def _null(self, null: Null, layer: int, rows: Tensor, lengths: Tensor) -> Tensor:
        if null is Null.RANDOM:
            return _top(torch.rand(rows.shape, generator=self.damage.chance(layer)), lengths, self.budget)
        if null is Null.RECENT:
            return _top(torch.arange(rows.shape[1]).float().expand_as(rows), lengths, self.budget)
        wide = _top(rows, lengths, 2 * self.budget)
        # A row with fewer than 2 K tokens still fills its K slots.
        first = (lengths.clamp(max=2 * self.budget) - self.budget).clamp_min(0).long().unsqueeze(1)
        return wide.gather(1, first + torch.arange(self.budget))


def _top(rows: Tensor, lengths: Tensor, budget: int) -> Tensor:
    selection = torch.empty(len(rows), budget, dtype=torch.int32)
    topk_rows(rows, lengths, selection)
    return selection


def _in_arbitrary_order(selection: Tensor, draw: torch.Generator) -> Tensor:
    """GPU kernels return slots in no order; ours are sorted, which would flatter eviction by slot order.

    Each row has an order of its own: a shared one would put the best token of all rows into the same slot.
    """
    return selection.gather(1, torch.rand(selection.shape, generator=draw).argsort(1))


def _as_mask(selection: Tensor, length: int) -> Tensor:
    """Bool ``[R, length]``; unused and impossible slots fall into a column that is cut off, as the remap drops them."""
    tokens = selection.long()
    tokens = torch.where((tokens < 0) | (tokens >= length), length, tokens)
    return torch.zeros(len(selection), length + 1, dtype=torch.bool).scatter_(1, tokens, True)[:, :length]
