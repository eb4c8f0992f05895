"""One request from its pages: the full-prefill result and the partial state of every logical block, in two passes.

The keys' pass and the values' pass read each page once, a window at a time, so that memory stays near the size of the
logits. The two results share the float32 keys and values and nothing else: the full prefill multiplies whole windows
and takes one softmax over the sequence, a block's state comes from that block alone.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from kvplugin.replay.inputs import ReplayInputs
from kvplugin.replay.merge import shift
from kvplugin.replay.reconstruct import Request, Window, attended_keys, float_query, windows
from kvplugin.replay.reference import Attention
from kvplugin.replay.visibility import visible_tokens


class Scan(Protocol):
    """Looks at every raw window on its way: finiteness, content digests."""

    def keys(self, window: Window) -> None:
        """A window of the keys (of latents for MLA)."""

    def values(self, window: Window) -> None:
        """A window of the values; not called for MLA."""


class RequestStates(NamedTuple):
    """What one request's pages give.

    Attributes:
        prefill: float32 ``[Hq, Sq, Dv]`` and ``[Hq, Sq]``.
        blocks: float32 ``[blocks, Hq, Sq, Dv]`` and ``[blocks, Hq, Sq]``.
        seen: bool ``[Sq, blocks]``, blocks with a token that the query sees.
    """

    prefill: Attention
    blocks: Attention
    seen: Tensor


def attend(inputs: ReplayInputs, request: Request, scan: Scan | None = None) -> RequestStates:
    """Run both passes over one request's pages; ``scan`` sees each raw window before it is used."""
    page, length, blocks = inputs.pool.page_size, request.length, len(request.pages)
    visible = visible_tokens(inputs, request)
    padded = torch.zeros(len(visible), blocks * page, dtype=torch.bool, device=visible.device)
    padded[:, :length] = visible
    whole, by_block = _logits(inputs, request, scan)
    queries = len(visible)
    block_visible = padded.view(queries, blocks, page)
    if not bool(padded.all()):  # one read of the device spares two passes over the logits of a dense decode step
        whole.view(len(whole), -1, queries, length).masked_fill_(~visible, -torch.inf)
        grouped = by_block.view(len(whole), blocks, -1, queries, page)
        grouped.masked_fill_(~block_visible.transpose(0, 1).unsqueeze(1), -torch.inf)
    lse, block_lse = whole.logsumexp(-1), by_block.logsumexp(-1)
    # A row that sees nothing has no softmax; its weights are 0.
    whole = whole.softmax(-1).masked_fill_(torch.isneginf(lse).unsqueeze(-1), 0.0)
    by_block = by_block.sub_(shift(block_lse).unsqueeze(-1)).exp_()
    out, block_out = _weighted_values(inputs, request, whole, by_block, scan)
    shape = (inputs.q.shape[1], inputs.q.shape[2])
    return RequestStates(
        Attention(out.reshape(*shape, -1), lse.reshape(shape)),
        Attention(
            block_out.transpose(0, 1).reshape(blocks, *shape, -1), block_lse.transpose(0, 1).reshape(blocks, *shape)
        ),
        block_visible.any(-1),
    )


def _logits(inputs: ReplayInputs, request: Request, scan: Scan | None) -> tuple[Tensor, Tensor]:
    """Scaled logits of the whole sequence ``[Hkv, G * Sq, length]`` and by block ``[Hkv, blocks, G * Sq, page]``."""
    page, blocks = inputs.pool.page_size, len(request.pages)
    query = float_query(inputs, request.row).reshape(inputs.pool.kv_heads, -1, inputs.q.shape[-1])
    heads, rows, _ = query.shape
    whole = query.new_empty(heads, rows, request.length)
    by_block = query.new_empty(heads, blocks, rows, page)
    for window in windows(inputs.pool.keys, request):
        if scan is not None:
            scan.keys(window)
        keys = _by_head(attended_keys(inputs, window.raw, request.positions[window.start : window.stop]), page)
        tokens, held = _extent(window, page)
        whole[..., tokens] = (query @ keys.transpose(1, 2))[..., : window.stop - window.start]
        by_block[:, held] = query.unsqueeze(1) @ keys.view(heads, -1, page, keys.shape[-1]).transpose(2, 3)
    return whole.mul_(inputs.scale), by_block.mul_(inputs.scale)


def _weighted_values(
    inputs: ReplayInputs, request: Request, weights: Tensor, by_block: Tensor, scan: Scan | None
) -> tuple[Tensor, Tensor]:
    pool = inputs.pool
    heads, blocks, rows, page = by_block.shape
    out = weights.new_zeros(heads, rows, pool.value_dim)
    block_out = weights.new_empty(heads, blocks, rows, pool.value_dim)
    for window in windows(pool.keys if pool.values is None else pool.values, request):
        if scan is not None and pool.values is not None:
            scan.values(window)
        values = _by_head(pool.decode_values(window.raw), page)
        tokens, held = _extent(window, page)
        out += weights[..., tokens] @ values[:, : window.stop - window.start]
        block_out[:, held] = by_block[:, held] @ values.view(heads, -1, page, pool.value_dim)
    return out, block_out


def _by_head(tokens: Tensor, page: int) -> Tensor:
    """Tokens ``[T, Hkv, D]`` as contiguous float32 ``[Hkv, T, D]``, filled with zeros to whole pages."""
    count, heads, dim = tokens.shape
    by_head = torch.empty(heads, -(-count // page) * page, dim, device=tokens.device)
    by_head[:, :count] = tokens.transpose(0, 1)
    by_head[:, count:] = 0
    return by_head


def _extent(window: Window, page: int) -> tuple[slice, slice]:
    """Tokens and logical blocks of a window."""
    return slice(window.start, window.stop), slice(window.start // page, -(-window.stop // page))
