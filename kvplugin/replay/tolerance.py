"""How far two honest computations of the same quantity may lie apart. Stated here and nowhere else.

The constants are justified in ``tests/replay/test_tolerance.py``: over many shapes and seeds, the float32 results stay
within them of the same computation in float64, and not by orders of magnitude.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EPS32 = torch.finfo(torch.float32).eps
LSE_ABSOLUTE = 1e-6
LSE_ULPS = 8
FP32_EPS = 4
HALF_EPS = 2


def lse_tolerance(lse: Tensor) -> Tensor:
    """``1e-6 + 8 ulp(|lse|)`` for float32 log-sum-exps; infinite ones allow nothing but equality."""
    size = lse.float().abs().nan_to_num(nan=0.0, posinf=0.0)
    return LSE_ABSOLUTE + LSE_ULPS * (torch.nextafter(size, torch.full_like(size, torch.inf)) - size)


def out_tolerance(out: Tensor, lse: Tensor, blocks: int, dtype: torch.dtype) -> Tensor:
    """Per row and head ``[..., Hq, Sq, 1]`` of ``out`` ``[..., Hq, Sq, Dv]`` and ``lse`` ``[..., Hq, Sq]``.

    ``max|out|`` is over the heads of one query token: a head whose values cancel rounds no finer than its neighbours.
    float32: ``max(4, |lse|) eps max|out| sqrt(blocks)``: every merged block adds a rounding, and logits round at their
    own magnitude, of which the log-sum-exp tells. bfloat16 and float16 round once more, at the end: ``2 eps(dtype)
    max|out|``, where that is larger.
    """
    largest = out.float().abs().amax((-3, -1), keepdim=True)
    size = lse.float().abs().nan_to_num(nan=0.0, posinf=0.0).unsqueeze(-1).clamp_min(FP32_EPS)
    single = size * EPS32 * math.sqrt(blocks)
    return largest * (single if dtype is torch.float32 else single.clamp_min(_relative(dtype, blocks)))


def log_prob_tolerance(logits: Tensor, hidden: int, dtype: torch.dtype) -> Tensor:
    """Per token ``[...]``: the output's rule over the hidden size, scaled by the largest ``|logit|`` (``[..., V]``)."""
    return logits.float().abs().amax(-1) * _relative(dtype, hidden)


def score_tolerance(scores: Tensor, terms: int) -> Tensor:
    """Per row ``[..., 1]`` of indexer scores ``[..., L]``: float32 sums of ``terms`` products."""
    finite = scores.float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return finite.abs().amax(-1, keepdim=True) * _relative(torch.float32, terms)


def storage_tolerance(cached: Tensor, dtype: torch.dtype) -> Tensor:
    """Per token and head ``[..., 1]`` of cached elements ``[..., D]``: rounding to the cache's dtype."""
    return cached.float().abs().amax(-1, keepdim=True) * _relative(dtype, 1)


def _relative(dtype: torch.dtype, terms: int) -> float:
    if dtype is torch.float32:
        return FP32_EPS * EPS32 * math.sqrt(terms)
    return HALF_EPS * torch.finfo(dtype).eps
