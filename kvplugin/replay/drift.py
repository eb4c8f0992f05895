"""Differences between two tensors as statistics that survive JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor


class Drift(BaseModel):
    """Absolute differences over the active elements. Equal values, infinities of one sign included, differ by 0."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="what is compared with what")
    max: float = Field(description="largest absolute difference")
    mean: float = Field(description="mean absolute difference")
    p95: float = Field(description="95th percentile (nearest rank)")
    p99: float = Field(description="99th percentile (nearest rank)")
    active: int = Field(ge=0, description="elements compared")
    unmatched: int = Field(ge=0, description="elements that are infinite or NaN on one side only; in no other figure")
    over: int = Field(ge=0, description="elements beyond their tolerance, unmatched ones included")
    tolerance: float = Field(ge=0, description="tolerance where the difference exceeds it most, or comes closest to it")
    worst: dict[str, int] | None = Field(description="coordinates of that element")
    found: float | None = Field(description="its value on the first side; null if not finite")
    expected: float | None = Field(description="its value on the second side; null if not finite")

    @property
    def within(self) -> bool:
        """True where every element is inside its tolerance."""
        return self.over == 0


def measure(
    name: str,
    found: Tensor,
    expected: Tensor,
    tolerance: Tensor | float,
    axes: Sequence[str],
    *,
    active: Tensor | None = None,
    floor: float = 0.0,
    bitwise: bool = False,
) -> Drift:
    """Statistics of ``|found - expected|``.

    Args:
        found, expected: floating, one shape.
        tolerance: broadcastable to it; ``floor`` wins where it is larger.
        axes: name of each dimension.
        active: bool, broadcastable; which elements count. Default all.
        floor: an A/A floor.
        bitwise: equal bits or over, whatever the tolerance and the floor; both sides must have one dtype.
    """
    same = _same_bits(found, expected) if bitwise else found == expected
    a, b = found.double(), expected.double()
    difference = (a - b).abs().masked_fill(found == expected, 0.0)
    counted = torch.ones_like(same) if active is None else active.expand_as(same)
    unmatched = counted & ~torch.isfinite(difference)
    # Values so extreme that they leave no tolerance are judged without one.
    tolerance = torch.as_tensor(tolerance, dtype=torch.float64, device=a.device).nan_to_num(nan=0.0)
    limit = tolerance.expand_as(a).clamp_min(floor)
    over = counted & ~same if bitwise else unmatched | (counted & (difference > limit))
    finite = difference[counted & ~unmatched]
    worst = _worst(difference, torch.zeros_like(limit) if bitwise else limit, counted)
    return Drift(
        name=name,
        max=float(finite.max()) if finite.numel() else 0.0,
        mean=float(finite.mean()) if finite.numel() else 0.0,
        p95=_percentile(finite, 0.95),
        p99=_percentile(finite, 0.99),
        active=int(counted.sum()),
        unmatched=int(unmatched.sum()),
        over=int(over.sum()),
        tolerance=0.0 if bitwise or worst is None else float(limit[worst]),
        worst=None if worst is None else dict(zip(axes, worst, strict=True)),
        found=None if worst is None else _number(a[worst]),
        expected=None if worst is None else _number(b[worst]),
    )


def _same_bits(a: Tensor, b: Tensor) -> Tensor:
    integer = {2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return a.contiguous().view(integer) == b.contiguous().view(integer)


def _percentile(values: Tensor, share: float) -> float:
    return float(values.kthvalue(math.ceil(share * values.numel())).values) if values.numel() else 0.0


def _worst(difference: Tensor, limit: Tensor, counted: Tensor) -> tuple[int, ...] | None:
    """Coordinates of the element that exceeds its limit most, relatively; unmatched elements first."""
    if not bool(counted.any()):
        return None
    excess = difference / limit.clamp_min(torch.finfo(torch.float64).tiny)
    index = excess.masked_fill(~torch.isfinite(difference), torch.inf).masked_fill(~counted, -1.0).argmax()
    return tuple(int(axis) for axis in torch.unravel_index(index, difference.shape))


def _number(value: Tensor) -> float | None:
    return float(value) if bool(torch.isfinite(value)) else None
