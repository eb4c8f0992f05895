"""The tolerances' constants: honest float32 results stay inside them, measured against float64, and not by far."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from kvplugin.replay import LogProbHead, full_prefill
from kvplugin.replay.compute import compute
from kvplugin.replay.log_probs import selected_log_probs
from kvplugin.replay.selftest.synthetic import Shape, make_inputs
from kvplugin.replay.tolerance import (
    log_prob_tolerance,
    lse_tolerance,
    out_tolerance,
    score_tolerance,
    storage_tolerance,
)

SHAPES = [
    Shape(length=60, page=16, heads=8, kv_heads=2, dim=64, queries=2),
    Shape(length=1500, page=16, heads=4, kv_heads=1, dim=128),
    Shape(length=1500, page=64, heads=4, kv_heads=4, dim=64),
    Shape(length=900, page=64, heads=8, latent=128, rope=32),
]
FEW = [
    Shape(length=length, page=page, heads=16, kv_heads=1, dim=64, **kind)
    for length in (2, 5, 16, 30, 64)
    for page in (16, 64)
    for kind in ({}, {"latent": 512, "rope": 64})
]
"""Short requests in pages of either size: honest results differ by as much in both."""
SCALES = (0.3, 1.0, 3.0)
"""Times the usual scale: flat, usual and peaked softmax."""


def worst_shares(shape: Shape, factor: float, seed: int) -> tuple[float, float, float]:
    """Largest error as a share of the tolerance: output and log-sum-exp of the block replay against float64, and the
    output against another honest float32 computation."""
    inputs = make_inputs(shape, seed)
    inputs = replace(inputs, scale=inputs.scale * factor)
    exact, found, other = full_prefill(inputs, torch.float64), compute(inputs), full_prefill(inputs)
    tolerance = out_tolerance(exact.out, exact.lse, found.tokens, torch.float32)
    return (
        share(found.flat.out, exact.out, tolerance),
        share(found.flat.lse, exact.lse, lse_tolerance(exact.lse)),
        share(found.flat.out, other.out.double(), tolerance),
    )


def share(found: Tensor, exact: Tensor, tolerance: Tensor) -> float:
    return float(((found.double() - exact.double()).abs() / tolerance.double()).max())


@pytest.mark.parametrize("shape", SHAPES + FEW, ids=str)
def test_float32_errors_are_inside_and_not_far_inside(shape: Shape) -> None:
    shares = [worst_shares(shape, factor, seed) for factor in SCALES for seed in range(4)]
    out, lse, apart = (max(side) for side in zip(*shares, strict=True))
    # Errors of two honest runs are independent: 1 / sqrt(2) each leaves room for both.
    assert 0.02 < out < 0.7, f"output errors use {out:.3f} of the tolerance"
    assert 0.02 < lse < 0.7, f"log-sum-exp errors use {lse:.3f} of the tolerance"
    assert 0.02 < apart < 0.7, f"two honest outputs lie {apart:.3f} of the tolerance apart"


def test_the_page_size_changes_no_tolerance() -> None:
    """The same 30 tokens in two pages of 16 and in one of 64."""
    tolerances = []
    for page in (16, 64):
        inputs = make_inputs(Shape(length=30, page=page))
        found = compute(inputs)
        tolerances.append(out_tolerance(torch.ones(1, 4, 1, 16), torch.zeros(1, 4, 1), found.tokens, torch.float32))
    assert torch.equal(*tolerances)


def test_what_a_query_does_not_see_changes_no_tolerance() -> None:
    inputs = make_inputs(Shape(length=400, queries=2))
    selection = torch.full((1, 2, 64), -1)
    selection[0, 0, :3] = torch.tensor([7, 200, 11])
    selection[0, 1] = torch.arange(64)
    assert compute(replace(inputs, selection=selection)).tokens.flatten().tolist() == [3, 64]
    assert compute(inputs).tokens.flatten().tolist() == [399, 400]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    inputs = make_inputs(Shape(length=200, heads=8, dim=64))
    exact, found = full_prefill(inputs, torch.float64), compute(inputs).flat.out.to(dtype)
    used = share(found, exact.out, out_tolerance(exact.out, exact.lse, torch.tensor(200), dtype))
    assert 0.05 < used < 0.5, used


def test_log_probabilities() -> None:
    inputs = make_inputs(Shape(length=300, heads=8, kv_heads=2, dim=64))
    head = LogProbHead(torch.randn(200, 512), torch.tensor([[7]]), torch.ones(1, 1, dtype=torch.bool))
    exact = full_prefill(inputs, torch.float64).out.transpose(1, 2).flatten(2) @ head.weight.double().T
    found = selected_log_probs(compute(inputs).flat.out, head)
    tolerance = log_prob_tolerance(exact, 512, torch.float32)
    assert 0.0 < share(found.log_probs, exact.log_softmax(-1)[..., 7], tolerance) < 0.5


def test_a_tolerance_is_not_a_pass() -> None:
    """Each is a few roundings: a thousandth of the value is far outside."""
    x = torch.randn(1, 2, 3, 16)
    lse = torch.randn(1, 2, 3).abs() + 1
    assert (out_tolerance(x, lse, torch.tensor(256), torch.float32) < 1e-4 * x.abs().max()).all()
    assert (lse_tolerance(lse) < 1e-5 * lse).all()
    assert (score_tolerance(x, 256) < 1e-4 * x.abs().max()).all()
    assert (storage_tolerance(x, torch.float32) < 1e-5).all()
    assert (storage_tolerance(x, torch.bfloat16) <= 2 * 2**-7 * x.abs().max()).all()


def test_infinite_log_sum_exps_have_the_absolute_tolerance_alone() -> None:
    assert torch.isfinite(lse_tolerance(torch.tensor([[-torch.inf, torch.inf, torch.nan]]))).all()
