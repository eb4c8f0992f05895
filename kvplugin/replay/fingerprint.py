"""Digests that say whether two runs had the same content, and whether they executed alike.

*Content* identity: positions, keys, values, RoPE state and dtypes of one request in logical order, whatever the page
size, the physical pages or their owners. *Execution* identity: page size, owners, merge order, backend. Every field
is length-prefixed before hashing, so that no two field lists hash the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import torch
from torch import Tensor

from kvplugin.replay.inputs import CompareSettings, ReplayInputs
from kvplugin.replay.reconstruct import CHUNK_TOKENS, Request, Window, requests, windows

DIGEST_BYTES = 16


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
def _hasher() -> ThreadPoolExecutor:
    """One thread: hashing releases the interpreter's lock, so a window is hashed while the next one is attended to."""
    return ThreadPoolExecutor(1, thread_name_prefix="kvplugin-replay-digest")


def _chunk_digests(data: memoryview, step: int) -> list[bytes]:
    return [hashlib.sha256(data[start : start + step]).digest() for start in range(0, len(data), step)]


class ContentDigest:
    """Digests of chunks of :data:`CHUNK_TOKENS` tokens, gathered while windows pass by (:class:`~.attention.Scan`).

    Attributes:
        prefix_length: tokens of the prefix whose own digest is wanted as well; 0 = none.
    """

    def __init__(self, inputs: ReplayInputs, request: Request, prefix_length: int = 0) -> None:
        self._inputs, self._request, self.prefix_length = inputs, request, prefix_length
        self._keys: list[Future[list[bytes]]] = []
        self._values: list[Future[list[bytes]]] = []
        self._tails: list[bytes] = []

    def keys(self, window: Window) -> None:
        """Add a window of keys."""
        self._add(self._keys, window)

    def values(self, window: Window) -> None:
        """Add a window of values."""
        self._add(self._values, window)

    def _add(self, windows: list[Future[list[bytes]]], window: Window) -> None:
        data = tensor_bytes(window.raw)
        token = len(data) // len(window.raw)
        if windows:
            windows[-1].result()  # one window waits at most: a long queue would hold the whole context in memory
        windows.append(_hasher().submit(_chunk_digests, data, CHUNK_TOKENS * token))
        tail = self.prefix_length % CHUNK_TOKENS
        start = self.prefix_length - tail - window.start
        if tail and 0 <= start < len(window.raw):
            self._tails.append(hashlib.sha256(data[start * token : (start + tail) * token]).digest())

    def _chunks(self) -> tuple[list[bytes], list[bytes]]:
        keys, values = ([each for done in side for each in done.result()] for side in (self._keys, self._values))
        return keys, values

    @property
    def chunks(self) -> list[str]:
        """One digest per chunk of tokens, keys and values together."""
        keys, values = self._chunks()
        pairs = zip(keys, values or [b""] * len(keys), strict=True)
        return [hashlib.sha256(key + value).hexdigest()[: 2 * DIGEST_BYTES] for key, value in pairs]

    def content(self) -> str:
        """The content fingerprint of the whole request."""
        keys, values = self._chunks()
        return self._digest(self._request.length, keys, values)

    def prefix(self) -> str:
        """The content fingerprint of the first ``prefix_length`` tokens."""
        whole = self.prefix_length // CHUNK_TOKENS
        keys, values = self._chunks()
        return self._digest(self.prefix_length, keys[:whole], values[:whole], self._tails)

    def _digest(self, length: int, *parts: Sequence[bytes]) -> str:
        pool, rope = self._inputs.pool, self._inputs.rope
        header = (
            "kvplugin.replay.content.1",
            length,
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
        positions = tensor_bytes(self._request.positions[:length])
        # Chunk digests have one size, so a side's can stand together as one field.
        return digest([*map(str, header), bytes(positions), *(b"".join(part) for part in parts)])


def content_digest(inputs: ReplayInputs, row: int, prefix_length: int = 0) -> ContentDigest:
    """Digest one request's pages without attending to them."""
    request = next(request for request in requests(inputs) if request.row == row)
    found = ContentDigest(inputs, request, prefix_length)
    for window in windows(inputs.pool.keys, request):
        found.keys(window)
    if inputs.pool.values is not None:
        for window in windows(inputs.pool.values, request):
            found.values(window)
    return found


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
