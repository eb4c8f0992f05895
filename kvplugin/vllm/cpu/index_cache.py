"""The indexer's keys: fp8 with power-of-two scales, in the page layout of vLLM's GPU kernels (values, then scales)."""

from __future__ import annotations

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
SMALLEST_AMAX = 1e-10


def quantize_fp8(x: Tensor, group: int, power_of_two: bool = True) -> tuple[Tensor, Tensor]:
    """Quantise groups of the last dimension, with the arithmetic of vLLM's ``per_token_group_quant_fp8``.

    Args:
        x: floating ``[..., D]``, D a multiple of ``group``.
        group: elements per scale.
        power_of_two: round each scale up to a power of two (ue8m0).

    Returns:
        float8_e4m3fn ``[..., D]`` and float32 scales ``[..., D // group]``.
    """
    groups = _grouped(x.float(), group)
    scale = groups.abs().amax(-1).clamp_min(SMALLEST_AMAX) / FP8_MAX
    if power_of_two:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
    values = (groups / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).flatten(-2).to(FP8)
    return values, scale


def write_keys(keys: Tensor, cache: Tensor, slots: Tensor, group: int) -> None:
    """Quantise keys ``[T, D]`` into the pages of ``cache`` (uint8 ``[blocks, block_size, D + 4·D/group]``).

    ``slots`` (int ``[T]``) are ``block · block_size + offset``; negative ones, and those past the cache, are skipped.
    """
    values_view, scales_view = _page_views(cache, keys.shape[-1])
    capacity = cache.shape[0] * cache.shape[1]
    valid = (slots >= 0) & (slots < capacity)
    slots = slots[valid].long()
    values, scales = quantize_fp8(keys[valid], group)
    block, offset = slots // cache.shape[1], slots % cache.shape[1]
    values_view[block, offset] = values.view(torch.uint8)
    scales_view[block, offset] = scales.contiguous().view(torch.uint8).view(len(slots), -1)


def read_keys(cache: Tensor, blocks: Tensor, length: int, head_dim: int, group: int) -> Tensor:
    """Dequantised keys of one request: float64 ``[length, head_dim]``, from its block ids (int ``[>= pages]``).

    Keys of a block that is not in the cache are 0, as a faulty table must not end the engine.
    """
    values_view, scales_view = _page_views(cache, head_dim)
    pages = blocks[: -(-length // cache.shape[1])].long()
    exists = (pages >= 0) & (pages < len(cache))
    pages = torch.where(exists, pages, 0)
    values = values_view[pages].reshape(-1, head_dim)[:length].contiguous().view(FP8).double()
    scales = scales_view[pages].reshape(len(pages) * cache.shape[1], -1)[:length].contiguous().view(torch.float32)
    keys = (_grouped(values, group) * scales.double().unsqueeze(-1)).flatten(-2)
    return keys * exists.repeat_interleave(cache.shape[1])[:length, None]


def _grouped(x: Tensor, group: int) -> Tensor:
    return x.view(*x.shape[:-1], -1, group)


def _page_views(cache: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Views of a page-major cache: values ``[B, N, D]`` and scale bytes ``[B, N, W - D]``, both uint8."""
    blocks, block_size, width = cache.shape
    page, scale_bytes = cache.stride(0), width - head_dim
    values = cache.as_strided((blocks, block_size, head_dim), (page, head_dim, 1))
    start = cache.storage_offset() + block_size * head_dim
    return values, cache.as_strided((blocks, block_size, scale_bytes), (page, scale_bytes, 1), start)
