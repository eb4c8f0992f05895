"""Made-up captures of an honest engine, for the self-test, the benchmark and the tests.

The engine here is the dense float32 prefill, not the replay: what it reports differs from the replay by rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvplugin.replay.capture.records import Capture, FreshCache, Indexer, Record
from kvplugin.replay.compute import compute
from kvplugin.replay.fingerprint import content_digest
from kvplugin.replay.inputs import ContextParallel, LogProbHead, LseBase, Observed, PrefixIdentity, ReplayInputs
from kvplugin.replay.pages import KVPool
from kvplugin.replay.reconstruct import logical_slots, slot_positions
from kvplugin.replay.reference import full_prefill
from kvplugin.replay.rope import RopeLayout, RopeRecord, RopeState, rotate
from kvplugin.replay.stages.selection import indexer_scores

SPARE_PAGES = 3


@dataclass(frozen=True)
class Shape:
    """Size of one synthetic record; ``latent`` 0 makes it GQA, otherwise MLA with C = latent and R = rope."""

    length: int = 90
    page: int = 16
    queries: int = 1
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    latent: int = 0
    rope: int = 16
    world: int = 0
    topk: int = 0
    prefix: int = 0
    offset: int = 0
    dtype: torch.dtype = torch.float32
    q_dtype: torch.dtype = torch.float32
    k_state: RopeState = RopeState.POST
    layout: RopeLayout = RopeLayout.NEOX
    theta: float = 10000.0


def make_inputs(shape: Shape, seed: int = 0, batch: int = 1) -> ReplayInputs:
    """Random valid inputs: shuffled pages of one shared pool, requests of ``length, length - 1, …`` tokens."""
    generator = torch.Generator().manual_seed(seed)
    blocks = -(-shape.length // shape.page)
    count = batch * blocks + SPARE_PAGES
    dim = shape.latent + shape.rope if shape.latent else shape.dim
    rope = RopeRecord(
        theta=shape.theta,
        layout=shape.layout,
        rotary_dim=shape.rope if shape.latent else shape.dim,
        k_state=shape.k_state,
        q_dtype=shape.q_dtype,
        k_dtype=shape.dtype,
    )
    lengths = torch.tensor([max(shape.length - row, shape.queries) for row in range(batch)])
    table = torch.randperm(count, generator=generator)[: batch * blocks].view(batch, blocks)
    used = torch.arange(blocks) < -(-lengths.unsqueeze(1) // shape.page)
    positions = slot_positions(table, lengths, count, shape.page, first=shape.offset)
    query_positions = lengths.unsqueeze(1) - shape.queries + torch.arange(shape.queries) + shape.offset
    inputs = ReplayInputs(
        q=torch.randn(batch, shape.heads, shape.queries, dim, generator=generator).to(shape.q_dtype),
        pool=_pool(shape, count, generator),
        block_table=torch.where(used, table, -1),
        kv_seq_lens=lengths,
        cache_position=query_positions,
        query_position_ids=query_positions.clone(),
        global_token_positions=positions,
        key_position_ids=positions.clone(),
        rope=rope,
        scale=float((shape.dim if not shape.latent else shape.dim + shape.rope) ** -0.5),
    )
    if shape.world:
        owners = torch.where(used, torch.arange(blocks) % shape.world, -1)
        inputs = replace(inputs, context_parallel=ContextParallel(owners, shape.world))
    return inputs


def _pool(shape: Shape, pages: int, generator: torch.Generator) -> KVPool:
    def random(*size: int) -> Tensor:
        return torch.randn(pages, shape.page, *size, generator=generator).to(shape.dtype)

    if shape.latent:
        return KVPool.mla(random(shape.latent + shape.rope), shape.latent)
    return KVPool.gqa(random(shape.kv_heads, shape.dim), random(shape.kv_heads, shape.dim))


def observe(inputs: ReplayInputs, dtype: torch.dtype | None = None) -> Observed:
    """What an honest engine computes from these inputs: one dense softmax, and each rank's state if there are ranks."""
    dense = full_prefill(inputs)
    dtype = dtype or inputs.final_dtype
    ranks = compute(inputs).ranks
    return Observed(
        out=dense.out.to(dtype),
        lse=dense.lse,
        rank_out=None if ranks is None else ranks.out,
        rank_lse=None if ranks is None else ranks.lse,
        lse_base=LseBase.E,
    )


def make_record(shape: Shape, seed: int = 0, request: str = "r0", layer: int = 0, step: int = 0) -> Record:
    """One record with everything a record can have, from the indexer's inputs to log-probabilities."""
    inputs = make_inputs(shape, seed)
    generator = torch.Generator().manual_seed(seed + 1)
    record = Record(request, layer, step, inputs, index_group=layer, hidden_size=64, backend="synthetic")
    if shape.topk:
        record = _with_selection(record, shape, generator)
    if shape.prefix:
        fingerprint = content_digest(record.inputs, 0, shape.prefix).prefix()
        record = replace(
            record, inputs=replace(record.inputs, prefixes=(PrefixIdentity("prefix-a", shape.prefix, fingerprint),))
        )
    pool = inputs.pool
    slots = logical_slots(inputs.block_table[0], shape.length, pool.page_size)
    head = LogProbHead(
        torch.randn(32, shape.heads * pool.value_dim, generator=generator),
        torch.randint(32, (1, shape.queries), generator=generator),
        torch.ones(1, shape.queries, dtype=torch.bool),
    )
    record = replace(record, inputs=replace(record.inputs, head=head))
    digest = content_digest(record.inputs, 0)
    log_probs = -torch.rand(shape.queries, generator=generator) * 5
    return replace(
        record,
        observed=observe(record.inputs),
        fresh=FreshCache(
            pool.keys.flatten(0, 1)[slots], None if pool.values is None else pool.values.flatten(0, 1)[slots]
        ),
        log_probs=log_probs,
        reference_log_probs=log_probs.clone(),
        content=digest.content(),
        chunks=tuple(digest.chunks),
    )


def _with_selection(record: Record, shape: Shape, generator: torch.Generator) -> Record:
    """Indexer inputs (not yet rotated), its scores and top-k, and the rows a kernel would read."""
    inputs, heads, dim = record.inputs, 2, 8
    indexer = Indexer(
        torch.randn(shape.queries, heads, dim, generator=generator),
        torch.randn(shape.length, dim, generator=generator),
        torch.rand(shape.queries, heads, generator=generator),
        RopeRecord(shape.theta, RopeLayout.INTERLEAVED, dim, RopeState.PRE, RopeState.PRE),
    )
    scores = indexer_scores(record, indexer)
    best = scores.topk(shape.topk, dim=1)
    selection = torch.where(torch.isfinite(best.values), best.indices, -1)
    slots = logical_slots(inputs.block_table[0], shape.length, shape.page)
    physical = torch.where(selection >= 0, slots[selection.clamp_min(0)], -1)
    return replace(
        record,
        inputs=replace(inputs, selection=selection.unsqueeze(0)),
        selection_before=selection,
        physical=physical,
        indexer=indexer,
        indexer_scores=scores,
    )


def make_capture(shape: Shape, layers: int = 2, steps: int = 1, seed: int = 0) -> Capture:
    """A capture of one request, with its own content at every layer and step."""
    records = [
        make_record(shape, seed=seed + 100 * layer + step, layer=layer, step=step)
        for step in range(steps)
        for layer in range(layers)
    ]
    return Capture("synthetic engine", "random", tuple(records))


def rotated_keys(keys: Tensor, positions: Tensor, rope: RopeRecord) -> Tensor:
    """Cache elements ``[T, ..., D]`` rotated by ``positions`` (``[T]``), in their own dtype."""
    shaped = positions.view(-1, *[1] * (keys.dim() - 2))
    return rotate(keys, shaped, rope).to(keys.dtype)
