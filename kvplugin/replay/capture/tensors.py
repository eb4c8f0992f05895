"""Between a record and its manifest entry: one table of roles, used in both directions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, fields, replace

from torch import Tensor

from kvplugin.replay.capture.manifest import DTYPES, NAMES, PrefixEntry, RecordEntry, Role, RopeEntry
from kvplugin.replay.capture.records import FreshCache, Indexer, Record
from kvplugin.replay.inputs import ContextParallel, Floor, LogProbHead, Observed, PrefixIdentity, ReplayInputs
from kvplugin.replay.pages import KVPool
from kvplugin.replay.rope import RopeRecord

DTYPE_FIELDS = ("q_dtype", "k_dtype")


def tensors_of(record: Record) -> dict[Role, Tensor]:
    """Every tensor that the record has."""
    inputs, observed = record.inputs, record.observed
    parallel, indexer, fresh, head = inputs.context_parallel, record.indexer, record.fresh, inputs.head
    found: dict[Role, Tensor | None] = {
        Role.Q: inputs.q,
        Role.BLOCK_TABLE: inputs.block_table,
        Role.KV_SEQ_LENS: inputs.kv_seq_lens,
        Role.CACHE_POSITION: inputs.cache_position,
        Role.QUERY_POSITION_IDS: inputs.query_position_ids,
        Role.GLOBAL_TOKEN_POSITIONS: inputs.global_token_positions,
        Role.KEY_POSITION_IDS: inputs.key_position_ids,
        Role.KEYS: inputs.pool.keys,
        Role.VALUES: inputs.pool.values,
        Role.PAGE_IDS: record.page_ids,
        Role.BLOCK_OWNERS: None if parallel is None else parallel.block_owners,
        Role.SELECTION: inputs.selection,
        Role.SELECTION_BEFORE: record.selection_before,
        Role.PHYSICAL: record.physical,
        Role.OUT: observed.out,
        Role.LSE: observed.lse,
        Role.RANK_OUT: observed.rank_out,
        Role.RANK_LSE: observed.rank_lse,
        Role.INDEXER_Q: None if indexer is None else indexer.q,
        Role.INDEXER_KEYS: None if indexer is None else indexer.keys,
        Role.INDEXER_WEIGHTS: None if indexer is None else indexer.weights,
        Role.INDEXER_SCORES: record.indexer_scores,
        Role.FRESH_KEYS: None if fresh is None else fresh.keys,
        Role.FRESH_VALUES: None if fresh is None else fresh.values,
        Role.LOG_PROBS: record.log_probs,
        Role.REFERENCE_LOG_PROBS: record.reference_log_probs,
        Role.HEAD_WEIGHT: None if head is None else head.weight,
        Role.HEAD_TARGETS: None if head is None else head.targets,
        Role.HEAD_MASK: None if head is None else head.mask,
    }
    return {role: tensor for role, tensor in found.items() if tensor is not None}


def record_from(entry: RecordEntry, tensors: Mapping[Role, Tensor]) -> Record:
    """The record of a manifest entry whose tensors have been read; groups of tensors must be complete."""
    get = tensors.get
    owners, head_weight = get(Role.BLOCK_OWNERS), get(Role.HEAD_WEIGHT)
    prefix = entry.prefix and PrefixIdentity(entry.prefix.key, entry.prefix.length, entry.prefix.fingerprint)
    inputs = ReplayInputs(
        q=tensors[Role.Q],
        pool=KVPool(entry.page_format, tensors[Role.KEYS], get(Role.VALUES), entry.latent_dim),
        block_table=tensors[Role.BLOCK_TABLE],
        kv_seq_lens=tensors[Role.KV_SEQ_LENS],
        cache_position=tensors[Role.CACHE_POSITION],
        query_position_ids=tensors[Role.QUERY_POSITION_IDS],
        global_token_positions=tensors[Role.GLOBAL_TOKEN_POSITIONS],
        key_position_ids=tensors[Role.KEY_POSITION_IDS],
        rope=rope_record(entry.rope),
        scale=entry.scale,
        prefixes=(prefix,) if prefix else (),
        context_parallel=None if owners is None else ContextParallel(owners, entry.cp_world_size or 0),
        selection=get(Role.SELECTION),
        head=None
        if head_weight is None
        else LogProbHead(head_weight, tensors[Role.HEAD_TARGETS], tensors[Role.HEAD_MASK]),
        out_dtype=DTYPES[entry.out_dtype] if entry.out_dtype else None,
    )
    return Record(
        request=entry.request,
        layer=entry.layer,
        step=entry.step,
        inputs=inputs,
        observed=Observed(get(Role.OUT), get(Role.LSE), get(Role.RANK_OUT), get(Role.RANK_LSE), entry.lse_base),
        index_group=entry.index_group,
        selection_before=get(Role.SELECTION_BEFORE),
        physical=get(Role.PHYSICAL),
        page_ids=get(Role.PAGE_IDS),
        indexer=_indexer(entry, tensors),
        indexer_scores=get(Role.INDEXER_SCORES),
        fresh=FreshCache(tensors[Role.FRESH_KEYS], get(Role.FRESH_VALUES)) if Role.FRESH_KEYS in tensors else None,
        log_probs=get(Role.LOG_PROBS),
        reference_log_probs=get(Role.REFERENCE_LOG_PROBS),
        hidden_size=entry.hidden_size,
        content=entry.content,
        chunks=tuple(entry.chunks),
        floor=Floor(**entry.floor.model_dump()),
        backend=entry.backend,
    )


def _indexer(entry: RecordEntry, tensors: Mapping[Role, Tensor]) -> Indexer | None:
    if Role.INDEXER_Q not in tensors or entry.indexer_rope is None:
        return None
    return Indexer(
        tensors[Role.INDEXER_Q],
        tensors[Role.INDEXER_KEYS],
        tensors[Role.INDEXER_WEIGHTS],
        rope_record(entry.indexer_rope),
    )


def rope_entry(record: RopeRecord) -> RopeEntry:
    """A RoPE record as the manifest spells it."""
    named = {name: NAMES[getattr(record, name)] for name in DTYPE_FIELDS}
    return RopeEntry(**{field.name: getattr(record, field.name) for field in fields(record)} | named)


def rope_record(entry: RopeEntry) -> RopeRecord:
    """The RoPE record of a manifest entry."""
    return RopeRecord(**entry.model_dump() | {name: DTYPES[getattr(entry, name)] for name in DTYPE_FIELDS})


def prefix_entry(record: Record) -> PrefixEntry | None:
    """A record's prefix identity as the manifest spells it."""
    prefix = record.inputs.prefixes[0] if record.inputs.prefixes else None
    return None if prefix is None else PrefixEntry(**asdict(prefix))


def own_pages(record: Record) -> Record:
    """The record with a pool of its own: the request's pages alone, in logical order, and a table that points there."""
    inputs = record.inputs
    table = inputs.block_table[0]
    pages = table[: -(-int(inputs.kv_seq_lens[0]) // inputs.pool.page_size)].long()
    local = table.new_full((1, len(table)), -1)
    local[0, : len(pages)] = table.new_tensor(range(len(pages)))
    pool, names = inputs.pool, record.page_ids
    values = None if pool.values is None else pool.values[pages].contiguous()
    return replace(
        record,
        page_ids=pages if names is None else names[pages],
        inputs=replace(
            inputs,
            pool=replace(pool, keys=pool.keys[pages].contiguous(), values=values),
            block_table=local,
            global_token_positions=inputs.global_token_positions[pages].contiguous(),
            key_position_ids=inputs.key_position_ids[pages].contiguous(),
        ),
    )
