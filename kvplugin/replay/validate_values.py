"""Rules about the values on the device. Each reads one flag; only a refusal reads more."""

from __future__ import annotations

import torch
from torch import Tensor

from kvplugin.replay.errors import IdentityError
from kvplugin.replay.inputs import ContextParallel, LogProbHead, ReplayInputs
from kvplugin.replay.refuse import refuse_where

PAST_THE_END = torch.iinfo(torch.int64).max


def active_blocks(inputs: ReplayInputs) -> Tensor:
    """bool ``[B, M]``: entries of the block table that hold cached tokens."""
    needed = -(-inputs.kv_seq_lens.long() // inputs.pool.page_size)
    return torch.arange(inputs.block_table.shape[1], device=needed.device) < needed.unsqueeze(1)


def check_lengths(inputs: ReplayInputs) -> None:
    """Lengths in ``[1, capacity]``."""
    lengths = inputs.kv_seq_lens
    capacity = inputs.block_table.shape[1] * inputs.pool.page_size
    refuse_where((lengths < 1) | (lengths > capacity), "kv_seq_lens", lengths, ("row",), f"must be in [1, {capacity}]")


def check_pages(inputs: ReplayInputs) -> None:
    """Active pages inside the pool and each once per request; -1 after them."""
    table, active = inputs.block_table, active_blocks(inputs)
    count = inputs.pool.keys.shape[0]
    axes = ("row", "slot")
    refuse_where(active & ((table < 0) | (table >= count)), "block_table", table, axes, f"must be in [0, {count})")
    refuse_where(~active & (table != -1), "block_table", table, axes, "must be -1 past the request's pages")
    # Inactive entries become distinct negatives, so that only active pages can repeat.
    distinct = torch.where(active, table.long(), -1 - torch.arange(table.shape[1], device=table.device))
    ordered, slot = distinct.sort(dim=1, stable=True)
    repeats = torch.zeros_like(active)
    repeats[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    repeated = torch.zeros_like(active).scatter(1, slot, repeats)
    refuse_where(repeated, "block_table", table, axes, "must not repeat among a request's pages", IdentityError)


def check_owners(parallel: ContextParallel, inputs: ReplayInputs) -> None:
    """Owners of active blocks inside the world; -1 after them."""
    owners, active = parallel.block_owners, active_blocks(inputs)
    outside = active & ((owners < 0) | (owners >= parallel.world_size))
    axes = ("row", "slot")
    refuse_where(outside, "cp_block_owners", owners, axes, f"must be in [0, {parallel.world_size})")
    refuse_where(~active & (owners != -1), "cp_block_owners", owners, axes, "must be -1 past the request's blocks")


def check_positions(inputs: ReplayInputs) -> None:
    """Cached positions strictly increasing and equal to key positions; queries cached where they claim to be."""
    positions, active = _logical(inputs, inputs.global_token_positions)
    key_positions, _ = _logical(inputs, inputs.key_position_ids)
    axes = ("row", "token")
    refuse_where(
        active & (positions < 0), "global_token_positions", positions, axes, "must not be -1 in use", IdentityError
    )
    falling = torch.zeros_like(active)
    falling[:, 1:] = active[:, 1:] & (positions[:, 1:] <= positions[:, :-1])
    refuse_where(
        falling, "global_token_positions", positions, axes, "must be larger than the token's before it", IdentityError
    )
    refuse_where(
        active & (key_positions != positions),
        "key_position_ids",
        key_positions,
        axes,
        "must equal global_token_positions",
        IdentityError,
    )
    _check_query_positions(inputs, torch.where(active, positions, PAST_THE_END))


def _check_query_positions(inputs: ReplayInputs, cached: Tensor) -> None:
    position, query = inputs.cache_position.long(), inputs.query_position_ids.long()
    axes = ("row", "query")
    refuse_where(position != query, "cache_position", position, axes, "must equal query_position_ids", IdentityError)
    falling = torch.zeros_like(position, dtype=torch.bool)
    falling[:, 1:] = position[:, 1:] <= position[:, :-1]
    refuse_where(falling, "cache_position", position, axes, "must be larger than the query's before it", IdentityError)
    place = torch.searchsorted(cached, position).clamp_max(cached.shape[1] - 1)
    absent = cached.gather(1, place) != position
    refuse_where(absent, "cache_position", position, axes, "must be the position of a cached token", IdentityError)


def check_selection(selection: Tensor, inputs: ReplayInputs) -> None:
    """Selected tokens cached, visible and each once; -1 only as a tail."""
    axes = ("row", "query", "slot")
    selected = selection.long()
    lengths = inputs.kv_seq_lens.long().view(-1, 1, 1)
    outside = (selected < -1) | (selected >= lengths)
    refuse_where(outside, "selection", selection, axes, "must be a token below the request's length, or -1")
    hole = torch.zeros_like(outside)
    hole[..., 1:] = (selected[..., 1:] >= 0) & (selected[..., :-1] < 0)
    refuse_where(hole, "selection", selection, axes, "must not follow -1: unused slots come last")
    distinct = torch.where(selected >= 0, selected, -1 - torch.arange(selected.shape[-1], device=selected.device))
    ordered, slot = distinct.sort(dim=-1, stable=True)
    repeats = torch.zeros_like(outside)
    repeats[..., 1:] = ordered[..., 1:] == ordered[..., :-1]
    repeated = torch.zeros_like(outside).scatter(-1, slot, repeats)
    refuse_where(repeated, "selection", selection, axes, "must not repeat in a query's selection")
    positions, _ = _logical(inputs, inputs.global_token_positions)
    chosen = positions.unsqueeze(1).expand(-1, selected.shape[1], -1).gather(2, selected.clamp_min(0))
    future = (selected >= 0) & (chosen > inputs.query_position_ids.long().unsqueeze(-1))
    refuse_where(future, "selection", selection, axes, "must not lie after the query's position")


def check_targets(head: LogProbHead) -> None:
    """Targets that count are tokens of the vocabulary."""
    size = len(head.weight)
    outside = head.mask & ((head.targets < 0) | (head.targets >= size))
    refuse_where(outside, "head.targets", head.targets, ("row", "query"), f"must be in [0, {size})")


def check_finite(field: str, tensor: Tensor, axes: tuple[str, ...], start: int = 0) -> None:
    """No NaN or infinity. A finite sum proves it in one pass; only another one is looked at element by element.

    ``start`` is the first coordinate of the tensor's first element.
    """
    if bool(torch.isfinite(tensor.sum())):
        return
    refuse_where(~torch.isfinite(tensor), field, tensor, axes, "must be finite", start=start)


def _logical(inputs: ReplayInputs, per_slot: Tensor) -> tuple[Tensor, Tensor]:
    """Values of a per-slot tensor in logical order, int64 ``[B, M * page]``, and which of them are cached tokens."""
    page = inputs.pool.page_size
    table = inputs.block_table.long().clamp_min(0)
    values = per_slot.long()[table].flatten(1)
    token = torch.arange(values.shape[1], device=values.device)
    return values, (token < inputs.kv_seq_lens.long().unsqueeze(1)) & (token < table.shape[1] * page)
