"""vLLM's own conversion from logical to physical indices."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor

from integration.parity.cases import BLOCK_SIZE, ParityCase
from integration.parity.interpreter import scalar_conditions_as_masks


@cache
def vllm_remap(case: ParityCase) -> tuple[Tensor, Tensor | None]:
    """Physical rows ``[T, K]``, and valid counts ``[T]`` where the case asks for them.

    vLLM has two functions around one kernel: one for context-parallel decode rows, one for everything else, which
    compacts whenever it counts.
    """
    with scalar_conditions_as_masks():
        result = _convert(case)
    return result if case.count_valid else (result, None)


def _convert(case: ParityCase) -> Any:
    from vllm.v1.attention.backends.mla import sparse_utils

    size, rank, interleave = case.context_parallel
    if size > 1 and case.workspace is None:
        return sparse_utils.triton_filter_and_convert_dcp_index(
            case.request_of_row,
            case.block_table,
            case.topk,
            dcp_size=size,
            dcp_rank=rank,
            cp_kv_cache_interleave_size=interleave,
            BLOCK_SIZE=BLOCK_SIZE,
            BLOCK_STRIDE_ROWS=case.stride_rows,
            NUM_TOPK_TOKENS=case.width,
            return_valid_counts=case.count_valid,
            compact_valid_to_front=case.compact,
        )
    requests, starts, rank_stride = case.workspace or (None, None, None)
    return sparse_utils.triton_convert_req_index_to_global_index(
        case.request_of_row,
        case.block_table,
        case.topk,
        BLOCK_SIZE=BLOCK_SIZE,
        BLOCK_STRIDE_ROWS=case.stride_rows,
        NUM_TOPK_TOKENS=case.width,
        HAS_PREFILL_WORKSPACE=case.workspace is not None,
        prefill_workspace_request_ids=requests,
        prefill_workspace_starts=starts,
        prefill_workspace_rank_stride=rank_stride,
        dcp_size=size,
        dcp_rank=rank,
        cp_kv_cache_interleave_size=interleave,
        return_valid_counts=case.count_valid,
    )
