"""``compare``: what it reports, once; strict mode, floors, bases, oracles."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch

from kvplugin.replay import (
    CompareSettings,
    Floor,
    IdentityError,
    LogProbHead,
    LseBase,
    MergeOracle,
    Observed,
    PrefixIdentity,
    compare,
    merge_states,
    prefix_fingerprint,
    transformer_engine_oracle,
)
from kvplugin.replay import compare as compare_function
from kvplugin.replay.compute import compute
from kvplugin.replay.merge import LOG2_E
from kvplugin.replay.oracle import MODULES
from kvplugin.replay.selftest.synthetic import Shape, make_inputs, observe

compare_module = sys.modules[compare_function.__module__]
SHAPE = Shape(length=40, queries=2, world=2)


def test_validates_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    honest = compare_module.validate  # type: ignore[attr-defined]
    monkeypatch.setattr(compare_module, "validate", lambda *a: (calls.append(a), honest(*a)))
    compare(make_inputs(SHAPE, batch=2), observe(make_inputs(SHAPE, batch=2)))
    assert len(calls) == 1


def test_merge_orders_keep_the_batch_and_query_dimensions() -> None:
    inputs = make_inputs(Shape(length=33, page=16, queries=2, world=2), batch=2)
    provenance = compare(inputs).report.provenance
    assert provenance.logical_merge_orders == [[[0, 1], [0, 1, 2]], [[0, 1], [0, 1]]]
    assert provenance.cp_block_owners == [[0, 1, 0], [0, 1]]
    assert provenance.page_size == 16


def test_an_honest_engine_is_within_tolerance() -> None:
    inputs = make_inputs(SHAPE, batch=2)
    report = compare(inputs, observe(inputs)).report
    assert report.within
    names = [drift.name for drift in report.drifts]
    assert names[:4] == [
        "out, replay vs prefill",
        "lse, replay vs prefill",
        "out, hierarchical vs flat",
        "lse, hierarchical vs flat",
    ]
    assert "rank 1 lse, engine vs replay" in names
    json.loads(report.model_dump_json(), parse_constant=pytest.fail)


def test_the_worst_element_is_named() -> None:
    inputs = make_inputs(SHAPE, batch=2)
    observed = observe(inputs)
    assert observed.out is not None
    observed.out[1, 3, 0, 7] += 1e-3
    drift = compare(inputs, observed).report.drift("out, engine vs replay")
    assert (drift.over, drift.worst) == (1, {"row": 1, "head": 3, "query": 0, "element": 7})
    assert drift.max == pytest.approx(1e-3, rel=1e-3)


def test_strict_asks_for_equal_bits() -> None:
    inputs = make_inputs(SHAPE)
    same = compute(inputs).flat
    strict = CompareSettings(strict=True, floor=Floor(out=1.0, lse=1.0))
    observed = Observed(same.out, same.lse, lse_base=LseBase.E)
    assert compare(inputs, observed, strict).report.within
    off = same.out.clone()
    off[0, 0, 0, 0] = torch.nextafter(off[0, 0, 0, 0], torch.tensor(torch.inf))
    found = compare(inputs, replace(observed, out=off), strict).report
    assert not found.within
    assert found.drift("out, engine vs replay").over == 1
    assert found.drift("lse, engine vs replay").within
    assert compare(inputs, replace(observed, out=off)).report.within


def test_a_floor_wins_where_it_is_larger() -> None:
    inputs = make_inputs(SHAPE)
    observed = observe(inputs)
    assert observed.out is not None
    far = replace(observed, out=observed.out + 1e-3)
    assert not compare(inputs, far).report.within
    assert compare(inputs, far, CompareSettings(floor=Floor(out=2e-3))).report.within


def test_base_two_is_fine_when_stated() -> None:
    inputs = make_inputs(SHAPE)
    observed = observe(inputs)
    assert observed.lse is not None
    assert observed.rank_lse is not None
    stated = replace(observed, lse=observed.lse * LOG2_E, rank_lse=observed.rank_lse * LOG2_E, lse_base=LseBase.TWO)
    assert compare(inputs, stated).report.within
    lied = compare(inputs, replace(stated, lse_base=LseBase.E)).report
    assert not lied.within
    assert lied.notes[0] == "the engine's LSE is log2(e) times the replay's, stated base e: wrong base"
    assert "1/log2(e)" in compare(inputs, replace(observed, lse_base=LseBase.TWO)).report.notes[0]


def test_log_probabilities_of_masked_targets_do_not_count() -> None:
    inputs = make_inputs(SHAPE)
    head = LogProbHead(torch.randn(9, 64), torch.tensor([[3, -7]]), torch.tensor([[True, False]]))
    drift = compare(replace(inputs, head=head)).report.drift("log-prob, replay vs prefill")
    assert drift.active == 1
    assert drift.within
    nothing = replace(head, mask=torch.zeros(1, 2, dtype=torch.bool))
    assert "log-prob" not in str(compare(replace(inputs, head=nothing)).report.drifts)


@pytest.mark.parametrize("length", [8, 16, 39])
def test_prefix_identity_is_content(length: int) -> None:
    inputs = make_inputs(SHAPE)
    fingerprint = prefix_fingerprint(inputs, 0, length)
    good = replace(inputs, prefixes=(PrefixIdentity("key", length, fingerprint),))
    compare(good)
    altered = inputs.pool.keys.clone()
    altered[inputs.block_table[0, 0], 3, 1, 2] += 0.5
    with pytest.raises(
        IdentityError, match=r"prefixes: row 0, key 'key': the \d+ cached tokens digest to .*; the prefix"
    ):
        compare(replace(good, pool=replace(good.pool, keys=altered)))


def fake_engine(correct_out: Any = None, correct_lse: Any = None) -> ModuleType:
    """A module with Transformer Engine's two functions, pairwise and in place as they are there."""
    module = ModuleType("fake")

    def flash_attn_fwd_softmax_lse_correction(softmax_lse: Any, softmax_lse_per_step: Any) -> None:
        softmax_lse.copy_(torch.logaddexp(softmax_lse, softmax_lse_per_step))

    def flash_attn_fwd_out_correction(
        out: Any, out_per_step: Any, softmax_lse: Any, softmax_lse_per_step: Any, seq_dim: Any
    ) -> None:
        assert out.shape[seq_dim] == softmax_lse.shape[-1]
        out.add_(out_per_step * (softmax_lse_per_step - softmax_lse).exp().movedim(2, seq_dim).unsqueeze(-1))

    module.flash_attn_fwd_softmax_lse_correction = correct_lse or flash_attn_fwd_softmax_lse_correction  # type: ignore[attr-defined]
    module.flash_attn_fwd_out_correction = correct_out or flash_attn_fwd_out_correction  # type: ignore[attr-defined]
    return module


def install(monkeypatch: pytest.MonkeyPatch, module: ModuleType | None, path: str = MODULES[0]) -> None:
    parts = path.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    monkeypatch.setitem(sys.modules, path, module)  # type: ignore[arg-type]


@pytest.mark.parametrize("path", MODULES)
def test_the_oracle_merges_with_transformer_engine(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    install(monkeypatch, fake_engine(), path)
    oracle = transformer_engine_oracle()
    assert oracle.reason == ""
    report = compare(make_inputs(Shape(length=300, queries=3)), oracles=(oracle,)).report
    assert report.within
    assert report.unavailable == []
    assert report.drift("out, transformer_engine merge vs replay").active == 3 * 4 * 16


def test_an_oracle_that_disagrees_is_drift() -> None:
    def wrong(out: torch.Tensor, lse: torch.Tensor) -> Any:
        good = merge_states(out, lse)
        return good._replace(out=good.out * 1.01)

    report = compare(make_inputs(SHAPE), oracles=(MergeOracle("other", wrong, ""),)).report
    assert not report.drift("out, other merge vs replay").within


def test_the_oracle_is_absent() -> None:
    oracle = transformer_engine_oracle()
    assert (oracle.merge, oracle.reason) == (None, "not installed")
    report = compare(make_inputs(SHAPE)).report
    assert report.within
    assert [(each.name, each.reason) for each in report.unavailable] == [("transformer_engine", "not installed")]


def renamed(out: Any, step: Any) -> None: ...


def off(softmax_lse: Any, softmax_lse_per_step: Any) -> None:
    softmax_lse.add_(softmax_lse_per_step)


def raising(softmax_lse: Any, softmax_lse_per_step: Any) -> None:
    raise RuntimeError("no kernel image")


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (ModuleType("empty"), "has no flash_attn_fwd_softmax_lse_correction"),
        (fake_engine(correct_out=renamed), "takes (out, step), expected (out, out_per_step, softmax_lse"),
        (fake_engine(correct_lse=off), "self-test is off by"),
        (fake_engine(correct_lse=raising), "self-test raised RuntimeError: no kernel image"),
    ],
)
def test_an_oracle_that_cannot_be_trusted(monkeypatch: pytest.MonkeyPatch, module: ModuleType, reason: str) -> None:
    install(monkeypatch, module)
    oracle = transformer_engine_oracle()
    assert oracle.merge is None
    assert reason in oracle.reason
    assert compare(make_inputs(SHAPE), oracles=(oracle,)).report.unavailable[0].reason == oracle.reason
