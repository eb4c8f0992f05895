"""A fault of Triton's interpreter (seen in 3.9) that vLLM's kernels meet, and a cure that GPUs do not need."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


@contextmanager
def scalar_conditions_as_masks() -> Iterator[None]:
    """Let a kernel use a scalar comparison in the mask of a block.

    The interpreter labels the result of a comparison with the type of its operands, and goes by the label when it
    spreads the scalar over a block: the mask becomes int32, which its loads refuse.
    """
    original = InterpreterBuilder.create_splat

    def create_splat(self: InterpreterBuilder, block_type: Any, scalar: TensorHandle) -> TensorHandle:
        if scalar.data.dtype == bool:
            scalar = TensorHandle(scalar.data, tl.int1)
        return original(self, block_type, scalar)

    InterpreterBuilder.create_splat = create_splat
    try:
        yield
    finally:
        InterpreterBuilder.create_splat = original
