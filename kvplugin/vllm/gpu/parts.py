"""Puts the GPU parts in place: once per worker process, when the first layer of an engine of ours is made."""

from __future__ import annotations

from functools import cache


@cache
def install() -> None:
    """Install every wrap."""
    from kvplugin.vllm.gpu import wrap_convert, wrap_decode_topk, wrap_indexer_metadata, wrap_prefill_topk

    for wrap in (wrap_prefill_topk, wrap_decode_topk, wrap_indexer_metadata, wrap_convert):
        wrap.install()
