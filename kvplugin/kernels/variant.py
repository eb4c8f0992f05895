"""A kernel with everything that fixes its machine code, so that it can be compiled, and looked at, without a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class KernelVariant:
    """One specialisation of a Triton kernel.

    Attributes:
        name: what distinguishes it, for reports and tests.
        kernel: the ``triton.jit`` function.
        signature: Triton type of each run-time argument (``i32``, ``*i64``, ...), by name.
        constexprs: value of each argument known at compile time, by name; pointers that are not given are None here.
        num_warps: warps per program.
        maxnreg: registers a thread may take; None = the compiler's choice.
    """

    name: str
    kernel: Any
    signature: dict[str, str]
    constexprs: dict[str, object]
    num_warps: int
    maxnreg: int | None = None
