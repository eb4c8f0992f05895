"""The replay itself, without validation or judgement: every request's states, merged in each form."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvplugin.replay.attention import RequestStates, attend
from kvplugin.replay.inputs import CompareSettings, ReplayInputs
from kvplugin.replay.merge import merge_groups, merge_states, rank_groups, split_groups
from kvplugin.replay.reconstruct import requests
from kvplugin.replay.reference import Attention
from kvplugin.replay.validate import validate

ORACLE_STATES = 8
"""As many as a context-parallel merge has ranks: pairwise merges of hundreds of states round visibly."""


class Replayed(NamedTuple):
    """What the pages give, float32: outputs ``[B, Hq, Sq, Dv]``, log-sum-exps ``[B, Hq, Sq]`` in base e.

    Attributes:
        prefill: one dense softmax over each whole sequence.
        flat: logical blocks merged in logical order.
        hierarchical: each context-parallel rank's blocks, then the ranks; None without owners.
        ranks: the ranks' states before that merge, ``[W, B, ...]``; None without owners.
        states: per request.
    """

    prefill: Attention
    flat: Attention
    hierarchical: Attention | None
    ranks: Attention | None
    states: list[RequestStates]

    @property
    def tokens(self) -> Tensor:
        """Tokens that each query sees: int64 ``[B, 1, Sq, 1]``, beside outputs."""
        return torch.stack([each.tokens for each in self.states])[:, None, :, None]


def compute(inputs: ReplayInputs, settings: CompareSettings | None = None) -> Replayed:
    """Replay valid inputs."""
    split = settings.split_size if settings else None
    per_split = None if split is None else split // inputs.pool.page_size
    states = [attend(inputs, request) for request in requests(inputs)]
    flat = [merge_groups(*each.blocks, split_groups(len(each.blocks.lse), per_split)) for each in states]
    ranks = hierarchical = None
    if inputs.context_parallel is not None:
        ranks = _stack([_rank_states(inputs, row, each) for row, each in enumerate(states)], dim=1)
        hierarchical = merge_ranks(ranks)
    return Replayed(_stack([each.prefill for each in states]), _stack(flat), hierarchical, ranks, states)


def decode_replay(inputs: ReplayInputs, settings: CompareSettings | None = None) -> Attention:
    """Validate, replay, and cast down once: the output ``[B, Hq, Sq, Dv]`` in its final dtype, the LSE in float32."""
    validate(inputs, None, settings)
    flat = compute(inputs, settings).flat
    return Attention(flat.out.to(inputs.final_dtype), flat.lse)


def merge_ranks(ranks: Attention) -> Attention:
    """Merge the ranks' states ``[W, B, ...]`` in rank order."""
    return merge_groups(*ranks, [range(len(ranks.lse))])


def _rank_states(inputs: ReplayInputs, row: int, states: RequestStates) -> Attention:
    """Each rank's own blocks merged, ``[W, Hq, Sq, ...]``; a rank without blocks saw nothing."""
    assert inputs.context_parallel is not None
    world = inputs.context_parallel.world_size
    out, lse = states.blocks
    owners = inputs.context_parallel.block_owners[row, : len(lse)].tolist()
    nothing = Attention(torch.zeros_like(out[0]), torch.full_like(lse[0], -torch.inf))
    groups = rank_groups(owners, world)
    return _stack([merge_groups(out, lse, [group]) if group else nothing for group in groups])


def _stack(parts: list[Attention], dim: int = 0) -> Attention:
    return Attention(torch.stack([part.out for part in parts], dim), torch.stack([part.lse for part in parts], dim))


def merge_orders(states: RequestStates) -> list[list[int]]:
    """``[Sq][blocks]``: logical blocks that each query merges, in order; blocks it does not see are left out."""
    return [torch.nonzero(seen).flatten().tolist() for seen in states.seen]


def oracle_states(states: RequestStates) -> Iterator[tuple[Tensor, Tensor]]:
    """For each query, at most ORACLE_STATES states ``[N, Hq, 1, Dv]`` and ``[N, Hq, 1]`` that all saw something."""
    for query, seen in enumerate(states.seen):
        if bool(seen.any()):
            rows = slice(query, query + 1)
            out, lse = states.blocks.out[seen][:, :, rows], states.blocks.lse[seen][:, :, rows]
            groups = split_groups(len(lse), -(-len(lse) // ORACLE_STATES))
            yield _stack(
                [merge_states(out[group.start : group.stop], lse[group.start : group.stop]) for group in groups]
            )
