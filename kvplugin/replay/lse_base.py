"""Log-sum-exps in the wrong base, and how to name them."""

from __future__ import annotations

import torch
from torch import Tensor

from kvplugin.replay.inputs import LseBase
from kvplugin.replay.merge import LN_2, LOG2_E

RELATIVE = 1e-4
"""A constant ratio: drift moves single values by far less, and no two honest bases lie this near each other."""


def to_base_e(lse: Tensor, base: LseBase) -> Tensor:
    """``lse`` in base e."""
    return lse * LN_2 if base is LseBase.TWO else lse


def named_ratio(found: Tensor, expected: Tensor) -> str | None:
    """``"log2(e)"`` or ``"1/log2(e)"`` where ``found / expected`` is that constant everywhere, else None.

    Infinite values must be equal; log-sum-exps too near 0 to have a ratio are not counted.
    """
    finite = torch.isfinite(found) & torch.isfinite(expected)
    if not bool((finite | (found == expected)).all()):
        return None
    a, b = found[finite].double(), expected[finite].double()
    telling = b.abs() > 1e-3
    if not bool(telling.any()):
        return None
    for name, factor in (("log2(e)", LOG2_E), ("1/log2(e)", LN_2)):
        if bool(((a - b * factor).abs() <= RELATIVE * b.abs().clamp_min(1.0)).all()):
            return name
    return None
