"""Where a comparison's numbers come from: digests, merge orders, owners, machine."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvplugin.replay.compute import Replayed, merge_orders
from kvplugin.replay.fingerprint import ContentDigest, execution_fingerprint
from kvplugin.replay.inputs import CompareSettings, ReplayInputs
from kvplugin.replay.report import Fingerprints, Provenance


def block_owners(inputs: ReplayInputs, replayed: Replayed) -> list[list[int]]:
    """``[B][blocks]``: rank of each logical block; empty without context parallelism."""
    if inputs.context_parallel is None:
        return []
    rows = inputs.context_parallel.block_owners.tolist()
    return [owners[: len(states.blocks.lse)] for owners, states in zip(rows, replayed.states, strict=True)]


def fingerprints(
    inputs: ReplayInputs, settings: CompareSettings, replayed: Replayed, digests: Sequence[ContentDigest]
) -> list[Fingerprints]:
    """Content and execution identity of each request."""
    owners = block_owners(inputs, replayed) or [[] for _ in replayed.states]
    return [
        Fingerprints(
            content=content.content(),
            execution=execution_fingerprint(settings, inputs.pool.page_size, row_owners, merge_orders(states)),
            chunks=content.chunks,
        )
        for content, row_owners, states in zip(digests, owners, replayed.states, strict=True)
    ]


def provenance(inputs: ReplayInputs, settings: CompareSettings, replayed: Replayed) -> Provenance:
    """How the replay was put together."""
    return Provenance(
        logical_merge_orders=[merge_orders(states) for states in replayed.states],
        cp_block_owners=block_owners(inputs, replayed),
        page_size=inputs.pool.page_size,
        page_format=inputs.pool.format,
        split_size=settings.split_size,
        strict=settings.strict,
        backend=settings.backend,
        device=str(inputs.q.device),
        torch=torch.__version__,
    )
