"""A kernel of no use that compiles fast."""

from __future__ import annotations

import triton
import triton.language as tl

from kvplugin.kernels.variant import KernelVariant


@triton.jit
def above_mean(values_ptr, above_ptr, WIDTH: tl.constexpr):  # noqa: N803
    slot = tl.arange(0, WIDTH)
    values = tl.load(values_ptr + slot)
    tl.store(above_ptr + slot, values - tl.sum(values, 0) // WIDTH)


def of_width(width: int) -> KernelVariant:
    """One warp, so a thread holds ``width / 32`` values at once."""
    signature = {"values_ptr": "*i32", "above_ptr": "*i32"}
    return KernelVariant(f"width {width}", above_mean, signature, {"WIDTH": width}, num_warps=1)


def variants() -> list[KernelVariant]:
    return [of_width(width) for width in (32, 64, 128)]
