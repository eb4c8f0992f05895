"""Indexer scores and top-k on a CPU, independent of how a batch was cut."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_AT_ONCE = 256
"""Query rows per product: bounds the float64 temporary ``[rows, heads, tokens]``."""
COLUMN_MASK = 0x7FFFFFFF
OUTSIDE = torch.iinfo(torch.int64).min


def score_rows(queries: Tensor, weights: Tensor, keys: Tensor, out: Tensor) -> None:
    """Write ``sum_h w[t, h] · relu(q[t, h] · k[s])`` into ``out`` (float32 ``[T, >= S]``, columns 0 … S-1).

    The sums run in float64 and are rounded once: products of fp8 values are exact there, so a row's scores do not
    depend on batch composition or prefill chunks.

    Args:
        queries: float8_e4m3fn ``[T, H, D]``.
        weights: floating ``[T, H]``, scales folded in.
        keys: float64 ``[S, D]``.
    """
    for start in range(0, queries.shape[0], ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        dots = torch.relu_(torch.einsum("thd,sd->ths", queries[rows].double(), keys))
        out[rows, : keys.shape[0]] = torch.einsum("ths,th->ts", dots, weights[rows].double())


def topk_rows(scores: Tensor, row_lengths: Tensor, selection: Tensor) -> None:
    """Top-k of each row's first ``row_lengths[t]`` scores into ``selection``, -1 padded; ties go to the lower token.

    Args:
        scores: float32 ``[T, N]``; columns from ``row_lengths[t]`` on are garbage. NaN ranks highest, as in vLLM's
            kernels.
        row_lengths: int ``[T]``, at most N.
        selection: int32 ``[T, K]``, overwritten.
    """
    columns = torch.arange(scores.shape[1])
    bits = (scores + 0.0).view(torch.int32)  # -0.0 becomes 0.0, as ties at zero must go by token
    ordered = (bits ^ ((bits >> 31) & COLUMN_MASK)).long()
    keys = (ordered << 32) + (COLUMN_MASK - columns)  # unique: token order breaks ties
    keys.masked_fill_(columns >= row_lengths.unsqueeze(1), OUTSIDE)
    count = min(selection.shape[1], scores.shape[1])
    best = keys.topk(count, dim=1).values
    selection.fill_(-1)
    selection[:, :count] = torch.where(best == OUTSIDE, -1, COLUMN_MASK - (best & COLUMN_MASK))
