"""Building the index-group layout: from a leader mask, or from a model's configuration by vLLM's rule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvplugin.errors import ArgumentError
from kvplugin.remap.groups import GroupKind, GroupLayout, Inactive, IndexGroup

RUNS_INDEXER, SHARES = "F", "S"
"""Letters of ``index_topk_pattern``, one a layer."""


def layout_from_mask(
    leads: Sequence[bool], *, layers: Sequence[int] | None = None, mtp_layers: Sequence[int] = ()
) -> GroupLayout:
    """The layout of a pipeline stage whose layers do or do not run the indexer.

    Args:
        leads: for each layer of the stage, True if it runs the indexer.
        layers: their numbers, rising; default 0, 1, …
        mtp_layers: numbers of the draft layers, rising, after all others.

    Raises:
        ArgumentError: an entry that is no bool, or numbers that do not rise or do not match the mask.
    """
    numbers = range(len(leads)) if layers is None else layers
    _check_mask(leads, numbers, mtp_layers)
    groups: list[IndexGroup] = []
    for layer, runs_indexer in zip(numbers, leads, strict=True):
        if not runs_indexer and groups and groups[-1].kind is GroupKind.TARGET:
            groups[-1] = replace(groups[-1], layers=(*groups[-1].layers, layer), inactive=None)
        elif runs_indexer:
            groups.append(IndexGroup(GroupKind.TARGET, (layer,), Inactive.SINGLETON))
        else:
            groups.append(IndexGroup(GroupKind.ORPHAN, (layer,), Inactive.ORPHAN))
    groups += (IndexGroup(GroupKind.MTP, (layer,), Inactive.SINGLETON) for layer in mtp_layers)
    return GroupLayout(tuple(groups))


def layout_from_config(
    num_layers: int,
    *,
    index_topk_pattern: Sequence[str] | None = None,
    index_topk_freq: int = 1,
    index_skip_topk_offset: int = 2,
    stage: range | None = None,
    mtp_layers: int = 0,
) -> GroupLayout:
    """The layout that follows from a model's configuration, by vLLM's rule.

    Args:
        num_layers: layers of the whole model, without draft layers.
        index_topk_pattern, index_topk_freq, index_skip_topk_offset: as in :func:`leader_mask`.
        stage: layers of this pipeline stage; default all.
        mtp_layers: draft layers on this stage, numbered from ``num_layers`` on.

    Raises:
        ArgumentError: naming the argument, what it holds and what it may hold.
    """
    mask = leader_mask(
        num_layers,
        index_topk_pattern=index_topk_pattern,
        index_topk_freq=index_topk_freq,
        index_skip_topk_offset=index_skip_topk_offset,
    )
    stage = range(num_layers) if stage is None else stage
    if stage.step != 1 or not 0 <= stage.start <= stage.stop <= num_layers:
        raise ArgumentError("layout_from_config.stage", f"{stage}", f"must lie in range(0, {num_layers})")
    _check_count("layout_from_config", "mtp_layers", mtp_layers, 0)
    drafts = range(num_layers, num_layers + mtp_layers)
    return layout_from_mask(mask[stage.start : stage.stop], layers=stage, mtp_layers=drafts)


def leader_mask(
    num_layers: int,
    *,
    index_topk_pattern: Sequence[str] | None = None,
    index_topk_freq: int = 1,
    index_skip_topk_offset: int = 2,
) -> tuple[bool, ...]:
    """Which layers run the indexer, by the rule that vLLM's models apply to their configuration.

    Args:
        num_layers: layers of the model, without draft layers.
        index_topk_pattern: ``F`` (runs the indexer) or ``S`` (shares) for each layer; letters beyond the last layer
            mean nothing. Given, it decides alone.
        index_topk_freq: one layer in this many runs the indexer.
        index_skip_topk_offset: the layer before this one and all before it run the indexer; counting starts there.

    Raises:
        ArgumentError: a letter other than F and S, fewer letters than layers, or a number out of range.
    """
    where = "leader_mask"
    _check_count(where, "num_layers", num_layers, 0)
    if index_topk_pattern is not None:
        _check_pattern(where, index_topk_pattern, num_layers)
        return tuple(letter != SHARES for letter in index_topk_pattern[:num_layers])
    _check_count(where, "index_topk_freq", index_topk_freq, 1)
    _check_count(where, "index_skip_topk_offset", index_skip_topk_offset, 0)
    counted = (max(layer - index_skip_topk_offset + 1, 0) for layer in range(num_layers))
    return tuple(position % index_topk_freq == 0 for position in counted)


def _check_mask(leads: Sequence[bool], layers: Sequence[int], mtp_layers: Sequence[int]) -> None:
    where = "layout_from_mask"
    for position, entry in enumerate(leads):
        if not isinstance(entry, bool):
            raise ArgumentError(f"{where}.leads", f"{entry!r} at {position}", "must be True or False")
    if len(layers) != len(leads):
        raise ArgumentError(f"{where}.layers", f"{len(layers)} numbers", f"give {len(leads)}, one for each of leads")
    before = -1
    for name, numbers in (("layers", layers), ("mtp_layers", mtp_layers)):
        for layer in numbers:
            if layer <= before:
                raise ArgumentError(f"{where}.{name}", f"{layer} after {before}", "numbers must rise, from 0 or more")
            before = layer


def _check_pattern(where: str, pattern: Sequence[str], num_layers: int) -> None:
    name = f"{where}.index_topk_pattern"
    for layer, letter in enumerate(pattern):
        if letter not in (RUNS_INDEXER, SHARES):
            raise ArgumentError(name, f"{letter!r} for layer {layer}", "use F (runs the indexer) or S (shares)")
    if len(pattern) < num_layers:
        raise ArgumentError(name, f"{len(pattern)} letters for {num_layers} layers", "give one letter a layer")


def _check_count(where: str, name: str, value: int, least: int) -> None:
    if type(value) is not int or value < least:
        raise ArgumentError(f"{where}.{name}", f"{value!r}", f"must be a whole number of at least {least}")
