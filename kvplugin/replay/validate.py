"""Validation of a comparison's inputs: everything once, before anything is computed."""

from __future__ import annotations

from torch import Tensor

from kvplugin.replay.errors import IdentityError
from kvplugin.replay.fingerprint import ContentDigest
from kvplugin.replay.inputs import CompareSettings, Observed, PrefixIdentity, ReplayInputs
from kvplugin.replay.reconstruct import Request, Window, windows
from kvplugin.replay.refuse import refuse
from kvplugin.replay.validate_shapes import (
    check_context_parallel,
    check_head,
    check_observed,
    check_pool,
    check_prefixes,
    check_queries,
    check_rope,
    check_settings,
)
from kvplugin.replay.validate_values import (
    check_finite,
    check_lengths,
    check_owners,
    check_pages,
    check_positions,
    check_selection,
    check_targets,
)


def validate(inputs: ReplayInputs, observed: Observed | None = None, settings: CompareSettings | None = None) -> None:
    """Check everything that can be known without reading the cached content.

    The content itself (finite values, prefix fingerprint) is checked by :class:`ContentScan` while it is read for the
    comparison, so that a long context is read once.

    Raises:
        ArgumentError: naming field, batch row, slot and value.
        IdentityError: the same, where the engine's bookkeeping contradicts itself.
    """
    check_pool(inputs.pool)
    check_queries(inputs)
    check_rope(inputs)
    check_prefixes(inputs.prefixes, len(inputs.q))
    check_lengths(inputs)
    check_pages(inputs)
    check_positions(inputs)
    check_finite("q", inputs.q, ("row", "head", "query", "element"))
    if inputs.context_parallel is not None:
        check_context_parallel(inputs.context_parallel, inputs)
        check_owners(inputs.context_parallel, inputs)
    if inputs.selection is not None:
        check_selection(inputs.selection, inputs)
    if inputs.head is not None:
        check_head(inputs.head, inputs)
        check_targets(inputs.head)
    if settings is not None:
        check_settings(settings, inputs)
    if observed is not None:
        check_observed(observed, inputs)
    for row, prefix in enumerate(inputs.prefixes):
        length = int(inputs.kv_seq_lens[row])
        if prefix is not None and prefix.length is not None and prefix.length > length:
            refuse("prefixes", f"row {row}: length {prefix.length}", f"must be at most the row's {length} tokens")


class ContentScan:
    """Reads a request's cached content on its way to attention: finite values, and digests where asked for."""

    def __init__(self, inputs: ReplayInputs, request: Request) -> None:
        self._pool, self._row = inputs.pool, request.row
        self.prefix: PrefixIdentity | None = inputs.prefixes[request.row] if inputs.prefixes else None
        self.digest = ContentDigest(inputs, request, (self.prefix and self.prefix.length) or 0)

    def keys(self, window: Window) -> None:
        """Check and digest a window of keys."""
        self._check("pool.keys", self._pool.decode_keys(window.raw), window)
        self.digest.keys(window)

    def values(self, window: Window) -> None:
        """Check and digest a window of values."""
        self._check("pool.values", window.raw, window)
        self.digest.values(window)

    def check_prefix(self) -> None:
        """Refuse a prefix whose cached content is not what its fingerprint says.

        Raises:
            IdentityError: naming row, key and both digests.
        """
        if self.prefix is None:
            return
        found = self.digest.prefix()
        if found != self.prefix.fingerprint:
            refuse(
                "prefixes",
                f"row {self._row}, key {self.prefix.key!r}: the {self.prefix.length} cached tokens digest to {found}",
                f"the prefix was stored as {self.prefix.fingerprint}; its content was altered or is another's",
                IdentityError,
            )

    def _check(self, field: str, tokens: Tensor, window: Window) -> None:
        check_finite(f"{field}, row {self._row}", tokens, ("token", "head", "element"), window.start)


def scan(inputs: ReplayInputs, request: Request) -> ContentScan:
    """Read a request's content for its checks alone."""
    found = ContentScan(inputs, request)
    for window in windows(inputs.pool.keys, request):
        found.keys(window)
    if inputs.pool.values is not None:
        for window in windows(inputs.pool.values, request):
            found.values(window)
    found.check_prefix()
    return found
