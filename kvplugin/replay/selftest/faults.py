"""Faults that engines of this kind have had, each put into a good record; the report must name them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvplugin.replay.capture.records import Record
from kvplugin.replay.fingerprint import content_digest
from kvplugin.replay.inputs import ContextParallel, ReplayInputs
from kvplugin.replay.merge import LOG2_E
from kvplugin.replay.pages import KVPool
from kvplugin.replay.reconstruct import logical_slots
from kvplugin.replay.report import Stage
from kvplugin.replay.rope import RopeLayout, RopeState
from kvplugin.replay.selftest.synthetic import Shape, make_record, observe, rotated_keys
from kvplugin.replay.stages.selection import indexer_scores

GQA = Shape(world=2, prefix=40)
MLA = Shape(latent=32, rope=16, topk=24)


class Fault(NamedTuple):
    """One fault.

    Attributes:
        name: what is wrong.
        shape: of the good record.
        inject: makes a bad record of a good one; the second record is another layer's.
        stage: where the report must see it first; None = it must not drift.
        named: text that must stand in the report's findings.
    """

    name: str
    shape: Shape
    inject: Callable[[Record, Record], Record]
    stage: Stage | None
    named: str

    def records(self, seed: int = 0) -> tuple[Record, Record]:
        """The bad record, and a good one of another layer."""
        good, other = make_record(self.shape, seed), make_record(self.shape, seed + 100, layer=1)
        return self.inject(good, other), other


def _engine_with(record: Record, inputs: ReplayInputs) -> Record:
    """The record of an engine that computed with ``inputs`` although it read what the record says."""
    wrong = observe(inputs)
    return replace(record, observed=replace(record.observed, out=wrong.out, lse=wrong.lse))


def _with_pool(record: Record, keys: Tensor, values: Tensor | None) -> Record:
    pool = KVPool(record.inputs.pool.format, keys, values, record.inputs.pool.latent_dim)
    return replace(record, inputs=replace(record.inputs, pool=pool))


def page_order(record: Record, other: Record) -> Record:
    """Pages moved to other places of the pool, and the table with them."""
    inputs = record.inputs
    count = inputs.pool.keys.shape[0]
    moved = torch.randperm(count, generator=torch.Generator().manual_seed(1))
    back = moved.argsort()
    pool = inputs.pool
    table = torch.where(inputs.block_table >= 0, back[inputs.block_table.clamp_min(0)], -1)
    values = None if pool.values is None else pool.values[moved]
    return replace(
        record,
        inputs=replace(
            inputs,
            pool=replace(pool, keys=pool.keys[moved], values=values),
            block_table=table,
            global_token_positions=inputs.global_token_positions[moved],
            key_position_ids=inputs.key_position_ids[moved],
        ),
    )


def swapped_page(record: Record, other: Record) -> Record:
    """Block 3 holds the content of block 4, under its own positions."""
    pool, table = record.inputs.pool, record.inputs.block_table[0]
    keys = pool.keys.clone()
    keys[table[3]] = pool.keys[table[4]]
    values = None if pool.values is None else pool.values.clone()
    if values is not None and pool.values is not None:
        values[table[3]] = pool.values[table[4]]
    return _with_pool(record, keys, values)


def wrong_rotation(record: Record, other: Record) -> Record:
    """The key of token 50 rotated for position 57."""
    inputs, keys = record.inputs, record.inputs.pool.keys.clone()
    slot = logical_slots(inputs.block_table[0], 51, inputs.pool.page_size)[50:]
    flat = keys.view(-1, *keys.shape[2:])
    flat[slot] = rotated_keys(flat[slot], torch.tensor([7]), inputs.rope)
    return _with_pool(record, keys, inputs.pool.values)


def cast_through_q(record: Record, other: Record) -> Record:
    """A bfloat16 query, and float32 keys that the engine rotated into the query's dtype."""
    return _engine_with(record, replace(record.inputs, rope=replace(record.inputs.rope, k_dtype=torch.bfloat16)))


def base_two_rank(record: Record, other: Record) -> Record:
    """Rank 1 hands over its log-sum-exp in base 2, the others in base e."""
    assert record.observed.rank_lse is not None
    lse = record.observed.rank_lse.clone()
    lse[1] *= LOG2_E
    return replace(record, observed=replace(record.observed, rank_lse=lse))


def changed_owner(record: Record, other: Record) -> Record:
    """Block 2 belongs to another rank, and the ranks' states follow."""
    parallel = record.inputs.context_parallel
    assert parallel is not None
    owners = parallel.block_owners.clone()
    owners[0, 2] = (owners[0, 2] + 1) % parallel.world_size
    inputs = replace(record.inputs, context_parallel=ContextParallel(owners, parallel.world_size))
    ranks = observe(inputs)
    observed = replace(record.observed, rank_out=ranks.rank_out, rank_lse=ranks.rank_lse)
    return replace(record, inputs=inputs, observed=observed)


def altered_prefix(record: Record, other: Record) -> Record:
    """One element of the prefix differs; its key, its fingerprint and all the engine computed are the old ones."""
    inputs, keys = record.inputs, record.inputs.pool.keys.clone()
    slot = int(logical_slots(inputs.block_table[0], 6, inputs.pool.page_size)[5])
    keys.view(-1)[slot * keys[0, 0].numel()] += 0.25
    altered = _with_pool(record, keys, inputs.pool.values)
    digest = content_digest(altered.inputs, 0)
    return replace(altered, content=digest.content(), chunks=tuple(digest.chunks))


def dropped_key(record: Record, other: Record) -> Record:
    """The engine's length was one short."""
    inputs = record.inputs
    return _engine_with(record, replace(inputs, query_position_ids=inputs.query_position_ids - 1))


def wrong_scale(record: Record, other: Record) -> Record:
    """The scale of a head without its RoPE dimensions."""
    size = 1 / record.inputs.scale**2 - record.inputs.rope.rotary_dim
    return _engine_with(record, replace(record.inputs, scale=size**-0.5))


def other_group(record: Record, other: Record) -> Record:
    """The kernel read the rows that another layer's indexer had selected."""
    inputs = record.inputs
    assert other.inputs.selection is not None
    selection = other.inputs.selection
    slots = logical_slots(inputs.block_table[0], int(inputs.kv_seq_lens[0]), inputs.pool.page_size)
    physical = torch.where(selection[0] >= 0, slots[selection[0].clamp_min(0)], -1)
    return replace(_engine_with(record, replace(inputs, selection=selection)), physical=physical)


def other_group_unseen(record: Record, other: Record) -> Record:
    """The same, where the kernel's rows were not captured."""
    return replace(other_group(record, other), physical=None)


def flipped_indexer(record: Record, other: Record) -> Record:
    """The indexer rotated with the main attention's layout; its own scores and top-k follow, attention is right."""
    assert record.indexer is not None
    flipped = replace(record.indexer, rope=replace(record.indexer.rope, layout=RopeLayout.NEOX))
    return replace(record, indexer_scores=indexer_scores(record, flipped))


FAULTS = (
    Fault("page order permuted", GQA, page_order, None, ""),
    Fault(
        "one page holds another's content",
        GQA,
        swapped_page,
        Stage.IDENTITY,
        "tokens [48, 64) is not what was captured: it holds what tokens [64, 80) held",
    ),
    Fault(
        "one key rotated for a wrong position", Shape(), wrong_rotation, Stage.IDENTITY, "is rotated for position 57"
    ),
    Fault(
        "k cast through q's dtype",
        Shape(q_dtype=torch.bfloat16, k_state=RopeState.PRE),
        cast_through_q,
        Stage.ATTENTION,
        "cached keys cast through q's dtype (bfloat16) after the rotation",
    ),
    Fault("base-2 LSE from one rank", GQA, base_two_rank, Stage.ATTENTION, "rank 1's LSE is log2(e) times"),
    Fault("one context-parallel owner changed", GQA, changed_owner, None, ""),
    Fault("prefix altered under the same key", GQA, altered_prefix, Stage.IDENTITY, "row 0, key 'prefix-a'"),
    Fault("newest key dropped", Shape(), dropped_key, Stage.ATTENTION, "the newest key is not attended to"),
    Fault(
        "scale off by the RoPE dimensions", MLA, wrong_scale, Stage.ATTENTION, "scale without the 16 RoPE dimensions"
    ),
    Fault("selection of another group", MLA, other_group, Stage.SELECTION, "it read the selection of index group 1"),
    Fault(
        "selection of another group, rows unseen",
        MLA,
        other_group_unseen,
        Stage.ATTENTION,
        "reproduced by: the selection of index group 1",
    ),
    Fault("indexer RoPE layout flipped", MLA, flipped_indexer, Stage.INDEXER_SCORES, "RoPE layout neox instead of"),
)
