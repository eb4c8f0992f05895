"""Scores as vLLM hands them on: in another type, and above or below the policy's placement."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from batches import Batch, Request
from expected import assert_counted, assert_selected, counted, expected
from kernels import deep_select
from requests_known import tell_prompts
from rig import POLICY, Rig, use_dtype
from standins import BLACKWELL, LOG, card

pytestmark = pytest.mark.usefixtures("gpu")

BATCH = Batch((Request(1, 300, prompt=200), Request(2, 90, prompt=10), Request(3, 700, prompt=690)))
MIXED = Batch((*BATCH.requests, Request(4, 520, 20, prompt=600)))
VARLEN = Batch((Request(1, 300, 3, prompt=200), Request(2, 131, 1, prompt=10), Request(3, 700, 2, prompt=698)))


@pytest.fixture
def blackwell() -> Iterator[None]:
    with card(BLACKWELL):
        yield


@pytest.fixture
def bfloat16() -> Iterator[None]:
    use_dtype(torch.bfloat16)
    try:
        yield
    finally:
        use_dtype(torch.float32)


@pytest.mark.parametrize(("batch", "drafts"), [(MIXED, 0), (VARLEN, 2)], ids=["mixed", "varlen"])
@pytest.mark.usefixtures("blackwell")
def test_blackwell_flattens_rows(batch: Batch, drafts: int) -> None:
    """Requests with different numbers of queries decode together, one row each."""
    rig = Rig(drafts=drafts)
    tell_prompts(rig, batch)
    assert rig.indexer_builder.supports_varlen
    wanted = expected(batch.rows, POLICY, rig.width)
    assert_selected(rig.step(batch), wanted.selections)
    assert_counted(counted(rig.hook.counters), wanted.counters)


@pytest.mark.usefixtures("blackwell", "bfloat16")
def test_scores_in_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    """One top-k of vLLM's reads decode scores as they are; its others, and prefill, get them in float32."""
    from vllm.model_executor.layers import indexer_topk, sparse_attn_indexer

    if not hasattr(sparse_attn_indexer, "as_fp32_logits"):
        pytest.skip("scores are float32 before vLLM 0.33")
    monkeypatch.setattr(indexer_topk, "_HAS_DEEP_SELECT_C", True, raising=False)
    monkeypatch.setattr(indexer_topk, "is_deep_select_supported", lambda logits, topk: True, raising=False)
    monkeypatch.setattr(indexer_topk, "deep_select_topk", deep_select, raising=False)
    indexer_topk.get_indexer_topk.cache_clear()
    types = set()
    for backend in ("deep_select", "auto"):
        rig = Rig(backend=backend, options={"metrics": {"enabled": False}})
        tell_prompts(rig, MIXED)
        on_topk = rig.hook.on_topk

        def watched(scores: torch.Tensor, *args: Any, on_topk: Any = on_topk, **kwargs: Any) -> None:
            types.add(scores.dtype)
            on_topk(scores, *args, **kwargs)

        monkeypatch.setattr(rig.hook, "on_topk", watched)
        wanted = expected(MIXED.rows, POLICY, rig.width)
        assert_selected(rig.step(MIXED), wanted.selections)
        assert_counted(counted(rig.hook.counters), wanted.counters)
    assert types == {torch.bfloat16, torch.float32}


@pytest.mark.parametrize("batch", [BATCH, MIXED], ids=["decode", "mixed"])
def test_lifting_before_the_topk_selects_the_same(batch: Batch) -> None:
    rig = Rig(placement="before_topk")
    tell_prompts(rig, batch)
    assert_selected(rig.step(batch), expected(batch.rows, POLICY, rig.width).selections)
    first = LOG.index("policy")
    assert first < next(number for number, what in enumerate(LOG) if what.startswith("top-k") and number > 0), LOG
    assert int(counted(rig.hook.counters).sum()) == 0, "exact counters are of the other placement"
