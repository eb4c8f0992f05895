"""The shared pool of KV pages, and how the bytes of a page become numbers."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Self

import torch
from torch import Tensor

from kvplugin.errors import ArgumentError

# One token of vLLM's fp8_ds_mla: 512 fp8 latents, 4 float32 scales of 128 latents each, 64 bfloat16 rope elements.
FP8_LATENT, FP8_GROUP, FP8_ROPE = 512, 128, 64
FP8_SCALE_BYTES = 4 * FP8_LATENT // FP8_GROUP
FP8_TOKEN_BYTES = FP8_LATENT + FP8_SCALE_BYTES + 2 * FP8_ROPE


class PageFormat(StrEnum):
    """What a page holds."""

    GQA = "gqa"
    MLA = "mla"
    FP8_DS_MLA = "fp8_ds_mla"


def decode_fp8_ds_mla(pages: Tensor) -> Tensor:
    """Dequantise vLLM's ``fp8_ds_mla`` pages exactly (kernels round the product to bfloat16 on their way).

    Args:
        pages: uint8 ``[..., 656]``.

    Returns:
        float32 ``[..., 576]``: 512 latents, then 64 rope elements.
    """
    latent, scales, rope = torch.split(pages, [FP8_LATENT, FP8_SCALE_BYTES, 2 * FP8_ROPE], dim=-1)
    values = latent.contiguous().view(torch.float8_e4m3fn).float().view(*pages.shape[:-1], -1, FP8_GROUP)
    scaled = values * scales.contiguous().view(torch.float32).unsqueeze(-1)
    return torch.cat([scaled.flatten(-2), rope.contiguous().view(torch.bfloat16).float()], dim=-1)


@dataclass(frozen=True)
class KVPool:
    """Pages shared by all requests; a block table says which belong to one. Any strides.

    Attributes:
        format: what a page holds.
        keys: floating ``[P, page, Hkv, D]`` for GQA and ``[P, page, C + R]`` for MLA; uint8 ``[P, page, 656]`` for
            fp8_ds_mla.
        values: floating ``[P, page, Hkv, Dv]`` for GQA, else None: MLA's values are the latents.
        latent_dim: C for MLA, else 0.
    """

    format: PageFormat
    keys: Tensor
    values: Tensor | None = None
    latent_dim: int = 0

    @classmethod
    def gqa(cls, keys: Tensor, values: Tensor) -> Self:
        """Separate keys and values per KV head; multi-head and multi-query attention are its ends."""
        return cls(PageFormat.GQA, keys, values)

    @classmethod
    def mla(cls, latent: Tensor, latent_dim: int) -> Self:
        """Latent and rope part of one token side by side."""
        return cls(PageFormat.MLA, latent, None, latent_dim)

    @classmethod
    def fp8_ds_mla(cls, pages: Tensor) -> Self:
        """Raw pages of vLLM's quantised MLA cache."""
        return cls(PageFormat.FP8_DS_MLA, pages, None, FP8_LATENT)

    @property
    def page_size(self) -> int:
        """Tokens per page."""
        return self.keys.shape[1]

    @property
    def kv_heads(self) -> int:
        """Hkv; 1 for MLA."""
        return self.keys.shape[2] if self.format is PageFormat.GQA else 1

    @property
    def key_dim(self) -> int:
        """D that q must have."""
        return FP8_LATENT + FP8_ROPE if self.format is PageFormat.FP8_DS_MLA else self.keys.shape[-1]

    @property
    def value_dim(self) -> int:
        """Dv of the output."""
        return self.latent_dim if self.values is None else self.values.shape[-1]

    def decode_keys(self, raw: Tensor) -> Tensor:
        """Floating ``[..., Hkv, D]`` from elements of ``keys``."""
        if self.format is PageFormat.GQA:
            return raw
        return (decode_fp8_ds_mla(raw) if self.format is PageFormat.FP8_DS_MLA else raw).unsqueeze(-2)

    def decode_values(self, raw: Tensor) -> Tensor:
        """Floating ``[..., Hkv, Dv]`` from elements of ``values``, or of ``keys`` for MLA."""
        return raw if self.values is not None else self.decode_keys(raw)[..., : self.latent_dim]


def paged(rows: Tensor, page_size: int) -> Tensor:
    """View a flat cache ``[slots, ...]`` as pages ``[slots / page_size, page_size, ...]``.

    Raises:
        ArgumentError: the page size is not a positive integer, or does not divide the slots.
    """
    if isinstance(page_size, bool) or not isinstance(page_size, int) or page_size < 1:
        raise ArgumentError("replay.page_size", f"got {page_size!r}", "must be a positive integer")
    if rows.shape[0] % page_size:
        raise ArgumentError(
            "replay.capacity", f"{rows.shape[0]} slots", f"must be a multiple of the page size, {page_size}"
        )
    return rows.view(-1, page_size, *rows.shape[1:])
