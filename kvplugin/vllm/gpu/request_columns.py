"""What is known of a batch's requests, in device memory: prompt length, arm, stable prefix and key of each."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class RequestColumns(NamedTuple):
    """int32 ``[R]`` each, in the order of the batch."""

    prompts: Tensor
    arms: Tensor
    prefixes: Tensor
    keys: Tensor

    def after(self, first: int) -> RequestColumns:
        """The columns of a micro-batch that begins at request ``first``."""
        return RequestColumns(*(column[first:] for column in self))


class RequestMemory:
    """Columns for the largest batch at fixed addresses, copied to the device where they change.

    Args:
        capacity: requests of the largest batch.
        device: of the columns.
    """

    def __init__(self, capacity: int, device: torch.device) -> None:
        self._device = torch.zeros(4, capacity, dtype=torch.int32, device=device)
        self._known = np.zeros((4, 0), dtype=np.int32)
        self.columns = RequestColumns(*self._device)

    def renew(self, prompts: np.ndarray, arms: np.ndarray, prefixes: np.ndarray, keys: np.ndarray) -> None:
        """Put other requests in place, on the current stream; does nothing for those that are there already."""
        found = np.stack((prompts, arms, prefixes, keys)).astype(np.int32, copy=False)
        if np.array_equal(found, self._known):
            return
        self._known = found
        host = torch.from_numpy(found)
        if self._device.is_cuda:
            # The caching host allocator keeps the page until the copy has run: the next step may come before that.
            host = host.pin_memory()
        self._device[:, : found.shape[1]].copy_(host, non_blocking=True)
