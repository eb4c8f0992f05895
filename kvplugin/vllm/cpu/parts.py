"""Puts the CPU parts of sparse attention in place: once per worker process, before the model is built."""

from __future__ import annotations

from vllm.model_executor.custom_op import CustomOp, op_registry_oot

from kvplugin.vllm.cpu import query_quantization
from kvplugin.vllm.log import warn_once

INDEXER_OP = "SparseAttnIndexer"


def install() -> None:
    """Register the CPU indexer op and the fp8 query quantisation. Idempotent."""
    from kvplugin.vllm.cpu.indexer import CpuSparseAttnIndexer

    holder = op_registry_oot.get(INDEXER_OP)
    if holder is None:
        CustomOp.register_oot(CpuSparseAttnIndexer, name=INDEXER_OP)
    elif holder is not CpuSparseAttnIndexer:
        warn_once(f"kvplugin: inactive: the op {INDEXER_OP} belongs to {holder.__module__}.{holder.__qualname__}")
    query_quantization.install()
