"""One request from its pages: the full-prefill result and the partial state of every logical block, in two passes.

The keys' pass and the values' pass read each page once, a window at a time, so that memory stays near the size of the
logits. A logit is the product of one query and one key, whatever form reads it, so both results share the logits, and
one product reads the values for both. Their softmaxes have nothing in common: the full prefill's is over the whole
sequence, a block's over that block alone.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvplugin.replay.inputs import ReplayInputs
from kvplugin.replay.merge import shift
from kvplugin.replay.reconstruct import Request, attended_keys, float_query, windows
from kvplugin.replay.reference import Attention
from kvplugin.replay.visibility import visible_tokens


class RequestStates(NamedTuple):
    """What one request's pages give.

    Attributes:
        prefill: float32 ``[Hq, Sq, Dv]`` and ``[Hq, Sq]``.
        blocks: float32 ``[blocks, Hq, Sq, Dv]`` and ``[blocks, Hq, Sq]``.
        seen: bool ``[Sq, blocks]``, blocks with a token that the query sees.
        tokens: int64 ``[Sq]``, tokens that the query sees.
        finite: whether all products with keys and values were; a NaN or an infinity in any of them makes one that is
            not, seen by a query or not (its weight is then 0, and 0 times either is NaN).
    """

    prefill: Attention
    blocks: Attention
    seen: Tensor
    tokens: Tensor
    finite: bool


def attend(inputs: ReplayInputs, request: Request) -> RequestStates:
    """Run both passes over one request's pages."""
    page, blocks = inputs.pool.page_size, len(request.pages)
    visible = visible_tokens(inputs, request)
    queries = len(visible)
    padded = torch.zeros(queries, blocks * page, dtype=torch.bool, device=visible.device)
    padded[:, : request.length] = visible
    logits = _logits(inputs, request)
    finite = bool(torch.isfinite(logits.sum()))
    if not bool(padded.all()):  # one read of the device spares a pass over the logits of a dense decode step
        logits.view(len(logits), -1, queries, blocks * page).masked_fill_(~padded, -torch.inf)
    by_block = logits.view(*logits.shape[:2], blocks, page).transpose(1, 2)
    # [Hkv, blocks, 2, G * Sq, page]: shares of the block's largest logit, and of the sequence's.
    block_largest, largest = by_block.amax(-1), logits.amax(-1)
    both = torch.stack([block_largest, largest.unsqueeze(1).expand_as(block_largest)], dim=2)
    shares = (by_block.unsqueeze(2) - shift(both).unsqueeze(-1)).exp_()
    totals = shares.sum(-1)
    block_out, out = _weighted_values(inputs, request, shares.flatten(2, 3))
    finite = finite and bool(torch.isfinite(block_out.sum() + out.sum()))
    block_states = _state(block_out, block_largest.transpose(0, 1), totals[:, :, 0].transpose(0, 1))
    prefill = _state(out, largest, totals[:, :, 1].sum(1))
    shape = inputs.q.shape[1:3]
    return RequestStates(
        Attention(prefill.out.reshape(*shape, -1), prefill.lse.reshape(shape)),
        Attention(block_states.out.reshape(blocks, *shape, -1), block_states.lse.reshape(blocks, *shape)),
        padded.view(queries, blocks, page).any(-1),
        visible.sum(-1),
        finite,
    )


def _state(out: Tensor, largest: Tensor, total: Tensor) -> Attention:
    """Normalise ``out`` in place; what saw nothing (largest -inf, total 0) gives 0 and -inf."""
    return Attention(out.div_(total.masked_fill(total == 0, 1.0).unsqueeze(-1)), largest + total.log())


def _logits(inputs: ReplayInputs, request: Request) -> Tensor:
    """Scaled logits of the whole sequence ``[Hkv, G * Sq, blocks * page]``; 0 past the last token."""
    page = inputs.pool.page_size
    query = float_query(inputs, request.row).reshape(inputs.pool.kv_heads, -1, inputs.q.shape[-1])
    logits = query.new_empty(*query.shape[:2], len(request.pages) * page)
    held = _HeldWindow(page)
    for window in windows(inputs.pool.keys, request):
        keys = held.by_head(attended_keys(inputs, window.raw, request.positions[window.start : window.stop]))
        logits[..., window.start : window.start + keys.shape[1]] = query @ keys.transpose(1, 2)
    return logits.mul_(inputs.scale)


def _weighted_values(inputs: ReplayInputs, request: Request, shares: Tensor) -> tuple[Tensor, Tensor]:
    """Values under ``shares`` ``[Hkv, blocks, 2 * N, page]``: by block with the first N, of all blocks with the rest.

    Returns:
        float32 ``[blocks, Hkv, N, Dv]`` and ``[Hkv, N, Dv]``.
    """
    pool = inputs.pool
    heads, blocks, rows, page = shares.shape
    block_out = shares.new_empty(blocks, heads, rows // 2, pool.value_dim)
    out = shares.new_zeros(heads, rows // 2, pool.value_dim)
    held = _HeldWindow(page)
    for window in windows(pool.keys if pool.values is None else pool.values, request):
        values = held.by_head(pool.decode_values(window.raw)).view(heads, -1, page, pool.value_dim)
        within = slice(window.start // page, window.start // page + values.shape[1])
        product = shares[:, within] @ values
        block_out[within] = product[:, :, : rows // 2].transpose(0, 1)
        out += product[:, :, rows // 2 :].sum(1)
    return block_out, out


class _HeldWindow:
    """Room for one window in float32, used again and again: fresh memory would cost more than the copy into it."""

    def __init__(self, page: int) -> None:
        self._page = page
        self._room = torch.empty(0)

    def by_head(self, tokens: Tensor) -> Tensor:
        """Tokens ``[T, Hkv, D]`` as contiguous ``[Hkv, T, D]``, filled with zeros to whole pages."""
        count, heads, dim = tokens.shape
        shape = (heads, -(-count // self._page) * self._page, dim)
        if self._room.shape != shape:
            self._room = torch.empty(shape, device=tokens.device)
        self._room[:, :count] = tokens.transpose(0, 1)
        self._room[:, count:] = 0
        return self._room
