"""Merging partial attention states by log-sum-exp, in an order that the caller states."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvplugin.replay.reference import Attention

LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453


def shift(lse: Tensor) -> Tensor:
    """``lse`` as a subtrahend: 0 where it is -inf, so that ``-inf - -inf`` cannot become NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)


def merge_states(out: Tensor, lse: Tensor) -> Attention:
    """Fold states from first to last, by their shares of the largest one; normalised once, at the end.

    The order of the sums is the order of the states and nothing else (a maximum has no order). Adding up shares
    instead of log-sum-exps keeps 512 blocks as exact as one: a running log-sum-exp rounds at its own magnitude each
    time. States that saw nothing (-inf) change no bit.

    Args:
        out: float32 ``[N, ..., Dv]``.
        lse: float32 ``[N, ...]``, base e.
    """
    largest = lse.amax(0)
    shares = torch.exp(lse - shift(largest))
    weighted = shares.unsqueeze(-1) * out
    total, merged = shares[0].clone(), weighted[0].clone()
    for share, state in zip(shares[1:], weighted[1:], strict=True):
        total += share
        merged += state
    # Nothing seen: total is 0, and so must be the output.
    return Attention(merged / total.masked_fill(total == 0, 1.0).unsqueeze(-1), largest + total.log())


def merge_groups(out: Tensor, lse: Tensor, groups: Sequence[Sequence[int]]) -> Attention:
    """Two levels: each group folds its own states in the order given, then the groups fold in theirs.

    Args:
        out, lse: states as in :func:`merge_states`.
        groups: indices of states; empty groups are left out.
    """
    if len(groups) == 1 and list(groups[0]) == list(range(len(out))):
        return merge_states(out, lse)
    parts = []
    for group in groups:
        if len(group):
            index = torch.as_tensor(group, device=out.device)
            parts.append(merge_states(out[index], lse[index]))
    return merge_states(torch.stack([part.out for part in parts]), torch.stack([part.lse for part in parts]))


def split_groups(blocks: int, blocks_per_split: int | None) -> list[range]:
    """Consecutive blocks, ``blocks_per_split`` at a time; one group without a split size."""
    step = blocks if blocks_per_split is None else blocks_per_split
    return [range(start, min(start + step, blocks)) for start in range(0, blocks, step)]


def rank_groups(owners: Sequence[int], world_size: int) -> list[list[int]]:
    """Blocks of each rank, in logical order; ``owners`` names each block's rank."""
    groups: list[list[int]] = [[] for _ in range(world_size)]
    for block, owner in enumerate(owners):
        groups[owner].append(block)
    return groups
