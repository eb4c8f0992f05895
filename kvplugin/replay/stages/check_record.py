"""Shapes and dtypes of the tensors that only one stage reads."""

from __future__ import annotations

import torch

from kvplugin.replay.capture.records import Record
from kvplugin.replay.pages import PageFormat
from kvplugin.replay.refuse import FLOAT_DTYPES, INDEX_DTYPES, Size, check_positive, check_tensor, refuse

FLOATS = (*FLOAT_DTYPES, torch.float8_e4m3fn)
SINGLE = (torch.float32,)


def check_record(record: Record) -> None:
    """Refuse a record whose side tensors do not fit its (validated) inputs.

    Raises:
        ArgumentError: naming the tensor, what it is and what it must be.
    """
    inputs = record.inputs
    queries, length = inputs.q.shape[2], int(inputs.kv_seq_lens[0])
    device = inputs.q.device
    for field, tensor, shape, dtypes in (
        ("selection_before", record.selection_before, (queries, "K"), INDEX_DTYPES),
        ("physical", record.physical, (queries, "K"), INDEX_DTYPES),
        ("page_ids", record.page_ids, (inputs.pool.keys.shape[0],), INDEX_DTYPES),
        ("indexer_scores", record.indexer_scores, (queries, length), SINGLE),
        ("log_probs", record.log_probs, (queries,), SINGLE),
        ("reference_log_probs", record.reference_log_probs, (queries,), SINGLE),
    ):
        if tensor is not None:
            check_tensor(field, tensor, shape, dtypes, device)
    if record.selection_before is not None:
        _check_range(record.selection_before, length)
    _check_indexer(record, queries, length)
    _check_fresh(record, length)


def _check_range(selection: torch.Tensor, length: int) -> None:
    outside = (selection < -1) | (selection >= length)
    if bool(outside.any()):
        refuse("selection_before", f"got {int(selection[outside][0])}", f"must be in [0, {length}), or -1")


def _check_indexer(record: Record, queries: int, length: int) -> None:
    indexer, device = record.indexer, record.inputs.q.device
    if indexer is None:
        return
    check_tensor("indexer_q", indexer.q, (queries, "Hi", "Di"), FLOATS, device)
    check_tensor("indexer_keys", indexer.keys, (length, indexer.q.shape[2]), FLOATS, device)
    check_tensor("indexer_weights", indexer.weights, (queries, indexer.q.shape[1]), FLOATS, device)
    check_positive("indexer_rope.theta", indexer.rope.theta)
    size = indexer.rope.rotary_dim
    if size < 2 or size % 2 or size > indexer.q.shape[2]:
        refuse("indexer_rope.rotary_dim", f"got {size}", f"must be even, and at most Di = {indexer.q.shape[2]}")


def _check_fresh(record: Record, length: int) -> None:
    fresh, pool, device = record.fresh, record.inputs.pool, record.inputs.q.device
    if fresh is None:
        return
    gqa = pool.format is PageFormat.GQA
    shape: tuple[Size, ...] = ("n", pool.kv_heads, pool.key_dim) if gqa else ("n", pool.key_dim)
    check_tensor("fresh_keys", fresh.keys, shape, FLOAT_DTYPES, device)
    tokens = len(fresh.keys)
    if tokens > length:
        refuse("fresh_keys", f"{tokens} tokens", f"must be the newest of the request's {length}")
    if gqa and fresh.values is None:
        refuse("fresh_values", "None", "must be given with fresh_keys")
    if fresh.values is not None:
        check_tensor("fresh_values", fresh.values, (tokens, pool.kv_heads, pool.value_dim), FLOAT_DTYPES, device)
