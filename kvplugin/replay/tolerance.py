"""How far two honest computations of the same quantity may lie apart. Stated here and nowhere else.

The constants are justified in ``tests/replay/test_replay_tolerance.py``: over many shapes and seeds, the float32
results stay within them of the same computation in float64, and not by orders of magnitude.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EPS32 = torch.finfo(torch.float32).eps
LSE_ABSOLUTE = 1e-6
LSE_ULPS = 16
FP32_EPS = 4
FEW_TOKENS = 8
TOKENS_PER_ROUNDING = 16
HALF_EPS = 2


def lse_tolerance(lse: Tensor) -> Tensor:
    """``1e-6 + 16 ulp(max|lse|)``, ``[..., 1, Sq]``, for float32 log-sum-exps ``[..., Hq, Sq]``.

    The maximum is over the heads of one query token: with few tokens a head's logits can be large and their log-sum-exp
    near 0. Sixteen, not the design's eight: how a CPU's BLAS orders the 576 products of a latent logit decides, and on
    one kind of machine honest errors came to nine. Infinite ones allow nothing but equality.
    """
    size = _largest(lse)
    return LSE_ABSOLUTE + LSE_ULPS * (torch.nextafter(size, torch.full_like(size, torch.inf)) - size)


def out_tolerance(out: Tensor, lse: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Per row ``[..., 1, Sq, 1]`` of ``out`` ``[..., Hq, Sq, Dv]`` and ``lse`` ``[..., Hq, Sq]``.

    float32: ``max(4, max|lse|) eps max|out| sqrt(8 + tokens / 16)``. Logits round at their own magnitude, of which the
    log-sum-exp tells; that much stays however few ``tokens`` a query sees, and every token that is merged adds a
    rounding. The maxima are over the heads of one query token: a head whose values or logits cancel rounds no finer
    than its neighbours. Pages do not count: they hold the same tokens. bfloat16 and float16 round once more, at the
    end: ``2 eps(dtype) max|out|``, where that is larger.

    Args:
        tokens: int, broadcastable to the result; what each query sees.
    """
    largest = out.float().abs().amax((-3, -1), keepdim=True)
    single = (
        _largest(lse).unsqueeze(-1).clamp_min(FP32_EPS) * EPS32 * (FEW_TOKENS + tokens / TOKENS_PER_ROUNDING).sqrt()
    )
    return largest * (single if dtype is torch.float32 else single.clamp_min(_relative(dtype, 1)))


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


def _largest(lse: Tensor) -> Tensor:
    return lse.float().abs().nan_to_num(nan=0.0, posinf=0.0).amax(-2, keepdim=True)


def _relative(dtype: torch.dtype, terms: int) -> float:
    if dtype is torch.float32:
        return FP32_EPS * EPS32 * math.sqrt(terms)
    return HALF_EPS * torch.finfo(dtype).eps
