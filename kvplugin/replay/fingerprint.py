"""Digests that say whether two runs had the same content, and whether they executed alike.

*Content* identity: positions, keys, values, RoPE state and dtypes of one request in logical order, whatever the page
size, the physical pages or their owners. *Execution* identity: page size, owners, merge order, backend. Every field
is length-prefixed before hashing, so that no two field lists hash the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kvplugin.replay.inputs import CompareSettings, ReplayInputs
from kvplugin.replay.reconstruct import CHUNK_TOKENS, Request, requests

DIGEST_BYTES = 16
MOST_THREADS = 8
LEAST_SHARE = 1024
"""Tokens that are worth a thread of their own."""


def digest(fields: Iterable[bytes | str | int | float]) -> str:
    """Hex digest of a list of fields, each preceded by its length."""
    state = hashlib.sha256()
    for field in fields:
        data = field if isinstance(field, bytes) else str(field).encode()
        state.update(len(data).to_bytes(8, "little"))
        state.update(data)
    return state.hexdigest()[: 2 * DIGEST_BYTES]


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The elements' bytes in logical order, on the host; no copy where they lie there already."""
    return tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data


@cache
def _hashers() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(MOST_THREADS, thread_name_prefix="kvplugin-replay-digest")


def _chunk_digests(sides: Sequence[_Tokens], length: int) -> list[bytes]:
    """The digest of each :data:`CHUNK_TOKENS` tokens, in logical order.

    Threads share the work, as many as torch has: hashing releases the interpreter's lock. The caller waits for them:
    torch's own threads suffer far more from others at their side than hashing meanwhile would win.
    """
    threads = min(torch.get_num_threads(), MOST_THREADS, -(-length // LEAST_SHARE))
    share = -(-length // (threads * CHUNK_TOKENS)) * CHUNK_TOKENS
    spans = [(start, min(start + share, length)) for start in range(0, length, share)]
    others = [_hashers().submit(_digests, sides, *span) for span in spans[1:]]
    return [*_digests(sides, *spans[0]), *(each for other in others for each in other.result())]


def _digests(sides: Sequence[_Tokens], start: int, stop: int) -> list[bytes]:
    """Chunks of tokens ``[start, stop)``: keys, then values, whose sizes the content's header gives away."""
    found = []
    for first in range(start, stop, CHUNK_TOKENS):
        state = hashlib.sha256()
        for side in sides:
            side.feed(state.update, first, min(first + CHUNK_TOKENS, stop))
        found.append(state.digest())
    return found


class _Tokens:
    """The bytes of one request's tokens in a paged tensor ``[P, page, ...]``, as they lie in the pages."""

    def __init__(self, elements: Tensor, pages: Tensor) -> None:
        self._page = elements.shape[1]
        self._size = elements[0, 0].numel() * elements.element_size()
        if elements.device.type == "cpu" and elements.is_contiguous():
            self._data, self._pages = tensor_bytes(elements), pages.tolist()
        else:
            self._data, self._pages = tensor_bytes(elements.index_select(0, pages)), list(range(len(pages)))

    def feed(self, update: Callable[[memoryview], None], token: int, stop: int) -> None:
        """Hand over tokens ``[token, stop)``, which may lie in part of a page or in several."""
        while token < stop:
            block, offset = divmod(token, self._page)
            end = min(self._page, offset + stop - token)
            base = self._pages[block] * self._page
            update(self._data[(base + offset) * self._size : (base + end) * self._size])
            token += end - offset


@dataclass(frozen=True)
class ContentDigest:
    """Digests of one request's content, chunk by chunk.

    Attributes:
        header: what the whole content has in common.
        positions: of its tokens, int64 ``[length]``.
        leaves: the chunks' digests.
        prefix_length: tokens of the prefix whose own digest is wanted as well; 0 = none.
        tail: digest of the prefix's last, partial chunk, if it has one.
    """

    header: tuple[str, ...]
    positions: Tensor
    leaves: list[bytes]
    prefix_length: int
    tail: list[bytes]

    @property
    def chunks(self) -> list[str]:
        """One digest per chunk of tokens, keys and values together."""
        return [leaf.hex()[: 2 * DIGEST_BYTES] for leaf in self.leaves]

    def content(self) -> str:
        """The content fingerprint of the whole request."""
        return self._digest(len(self.positions), self.leaves)

    def prefix(self) -> str:
        """The content fingerprint of the first ``prefix_length`` tokens."""
        return self._digest(self.prefix_length, self.leaves[: self.prefix_length // CHUNK_TOKENS] + self.tail)

    def _digest(self, length: int, leaves: Sequence[bytes]) -> str:
        positions = bytes(tensor_bytes(self.positions[:length]))
        # The chunks' digests have one size, so they can stand together as one field.
        return digest(["kvplugin.replay.content.2", length, *self.header, positions, b"".join(leaves)])


def request_digest(inputs: ReplayInputs, request: Request, prefix_length: int = 0) -> ContentDigest:
    """Digest one request's pages."""
    pool, rope = inputs.pool, inputs.rope
    sides = [_Tokens(side, request.pages) for side in (pool.keys, pool.values) if side is not None]
    whole = prefix_length // CHUNK_TOKENS * CHUNK_TOKENS
    leaves, tail = _chunk_digests(sides, request.length), _digests(sides, whole, prefix_length)
    header = (
        pool.format,
        pool.keys.dtype,
        "" if pool.values is None else pool.values.dtype,
        pool.kv_heads,
        pool.key_dim,
        pool.value_dim,
        rope.k_state,
        rope.k_dtype,
        rope.theta,
        rope.layout,
        rope.rotary_dim,
    )
    return ContentDigest(tuple(map(str, header)), request.positions, leaves, prefix_length, tail)


def content_digest(inputs: ReplayInputs, row: int, prefix_length: int = 0) -> ContentDigest:
    """Digest the pages of one row of the batch."""
    return request_digest(inputs, next(each for each in requests(inputs) if each.row == row), prefix_length)


def content_fingerprint(inputs: ReplayInputs, row: int) -> str:
    """Content identity of one request."""
    return content_digest(inputs, row).content()


def prefix_fingerprint(inputs: ReplayInputs, row: int, length: int) -> str:
    """Content identity of one request's first ``length`` tokens: what :class:`PrefixIdentity` must carry."""
    return content_digest(inputs, row, length).prefix()


def execution_fingerprint(
    settings: CompareSettings, page_size: int, owners: Sequence[int], merge_orders: Sequence[Sequence[int]]
) -> str:
    """Execution identity of one request.

    Args:
        page_size: tokens per page.
        owners: rank of each logical block; empty without context parallelism.
        merge_orders: ``[Sq][blocks]``, blocks in the order of their merge.
    """
    fields = ("kvplugin.replay.execution.1", page_size, settings.split_size, settings.backend, list(owners))
    return digest([*map(str, fields), *(str(list(order)) for order in merge_orders)])
