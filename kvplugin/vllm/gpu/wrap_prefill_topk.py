"""Wraps the top-k kernel of prefill chunks, as vLLM's indexer looks it up: the policy acts on the chunk's scores."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import Tensor
from vllm import _custom_ops

from kvplugin.vllm.gpu.step import step_of
from kvplugin.vllm.gpu.topk_call import prefill_call

original = _custom_ops.top_k_per_row_prefill


@wraps(original)
def top_k_per_row_prefill(
    logits: Tensor, row_starts: Tensor, row_ends: Tensor, raw_topk_indices: Tensor, *args: Any, **kwargs: Any
) -> None:
    """The kernel, with the policy before or after it where the rows are an engine's of ours."""
    step = step_of(raw_topk_indices)
    call = None if step is None else prefill_call(step, logits, row_starts, row_ends, raw_topk_indices)
    if call is None:
        original(logits, row_starts, row_ends, raw_topk_indices, *args, **kwargs)
    else:
        call.around(lambda: original(logits, row_starts, row_ends, raw_topk_indices, *args, **kwargs))


def install() -> None:
    """Put the wrap in place. Idempotent."""
    _custom_ops.top_k_per_row_prefill = top_k_per_row_prefill


def uninstall() -> None:
    """Put vLLM's own function back."""
    _custom_ops.top_k_per_row_prefill = original
