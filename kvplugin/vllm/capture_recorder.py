"""Takes one request's part of one step, layer by layer, into records; of other requests it copies nothing."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvplugin.replay import (
    FreshCache,
    Indexer,
    KVPool,
    LseBase,
    Observed,
    Record,
    ReplayInputs,
    RopeRecord,
    slot_positions,
)
from kvplugin.vllm.capture_identity import EngineIdentity
from kvplugin.vllm.capture_target import TargetRows


class IndexerRows(NamedTuple):
    """What one indexer read and chose for captured rows.

    Attributes:
        queries: float8_e4m3fn ``[T, Hi, Di]``, their scales folded into the weights.
        weights: floating ``[T, Hi]``.
        scores: float32 ``[T, length]``.
        learned: int32 ``[T, K]``, the top-k before the policy.
    """

    queries: Tensor
    weights: Tensor
    scores: Tensor
    learned: Tensor


class LayerStep(NamedTuple):
    """What one layer's attention read and computed, for the whole batch.

    Attributes:
        layer: its number.
        query: floating ``[T, H, C + R]``, after the rotation.
        written: floating ``[T, C + R]``, what the layer has handed to its cache; None if it has not.
        cache: floating ``[blocks, page, C + R]``.
        block_table: int ``[R, M]``.
        selection: int32 ``[T, K]``, logical.
        physical: int32 ``[T, K]``, rows of the flat cache.
        stride_rows: rows of the flat cache from block to block.
        out: floating ``[T, H, C]``.
        lse: float32 ``[T, H]``, base e.
        scale: factor of the logits.
    """

    layer: int
    query: Tensor
    written: Tensor | None
    cache: Tensor
    block_table: Tensor
    selection: Tensor
    physical: Tensor
    stride_rows: int
    out: Tensor
    lse: Tensor
    scale: float


class _LastIndexer(NamedTuple):
    layer: int
    rows: IndexerRows
    keys: Tensor


class StepRecorder:
    """Sees the layers of one step in order. Everything it keeps is a copy: the engine goes on writing to its tensors.

    Attributes:
        target: the rows it keeps.
        records: one per wanted layer so far.
        left_out: layers whose pages would have gone past ``limit`` bytes.
    """

    def __init__(self, target: TargetRows, layers: Collection[int], identity: EngineIdentity, limit: int) -> None:
        self.target, self.records, self.left_out = target, list[Record](), list[int]()
        self._layers, self._identity = layers, identity
        self._room = limit
        self._indexer: _LastIndexer | None = None

    def within(self, rows: slice) -> slice | None:
        """The captured rows among ``rows`` of the batch, or None."""
        first, stop = max(rows.start, self.target.rows.start), min(rows.stop, self.target.rows.stop)
        return slice(first, stop) if first < stop else None

    def indexer(self, layer: int, rows: IndexerRows, keys: Tensor) -> None:
        """An indexer has chosen for captured rows; a long prefill's come in parts.

        Args:
            keys: floating ``[length, Di]``, dequantised, in logical order.
        """
        last = self._indexer
        if last is not None and last.layer == layer:
            rows = IndexerRows(*(torch.cat(pair) for pair in zip(last.rows, rows, strict=True)))
        self._indexer = _LastIndexer(layer, rows, keys)

    def attention(self, step: LayerStep) -> None:
        """A layer has attended."""
        if step.layer not in self._layers:
            return
        pages = -(-self.target.length // step.cache.shape[1])
        self._room -= pages * step.cache[0].nbytes
        if self._room < 0:
            self.left_out.append(step.layer)
        else:
            self.records.append(self._record(step, step.block_table[self.target.place, :pages].long()))

    def add_log_prob(self, log_prob: float) -> None:
        """The log-probability of the token sampled after the newest row; kept where that is the only row."""
        if self.records and self.records[-1].inputs.q.shape[2] == 1:
            self.records[-1] = replace(self.records[-1], log_probs=torch.tensor([log_prob]))

    def _record(self, step: LayerStep, pages: Tensor) -> Record:
        rows, rotation = self.target.rows, self._identity.rotations[step.layer]
        indexer = self._indexer
        leads = indexer is not None and indexer.layer == step.layer
        return Record(
            request=self.target.request,
            layer=step.layer,
            step=self.target.step,
            inputs=self._inputs(step, pages, rotation.attention),
            observed=Observed(
                out=_by_head(step.out[rows]), lse=step.lse[rows].t().unsqueeze(0).clone(), lse_base=LseBase.E
            ),
            index_group=None if indexer is None else indexer.layer,
            selection_before=None if indexer is None else indexer.rows.learned,
            physical=_page_rows(step.physical[rows], step),
            page_ids=pages,
            indexer=_indexer(indexer, rotation.indexer) if leads else None,
            indexer_scores=indexer.rows.scores if indexer is not None and leads else None,
            fresh=None if step.written is None else FreshCache(step.written[rows].clone()),
            hidden_size=self._identity.hidden_size,
            backend=self._identity.backend,
        )

    def _inputs(self, step: LayerStep, pages: Tensor, rope: RopeRecord) -> ReplayInputs:
        length, page = self.target.length, step.cache.shape[1]
        own = step.cache[pages]
        own.flatten(0, 1)[length:] = 0  # what the last page holds beyond the request may be another one's
        table = torch.arange(len(pages)).unsqueeze(0)
        slots = slot_positions(table, torch.tensor([length]), len(pages), page)
        positions = self.target.positions.unsqueeze(0)
        return ReplayInputs(
            q=_by_head(step.query[self.target.rows]),
            pool=KVPool.mla(own, step.out.shape[-1]),
            block_table=table,
            kv_seq_lens=torch.tensor([length]),
            cache_position=positions,
            query_position_ids=positions,
            global_token_positions=slots,
            key_position_ids=slots,
            rope=replace(rope, k_dtype=own.dtype),
            scale=step.scale,
            selection=step.selection[self.target.rows].unsqueeze(0).clone(),
        )


def _by_head(rows: Tensor) -> Tensor:
    """``[T, H, D]`` as a copy ``[1, H, T, D]``."""
    return rows.transpose(0, 1).unsqueeze(0).clone()


def _indexer(last: _LastIndexer | None, rope: RopeRecord | None) -> Indexer | None:
    if last is None or rope is None:
        return None
    return Indexer(last.rows.queries, last.keys.float(), last.rows.weights.float(), rope)


def _page_rows(physical: Tensor, step: LayerStep) -> Tensor:
    """Rows of the flat cache as ``page * page_size + offset``; rows between two pages name a page past the cache."""
    page_size = step.cache.shape[1]
    rows = physical.long()
    page, offset = rows // step.stride_rows, rows % step.stride_rows
    page = torch.where(offset < page_size, page, step.cache.shape[0])
    return torch.where(rows < 0, -1, page * page_size + offset % page_size)
