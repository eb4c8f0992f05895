"""One step of one batch: what the indexer's metadata builder left for the top-k calls that follow."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from vllm.forward_context import get_forward_context, is_forward_context_available

from kvplugin.remap.call import ContextParallel
from kvplugin.vllm.gpu.engine import GpuEngine
from kvplugin.vllm.gpu.row_buffers import BatchRows

ATTRIBUTE = "kvplugin_step"
"""Attribute of vLLM's indexer metadata: it goes wherever a batch goes, micro-batches and graph captures included."""

_leaders: dict[str, None] = {}
"""One indexer layer of each metadata builder; owner: :func:`attach_step`."""
_forced: list[GpuStep] = []
"""The self-test's; owner: :func:`forced_step`."""


class GpuStep(NamedTuple):
    """Rows of one batch. All tensors are views of memory at fixed addresses.

    Attributes:
        batch: the rows side by side, as prefill chunks and decode rows see them.
        padded: decode rows as ``[requests, slots]``, where requests differ in how many they have; else None.
        sharded: tensor-parallel ranks have prefill rows of their own.
        speaks: this rank's counters stand for the rows that its tensor-parallel group computes alike.
        ranks: how the KV cache is dealt out over decode-context-parallel ranks.
        gathers_prefill: prefill rows see all tokens at once: with prefill context parallelism vLLM gathers their keys.
        leaders: ordinals of the indexers, in the order in which they select decode rows, over and over; -1 in drafts.
    """

    engine: GpuEngine
    batch: BatchRows
    padded: BatchRows | None
    sharded: bool
    speaks: bool
    ranks: ContextParallel
    gathers_prefill: bool
    leaders: Iterator[int]


def attach_step(metadata: Any, leader: str, step: GpuStep) -> None:
    """Leave a step with the batch's metadata, which the layers of one builder share."""
    setattr(metadata, ATTRIBUTE, step)
    _leaders[leader] = None


def step_of(selection: Tensor) -> GpuStep | None:
    """The step under way, if ``selection`` is a view of its engine's top-k buffer and its policy acts."""
    step = _current_step()
    if step is None or step.engine.state.hook is None or not step.engine.owns(selection):
        return None
    return step


@contextmanager
def forced_step(step: GpuStep) -> Iterator[None]:
    """Let top-k calls find this step, without a batch."""
    _forced.append(step)
    try:
        yield
    finally:
        _forced.remove(step)


def _current_step() -> GpuStep | None:
    if _forced:
        return _forced[-1]
    if not is_forward_context_available():
        return None
    metadata = get_forward_context().attn_metadata
    if not isinstance(metadata, dict):
        return None
    for name in _leaders:
        found = metadata.get(name)
        if found is not None:
            return getattr(found, ATTRIBUTE, None)
    return None
