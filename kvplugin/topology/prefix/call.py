"""One checked call of the stable-prefix count."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class PrefixCall(NamedTuple):
    """Arguments of one ``count_into`` call; shapes, dtypes and devices can be trusted, values can not.

    Attributes:
        selection: int32 or int64 ``[T, K]``, logical indices, each at most once in a row; -1 = unused.
        row_lengths: int32 or int64 ``[T]``.
        row_prefix: int32 ``[T]``, tokens of each row's stable prefix; 0 or less = none.
        row_live: bool ``[T]`` or None (all live).
        row_phase: int8 ``[T]`` (0 prefill, 1 decode) or None (all decode); other values count as decode.
        row_arm: int32 ``[T]`` or None (all 0); rows of an unknown arm are left out.
        counting: int32 ``[arms]``, 1 for arms whose rows are counted.
        counters: int64 ``[arms, 2, len(PrefixCounter)]``, added to.
    """

    selection: Tensor
    row_lengths: Tensor
    row_prefix: Tensor
    row_live: Tensor | None
    row_phase: Tensor | None
    row_arm: Tensor | None
    counting: Tensor
    counters: Tensor
