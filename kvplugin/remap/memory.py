"""Memory for results that replace each other."""

from __future__ import annotations

import torch
from torch import Tensor


class ReusedMemory:
    """Int32 memory that grows to the largest result asked of it, and is handed out again."""

    def __init__(self) -> None:
        self._elements: Tensor | None = None

    def of_shape(self, shape: tuple[int, ...], device: torch.device) -> Tensor:
        """A contiguous tensor that holds whatever it held last."""
        size = torch.Size(shape).numel()
        if self._elements is None or self._elements.numel() < size or self._elements.device != device:
            # A power of two, so that slowly growing batches do not move it each time.
            self._elements = torch.empty(1 << max(0, size - 1).bit_length(), dtype=torch.int32, device=device)
        return self._elements[:size].view(shape)
