"""Wraps the choice of the decode top-k, a global of vLLM's indexer module: the policy acts on the decode scores."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

from torch import Tensor
from vllm.model_executor.layers import sparse_attn_indexer

from kvplugin.vllm.gpu.step import step_of
from kvplugin.vllm.gpu.topk_call import decode_call

original = sparse_attn_indexer.get_indexer_topk


@wraps(original)
def get_indexer_topk(backend: str) -> Callable[..., None]:
    """The decode top-k of a backend, with the policy before or after it where the rows are an engine's of ours."""
    return _with_policy(original(backend))


@cache
def _with_policy(topk: Callable[..., None]) -> Callable[..., None]:
    def run(logits: Tensor, seq_lens: Tensor, next_n: int, topk_indices: Tensor, *args: Any, **kwargs: Any) -> None:
        """Takes what vLLM's ``SparseIndexerTopk`` takes."""
        step = step_of(topk_indices)
        call = None if step is None else decode_call(step, logits, seq_lens, next_n, topk_indices)
        if call is None:
            topk(logits, seq_lens, next_n, topk_indices, *args, **kwargs)
        else:
            call.around(lambda: topk(logits, seq_lens, next_n, topk_indices, *args, **kwargs))

    return run


def install() -> None:
    """Put the wrap in place. Idempotent."""
    sparse_attn_indexer.get_indexer_topk = get_indexer_topk


def uninstall() -> None:
    """Put vLLM's own function back."""
    sparse_attn_indexer.get_indexer_topk = original
