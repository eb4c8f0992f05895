"""Full prefill: one dense softmax over a request's whole logical sequence. The oracle; obviously right, not fast."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvplugin.replay.inputs import ReplayInputs
from kvplugin.replay.reconstruct import float_query, reconstruct, requests
from kvplugin.replay.visibility import visible_tokens


class Attention(NamedTuple):
    """Output and log-sum-exp (base e): ``[..., Sq, Dv]`` and ``[..., Sq]``."""

    out: Tensor
    lse: Tensor


def full_prefill(inputs: ReplayInputs, dtype: torch.dtype = torch.float32) -> Attention:
    """Attention of every query over its visible tokens.

    Args:
        dtype: of the arithmetic; float64 shows how exact the others are.

    Returns:
        ``[B, Hq, Sq, Dv]`` and ``[B, Hq, Sq]`` in ``dtype``; a query that sees nothing gives 0 and -inf.
    """
    rows = []
    for request in requests(inputs):
        keys, values = reconstruct(inputs, request.row)
        group = inputs.q.shape[1] // inputs.pool.kv_heads
        query = float_query(inputs, request.row).to(dtype)
        heads = keys.to(dtype).repeat_interleave(group, dim=1).transpose(0, 1)
        logits = (query @ heads.transpose(1, 2)) * inputs.scale
        logits = logits.masked_fill(~visible_tokens(inputs, request), -torch.inf)
        weights = logits.softmax(-1).nan_to_num(0.0)
        out = weights @ values.to(dtype).repeat_interleave(group, dim=1).transpose(0, 1)
        rows.append(Attention(out, logits.logsumexp(-1)))
    return Attention(torch.stack([row.out for row in rows]), torch.stack([row.lse for row in rows]))
