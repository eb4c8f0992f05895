"""Several ranks: prefill rows dealt out over tensor parallelism, KV tokens dealt out over context parallelism."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from typing import Any

import pytest
import torch
from batches import Batch, Request, Row
from expected import assert_counted, assert_selected, counted, expected
from kernels import Layout, row_scores
from requests_known import tell_prompts
from rig import POLICY, Rig
from standins import Ranks
from torch import Tensor

pytestmark = pytest.mark.usefixtures("gpu")

DECODES = (Request(1, 300, prompt=200), Request(2, 90, prompt=10))
MIXED = Batch((*DECODES, Request(4, 520, 24, prompt=600), Request(5, 18, 18, prompt=20)))
LIFTED = {**POLICY, "local_tokens": 28, "witness_blocks": 0}


def test_two_ranks_deal_out_prefill_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each selects its own rows; what both count together is what one rank alone would count."""
    from vllm.v1.attention.backends.mla import indexer

    if not hasattr(indexer, "balanced_prefill_row_shard"):
        pytest.skip("vLLM deals out no prefill rows before 0.32")
    # Few rows are enough here: a constant in 0.32, the fifth argument from 0.33 on.
    monkeypatch.setattr(indexer, "MIN_TP_SHARD_ROWS_PER_RANK", 4, raising=False)
    deal = indexer.balanced_prefill_row_shard
    fewest = (8,) if "min_rows" in signature(deal).parameters else ()
    monkeypatch.setattr(indexer, "balanced_prefill_row_shard", lambda *given, **_: deal(*given[:4], *fewest))
    rows = MIXED.rows
    wanted = expected(rows, POLICY, 128)
    sent: list[Tensor] = []
    total = torch.zeros_like(wanted.counters)
    for rank in range(2):
        group = Ranks(2, rank)
        group.others[0] = sent[0] if sent else None
        rig = Rig(tensor=group)
        tell_prompts(rig, MIXED)
        found = rig.step(MIXED)
        sent.append(group.sent[0])
        sizes = [len(part) for part in sent]
        assert 0 < sizes[-1] < len(rows) - len(DECODES), f"rank {rank} has {sizes[-1]} of the prefill rows"
        own = range(len(DECODES) + sum(sizes[:-1]), len(DECODES) + sum(sizes))
        for each in (range(len(DECODES)), own):
            assert_selected(found[each.start : each.stop], wanted.selections[each.start : each.stop])
        total += counted(rig.hook.counters)
    # The last rank has had the first one's rows from it: now the whole batch is there.
    assert_selected(found, wanted.selections)
    assert_counted(total, wanted.counters)


def test_ranks_that_compute_alike_are_counted_once() -> None:
    """Decode rows, and prefill rows that vLLM has not dealt out, are in the first rank's counters alone."""
    wanted = expected(MIXED.rows, POLICY, 128)
    for rank in range(2):
        rig = Rig(tensor=Ranks(2, rank))
        tell_prompts(rig, MIXED)
        assert_selected(rig.step(MIXED), wanted.selections)
        assert_counted(counted(rig.hook.counters), wanted.counters if rank == 0 else wanted.counters * 0)


@pytest.mark.parametrize("interleave", [1, 16])
@pytest.mark.parametrize(
    "batch",
    [
        Batch(DECODES),
        MIXED,
        Batch((Request(1, 301, 2, prompt=40), Request(2, 130, 2, prompt=40))),
    ],
    ids=["decode", "mixed", "next_n=2"],
)
def test_two_ranks_share_the_tokens_of_a_row(batch: Batch, interleave: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lifts the structural tokens that it has the scores of, so that vLLM's merge of both keeps them."""
    from vllm.model_executor.layers import sparse_attn_indexer

    merged: dict[int, list[tuple[float, int]]] = {}
    drafts = max(request.queries for request in batch.requests[:2]) - 1
    for rank in range(2):
        rig = Rig(
            LIFTED,
            placement="before_topk",
            drafts=drafts,
            context=Ranks(2, rank),
            interleave=interleave,
            cache_dtype="fp8_ds_mla",
        )
        tell_prompts(rig, batch)
        layout = Layout(size=2, rank=rank, interleave=interleave)

        def collect(
            logits: Tensor,
            indices: Tensor,
            k: int,
            dcp_rank: int,
            size: int,
            cp_interleave: int,
            row_starts: Tensor | None = None,
            layout: Layout = layout,
            buffer: Tensor = rig.buffer,
        ) -> None:
            first = indices.storage_offset() // buffer.stride(0)
            tokens = layout.tokens(1024)
            for row, chosen in enumerate(indices.tolist()):
                start = 0 if row_starts is None else int(row_starts[row])
                found = [(float(logits[row, start + local]), int(tokens[local])) for local in chosen if local >= 0]
                merged.setdefault(first + row, []).extend(found)

        monkeypatch.setattr(sparse_attn_indexer, "_merge_dcp_topk_global", collect)
        rig.select_only(batch)
    assert_merged(merged, batch.rows)


def assert_merged(candidates: dict[int, list[tuple[float, int]]], rows: Sequence[Row]) -> None:
    """The best of both ranks' candidates are what one rank with all scores would have selected."""
    wanted = expected(rows, LIFTED, 128)
    found = torch.full((len(rows), 128), -1, dtype=torch.int32)
    for number in range(len(rows)):
        best = sorted(candidates[number], key=lambda pair: (-pair[0], pair[1]))[:128]
        found[number, : len(best)] = torch.tensor([token for _, token in best], dtype=torch.int32)
        lifted = {token for score, token in best if score == float("inf")}
        plain = {token: score for score, token in best if score != float("inf")}
        scores = row_scores(rows[number].request.key, rows[number].position)
        assert all(plain[token] == float(scores[token]) for token in plain), f"row {number}: a score was changed"
        if rows[number].visible > 128:
            assert len(lifted) == 32, f"row {number}: {len(lifted)} lifted tokens"
    assert_selected(found, wanted.selections)


def test_policies_that_need_all_scores_stay_inactive_under_context_parallelism() -> None:
    rig: Any = Rig(context=Ranks(2, 0), cache_dtype="fp8_ds_mla")
    assert rig.hook is None
    assert rig.engine.state._outcome == "no_scores"
