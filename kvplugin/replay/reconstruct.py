"""From pages to logical order: slots, whole sequences, windows, appended tokens. Tensor operations only."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvplugin.replay.inputs import ReplayInputs
from kvplugin.replay.pages import KVPool
from kvplugin.replay.rope import RopeState, rotate

WINDOW_TOKENS = 512
"""Tokens gathered at once: 2 MiB of float32 at 8 heads of 128, so that a window stays in the CPU's cache."""
CHUNK_TOKENS = 16
"""Tokens per content digest; windows are whole chunks. Fixed, so that content identity does not depend on the page."""


class Request(NamedTuple):
    """One row of the batch in logical order.

    Attributes:
        row: row of the batch.
        length: cached tokens.
        pages: int64 ``[blocks]``, page of each logical block.
        positions: int64 ``[length]``, position of each cached token.
    """

    row: int
    length: int
    pages: Tensor
    positions: Tensor


class Window(NamedTuple):
    """Consecutive logical blocks: tokens ``[start, stop)``, and their raw cache elements ``[stop - start, ...]``."""

    start: int
    stop: int
    raw: Tensor


def logical_slots(block_table: Tensor, length: int, page_size: int) -> Tensor:
    """Flat slots of tokens ``0 … length - 1``: ``block_table[i // page] * page + i % page``.

    Args:
        block_table: int ``[M]``, one request's pages.

    Returns:
        int64 ``[length]``.
    """
    token = torch.arange(length, device=block_table.device)
    return block_table.long()[token // page_size] * page_size + token % page_size


def slot_positions(block_table: Tensor, kv_seq_lens: Tensor, pages: int, page_size: int, first: int = 0) -> Tensor:
    """``global_token_positions`` of a pool in which each request's token ``i`` is at position ``first + i``.

    Args:
        block_table: int ``[B, M]``.
        kv_seq_lens: int ``[B]``.
        pages: pages of the pool.

    Returns:
        int64 ``[pages, page_size]``; -1 where no request has a token.
    """
    found = torch.full((pages * page_size,), -1, device=block_table.device)
    for table, length in zip(block_table, kv_seq_lens.tolist(), strict=True):
        slots = logical_slots(table, length, page_size)
        found[slots] = torch.arange(first, first + length, device=found.device)
    return found.view(pages, page_size)


def requests(inputs: ReplayInputs) -> Iterator[Request]:
    """The rows of the batch; lengths come to the host in one read."""
    page = inputs.pool.page_size
    for row, length in enumerate(inputs.kv_seq_lens.tolist()):
        pages = inputs.block_table[row, : -(-length // page)].long()
        yield Request(row, length, pages, inputs.global_token_positions[pages].flatten()[:length].long())


def windows(elements: Tensor, request: Request) -> Iterator[Window]:
    """The request's tokens of a paged tensor ``[P, page, ...]``, a window at a time, in logical order."""
    page = elements.shape[1]
    whole = CHUNK_TOKENS // math.gcd(CHUNK_TOKENS, page)
    step = max(WINDOW_TOKENS // page // whole, 1) * whole
    for first in range(0, len(request.pages), step):
        start, stop = first * page, min((first + step) * page, request.length)
        raw = elements.index_select(0, request.pages[first : first + step]).flatten(0, 1)
        yield Window(start, stop, raw[: stop - start])


def attended_keys(inputs: ReplayInputs, raw: Tensor, positions: Tensor) -> Tensor:
    """Keys ``[T, Hkv, D]`` as attention sees them: decoded, rotated and rounded as the record says."""
    keys = inputs.pool.decode_keys(raw)
    if inputs.rope.k_state is RopeState.PRE:
        keys = rotate(keys, positions.unsqueeze(-1), inputs.rope).to(inputs.rope.k_dtype)
    return keys


def float_query(inputs: ReplayInputs, row: int) -> Tensor:
    """float32 query ``[Hq, Sq, D]`` as attention sees it."""
    query = inputs.q[row]
    if inputs.rope.q_state is RopeState.PRE:
        query = rotate(query, inputs.query_position_ids[row], inputs.rope).to(inputs.rope.q_dtype)
    return query.float()


def reconstruct(inputs: ReplayInputs, row: int) -> tuple[Tensor, Tensor]:
    """One request's keys and values in logical order, as attention sees them, whole.

    Returns:
        float32 ``[length, Hkv, D]`` and ``[length, Hkv, Dv]``.
    """
    pool = inputs.pool
    length = int(inputs.kv_seq_lens[row])
    slots = logical_slots(inputs.block_table[row], length, pool.page_size)
    positions = _rows(inputs.global_token_positions, slots)
    values = pool.keys if pool.values is None else pool.values
    keys = attended_keys(inputs, _rows(pool.keys, slots), positions).float()
    return keys, pool.decode_values(_rows(values, slots)).float()


def _rows(elements: Tensor, slots: Tensor) -> Tensor:
    # A view where the pool allows it; two indices otherwise, as a flattening copy of the pool would not fit.
    if elements.is_contiguous():
        return elements.flatten(0, 1).index_select(0, slots)
    return elements[slots // elements.shape[1], slots % elements.shape[1]]


def append(inputs: ReplayInputs, keys: Tensor, values: Tensor | None, positions: Tensor) -> ReplayInputs:
    """The inputs after the step's own tokens have been cached: append mode.

    Their slots are the next ones of each request. The pool given stays as it is; validation of the result checks that
    the block table had room.

    Args:
        keys: ``[B, Sq, ...]``, cache elements of the new tokens, in the pool's layout and dtype.
        values: the same for values; None for MLA.
        positions: int ``[B, Sq]``.
    """
    pool, page = inputs.pool, inputs.pool.page_size
    count = positions.shape[1]
    token = inputs.kv_seq_lens.long().unsqueeze(1) + torch.arange(count, device=positions.device)
    block = (token // page).clamp_max(inputs.block_table.shape[1] - 1)
    where = (inputs.block_table.long().gather(1, block), token % page)
    written = KVPool(
        pool.format,
        pool.keys.index_put(where, keys),
        pool.values if values is None or pool.values is None else pool.values.index_put(where, values),
        pool.latent_dim,
    )
    return replace(
        inputs,
        pool=written,
        kv_seq_lens=inputs.kv_seq_lens + count,
        global_token_positions=inputs.global_token_positions.index_put(
            where, positions.to(inputs.global_token_positions.dtype)
        ),
        key_position_ids=inputs.key_position_ids.index_put(where, positions.to(inputs.key_position_ids.dtype)),
    )
