"""Validation of a comparison's inputs: everything once, before anything is computed."""

from __future__ import annotations

from kvplugin.replay.errors import IdentityError
from kvplugin.replay.fingerprint import ContentDigest
from kvplugin.replay.inputs import CompareSettings, Observed, PrefixIdentity, ReplayInputs
from kvplugin.replay.reconstruct import Request, windows
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

    The content itself is checked by :func:`check_content` and :func:`check_prefix`, with what a comparison has computed
    from it anyway.

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


def check_content(inputs: ReplayInputs, request: Request) -> None:
    """Refuse a cached element that is not finite; every element is looked at.

    Raises:
        ArgumentError: naming the first one's row, token and value.
    """
    pool, axes = inputs.pool, ("token", "head", "element")
    for window in windows(pool.keys, request):
        check_finite(f"pool.keys, row {request.row}", pool.decode_keys(window.raw), axes, window.start)
    if pool.values is not None:
        for window in windows(pool.values, request):
            check_finite(f"pool.values, row {request.row}", window.raw, axes, window.start)


def check_prefix(prefix: PrefixIdentity | None, row: int, found: ContentDigest) -> None:
    """Refuse a prefix whose cached content is not what its fingerprint says.

    Raises:
        IdentityError: naming row, key and both digests.
    """
    if prefix is not None and (now := found.prefix()) != prefix.fingerprint:
        refuse(
            "prefixes",
            f"row {row}, key {prefix.key!r}: the {prefix.length} cached tokens digest to {now}",
            f"the prefix was stored as {prefix.fingerprint}; its content was altered or is another's",
            IdentityError,
        )
