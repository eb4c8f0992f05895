"""A kernel that Triton refuses: its tile is no power of two."""

from __future__ import annotations

import triton
import triton.language as tl

from kvplugin.kernels.variant import KernelVariant


@triton.jit
def odd_tile(out_ptr):
    slot = tl.arange(0, 100)
    tl.store(out_ptr + slot, slot)


def variants() -> list[KernelVariant]:
    return [KernelVariant("broken", odd_tile, {"out_ptr": "*i32"}, {}, num_warps=1)]
