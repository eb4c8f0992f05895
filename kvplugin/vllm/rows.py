"""What an engine knows of the rows of one top-k call, beside their lengths."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

import torch
from torch import Tensor


@lru_cache(maxsize=1 << 16)
def request_key(name: str) -> int:
    """A key of a request, from 0 to 2**31 - 1, the same in every process."""
    return crc32(name.encode()) >> 1


class Rows(NamedTuple):
    """Per-row facts; None = the same for all.

    Attributes:
        phase: int8 ``[T]``, 0 prefill and 1 decode; None = decode.
        arm: int32 ``[T]``, row of the policy table; None = 0.
        prefix: int32 ``[T]``, tokens of the request's stable prefix; None = no row has one.
        live: bool ``[T]``; None = every row is live.
        request: int32 ``[T]``, a key that a request keeps as long as it runs; None = nobody knows.
    """

    phase: Tensor | None = None
    arm: Tensor | None = None
    prefix: Tensor | None = None
    live: Tensor | None = None
    request: Tensor | None = None

    def at(self, rows: slice) -> Rows:
        """The facts of some of the rows, as views."""
        return Rows(*(None if tensor is None else tensor[rows] for tensor in self))


class RowBuffers:
    """Memory for the facts of the largest batch, at fixed addresses; filled anew for each batch.

    Args:
        capacity: rows of the largest batch.
        device: of the rows.
    """

    def __init__(self, capacity: int, device: torch.device | str) -> None:
        self._phase = torch.ones(capacity, dtype=torch.int8, device=device)
        self._arm = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._prefix = torch.zeros(capacity, dtype=torch.int32, device=device)
        self._request = torch.zeros(capacity, dtype=torch.int32, device=device)

    def fill(
        self, phase: Tensor, row_request: Tensor, keys: Tensor, arms: Tensor | None, prefixes: Tensor | None
    ) -> Rows:
        """The facts of a batch, until the next one.

        Args:
            phase: int8 ``[T]``.
            row_request: int64 ``[T]``, request of each row.
            keys: int32 ``[R]``, by request.
            arms: int32 ``[R]``, by request; None = the engine has none.
            prefixes: int32 ``[R]``, by request; None = no request has a stable prefix.
        """
        count = len(phase)
        self._phase[:count].copy_(phase)
        return Rows(
            phase=self._phase[:count],
            arm=_by_row(arms, row_request, self._arm[:count]),
            prefix=_by_row(prefixes, row_request, self._prefix[:count]),
            request=_by_row(keys, row_request, self._request[:count]),
        )


def _by_row(by_request: Tensor | None, row_request: Tensor, out: Tensor) -> Tensor | None:
    return None if by_request is None else torch.index_select(by_request, 0, row_request, out=out)
