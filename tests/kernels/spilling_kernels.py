"""A kernel that needs more values at once than the 255 registers of a thread hold."""

from __future__ import annotations

from small_kernels import of_width

from kvplugin.kernels.variant import KernelVariant


def variants() -> list[KernelVariant]:
    return [of_width(8192)]
