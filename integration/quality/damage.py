"""What can go wrong with an indexer, each as a change of its weights, its keys, its scores or its selection."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from integration.tiny_dsa.training.export import with_halves_apart
from integration.tiny_dsa.training.model import IndexerState, TinyModel, groups

CLEAN = "clean"
BLOCK = 8
PAGE = 64
"""Tokens of an index page, as vLLM's indexer cache has them."""
GARBAGE = 2143289344
"""What top-k kernels emit for rows of NaN: the bits of a NaN, read as an index."""
ALL_LEADERS = tuple(groups())


@dataclass(frozen=True)
class Damage:
    """No damage; the kinds below change one of four things.

    Attributes:
        name: as tables show it.
        layers: leaders that are hit.
        seed: of what is random in it.
    """

    name: str
    layers: tuple[int, ...] = ALL_LEADERS
    seed: int = 11

    def weights(self, model: TinyModel) -> TinyModel:
        """The model that runs: the given one, or a damaged copy."""
        return model

    def state(self, layer: int, state: IndexerState) -> IndexerState:
        """Queries and keys of one leader."""
        return state

    def scores(self, layer: int, scores: Tensor) -> Tensor:
        """Scores ``[B, T, T]`` of one leader, -inf above the diagonal."""
        return scores

    def selection(self, layer: int, selection: Tensor) -> None:
        """The top-k kernel's result, int32 ``[B, T, K]``, changed in place."""

    def chance(self, layer: int) -> torch.Generator:
        """The same draws for every contestant, others for every leader."""
        return torch.Generator().manual_seed(self.seed + 1000 * layer)


@dataclass(frozen=True)
class WeightNoise(Damage):
    """Gaussian noise on the indexer's matrices, in units of each matrix's standard deviation."""

    size: float = 0.6

    def weights(self, model: TinyModel) -> TinyModel:
        damaged = copy.deepcopy(model)
        for layer in self.layers:
            draw = self.chance(layer)
            for parameter in damaged.model.layers[layer].self_attn.indexer.parameters():
                if parameter.dim() == 2:
                    noise = torch.randn(parameter.shape, generator=draw)
                    parameter.data += self.size * parameter.data.std() * noise
        return damaged


@dataclass(frozen=True)
class ScoreNoise(Damage):
    """Gaussian noise on scores, in units of the standard deviation of the row's visible scores."""

    size: float = 0.6

    def scores(self, layer: int, scores: Tensor) -> Tensor:
        if layer not in self.layers:
            return scores
        visible = scores > -torch.inf
        count = visible.sum(-1, keepdim=True)
        known = scores.masked_fill(~visible, 0)
        mean = known.sum(-1, keepdim=True) / count
        variance = (known.square().sum(-1, keepdim=True) / count - mean.square()).clamp_min(0)
        # One draw per place, shared by the batch: cheaper, and as good.
        noise = torch.randn(scores.shape[1:], generator=self.chance(layer))
        return scores + self.size * variance.sqrt() * noise


@dataclass(frozen=True)
class CoarseKeys(Damage):
    """Keys of a few bits: one scale a key, symmetric levels; one bit keeps the signs."""

    bits: int = 4

    def state(self, layer: int, state: IndexerState) -> IndexerState:
        if layer not in self.layers:
            return state
        keys = state.keys
        if self.bits == 1:
            return state._replace(keys=keys.sign() * keys.abs().mean(-1, keepdim=True))
        levels = 2 ** (self.bits - 1) - 1
        largest = keys.abs().amax(-1, keepdim=True).clamp_min(1e-9)
        return state._replace(keys=(keys / largest * levels).round() / levels * largest)


@dataclass(frozen=True)
class LostBlocks(Damage):
    """Blocks of the index that score nothing at all. A row's own token is new and always there."""

    share: float = 0.3

    def scores(self, layer: int, scores: Tensor) -> Tensor:
        batch, length, _ = scores.shape
        lost = torch.rand(batch, length // BLOCK + 1, generator=self.chance(layer)) < self.share
        return _without(scores, lost.repeat_interleave(BLOCK, 1)[:, :length]) if layer in self.layers else scores


@dataclass(frozen=True)
class LostFirstBlock(Damage):
    """The block with the sinks scores nothing."""

    def scores(self, layer: int, scores: Tensor) -> Tensor:
        lost = (torch.arange(scores.shape[-1]) < BLOCK).expand(len(scores), -1)
        return _without(scores, lost) if layer in self.layers else scores


@dataclass(frozen=True)
class LostNewest(Damage):
    """Keys arrive late: the newest tokens, but for a row's own, score nothing yet."""

    tokens: int = 4

    def scores(self, layer: int, scores: Tensor) -> Tensor:
        if layer not in self.layers:
            return scores
        place = torch.arange(scores.shape[-1])
        age = place[:, None] - place
        return scores.masked_fill((age > 0) & (age < self.tokens), -torch.inf)


@dataclass(frozen=True)
class FlippedRope(Damage):
    """The indexer's weights are in the other architecture's rotary layout."""

    def weights(self, model: TinyModel) -> TinyModel:
        damaged = copy.deepcopy(model)
        damaged.load_state_dict(with_halves_apart(damaged.state_dict()))
        return damaged


@dataclass(frozen=True)
class StalePage(Damage):
    """One page of the index, at a random place, still holds the keys of another page."""

    def state(self, layer: int, state: IndexerState) -> IndexerState:
        length = state.keys.shape[1]
        pages = length // PAGE
        if layer not in self.layers or pages < 2:
            return state
        keys, draw = state.keys.clone(), self.chance(layer)
        for row in range(len(keys)):
            stale, other = torch.randperm(pages, generator=draw)[:2].tolist()
            keys[row, stale * PAGE : (stale + 1) * PAGE] = state.keys[row, other * PAGE : (other + 1) * PAGE]
        return state._replace(keys=keys)


@dataclass(frozen=True)
class NanRows(Damage):
    """Some rows score NaN, and the kernel returns garbage for them."""

    share: float = 0.1

    def selection(self, layer: int, selection: Tensor) -> None:
        if layer in self.layers:
            selection[torch.rand(selection.shape[:2], generator=self.chance(layer)) < self.share] = GARBAGE


def damages() -> tuple[Damage, ...]:
    """All of them, the clean indexer first."""
    return (
        Damage(CLEAN),
        WeightNoise("weight noise 0.6 σ", size=0.6),
        WeightNoise("weight noise 1 σ", size=1.0),
        WeightNoise("weight noise 1 σ, layer 0", size=1.0, layers=ALL_LEADERS[:1]),
        WeightNoise("weight noise 1 σ, layer 1", size=1.0, layers=ALL_LEADERS[1:]),
        ScoreNoise("score noise 1 σ", size=1.0),
        CoarseKeys("keys 1 bit", bits=1),
        CoarseKeys("keys 2 bit", bits=2),
        CoarseKeys("keys 4 bit", bits=4),
        LostBlocks("30 % of blocks lost", share=0.3),
        LostFirstBlock("first block lost"),
        LostNewest("newest 3 lost", tokens=4),
        FlippedRope("RoPE layout flipped"),
        StalePage("one stale page"),
        NanRows("10 % NaN rows", share=0.1),
    )


def _without(scores: Tensor, lost: Tensor) -> Tensor:
    """Scores with the lost tokens (bool ``[B, T]``) at -inf, but for each row's own."""
    own = torch.eye(scores.shape[-1], dtype=torch.bool)
    return scores.masked_fill(lost.unsqueeze(1) & ~own, -torch.inf)
