"""Row-wise pieces of sparse MLA on a CPU: cache writes, order of a selection, attention over selected rows."""

from __future__ import annotations

import torch
from torch import Tensor

ROWS_AT_ONCE = 64
"""Query rows per gather: bounds the temporary ``[rows, selected, C + R]``."""


def write_rows(values: Tensor, rows: Tensor, slots: Tensor, block_size: int, stride_rows: int) -> None:
    """Write values ``[T, D]`` to the flat cache ``rows`` (``[R, D]``); slots outside the cache are skipped."""
    count = min(len(slots), len(values))  # either may be padded
    slots = slots[:count].long()
    target = slots // block_size * stride_rows + slots % block_size
    valid = (slots >= 0) & (target < len(rows))
    rows[target[valid]] = values[:count][valid].to(rows.dtype)


def in_token_order(selection: Tensor) -> Tensor:
    """Each row in descending order, unused slots last.

    A selection is a set; in token order, sums over it do not depend on the top-k's order or on the page layout.
    """
    return selection.sort(dim=1, descending=True).values


def attend_rows(
    query: Tensor, rows: Tensor, physical: Tensor, scale: float, value_dim: int, lse: Tensor | None = None
) -> Tensor:
    """Softmax attention of each query over its selected cache rows, in float32.

    Args:
        query: floating ``[T, H, D]``.
        rows: floating ``[R, D]``; the first ``value_dim`` columns are the values.
        physical: int32 or int64 ``[T, K]``, -1 = unused, anywhere in the row.
        lse: float32 ``[T, H]``, written if given: log-sum-exp of each query's logits, -inf where it selects nothing.

    Returns:
        ``[T, H, value_dim]`` in the query's dtype; 0 for a row that selects nothing.
    """
    out = query.new_zeros(*query.shape[:2], value_dim)
    if lse is not None:
        lse.fill_(-torch.inf)
    for start in range(0, len(query), ROWS_AT_ONCE):
        part = slice(start, start + ROWS_AT_ONCE)
        columns = (physical[part] >= 0).any(0).nonzero()
        if len(columns) == 0:
            continue
        selected = physical[part, : int(columns[-1]) + 1]
        unused = (selected < 0).unsqueeze(1)
        cached = rows[selected.clamp_min(0)].float()
        logits = torch.einsum("thd,tkd->thk", query[part].float(), cached) * scale
        weights = logits.masked_fill_(unused, -torch.inf).softmax(-1).masked_fill_(unused, 0)
        if lse is not None:
            lse[part] = logits.logsumexp(-1)
        out[part] = torch.einsum("thk,tkd->thd", weights, cached[..., :value_dim]).to(query.dtype)
    return out
