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
SCALES = (0.3, 1.0, 3.0)
"""Times the usual scale: flat, usual and peaked softmax."""


def worst_shares(shape: Shape, factor: float, seed: int) -> tuple[float, float]:
    """Largest error of the block replay as a share of the tolerance: output, log-sum-exp."""
    inputs = make_inputs(shape, seed)
    inputs = replace(inputs, scale=inputs.scale * factor)
    exact, found = full_prefill(inputs, torch.float64), compute(inputs)
    blocks = len(found.states[0].blocks.lse)
    out = share(found.flat.out, exact.out, out_tolerance(exact.out, exact.lse, blocks, torch.float32))
    return out, share(found.flat.lse, exact.lse, lse_tolerance(exact.lse))


def share(found: Tensor, exact: Tensor, tolerance: Tensor) -> float:
    return float(((found.double() - exact.double()).abs() / tolerance.double()).max())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_float32_errors_are_inside_and_not_far_inside(shape: Shape) -> None:
    shares = [worst_shares(shape, factor, seed) for factor in SCALES for seed in range(4)]
    out, lse = max(out for out, _ in shares), max(lse for _, lse in shares)
    # Errors of two honest runs are independent: 1 / sqrt(2) each leaves room for both.
    assert 0.02 < out < 0.7, f"output errors use {out:.3f} of the tolerance"
    assert 0.02 < lse < 0.7, f"log-sum-exp errors use {lse:.3f} of the tolerance"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once(dtype: torch.dtype) -> None:
    inputs = make_inputs(Shape(length=200, heads=8, dim=64))
    exact, found = full_prefill(inputs, torch.float64), compute(inputs).flat.out.to(dtype)
    used = share(found, exact.out, out_tolerance(exact.out, exact.lse, 13, dtype))
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
    assert (out_tolerance(x, lse, 16, torch.float32) < 1e-4 * x.abs().max()).all()
    assert (lse_tolerance(lse) < 1e-5 * lse).all()
    assert (score_tolerance(x, 256) < 1e-4 * x.abs().max()).all()
    assert (storage_tolerance(x, torch.float32) < 1e-5).all()
    assert (storage_tolerance(x, torch.bfloat16) <= 2 * 2**-7 * x.abs().max()).all()


def test_infinite_log_sum_exps_have_the_absolute_tolerance_alone() -> None:
    assert torch.isfinite(lse_tolerance(torch.tensor([-torch.inf, torch.inf, torch.nan]))).all()
