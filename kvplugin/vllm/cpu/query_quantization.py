"""Replaces the GPU-only fp8 quantisation of indexer queries in vLLM's generic DSA model."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import Tensor
from vllm.model_executor.models import deepseek_v2

from kvplugin.vllm.cpu.index_cache import quantize_fp8

original = deepseek_v2.per_token_group_quant_fp8


@wraps(original)
def per_token_group_quant_fp8(
    x: Tensor, group_size: int, *args: Any, use_ue8m0: bool | None = None, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """Same values as the GPU kernel for the arguments the indexer passes: row-major scales, e4m3."""
    return quantize_fp8(x, group_size, power_of_two=bool(use_ue8m0))


def install() -> None:
    """Put the torch form in place. Idempotent."""
    deepseek_v2.per_token_group_quant_fp8 = per_token_group_quant_fp8


def uninstall() -> None:
    """Put vLLM's own function back."""
    deepseek_v2.per_token_group_quant_fp8 = original
