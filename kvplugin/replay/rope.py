"""Rotary position embedding: the record that says how it was applied, and the rotation itself."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class RopeLayout(StrEnum):
    """Which elements form a pair: ``(i, i + R/2)`` or ``(2i, 2i + 1)``."""

    NEOX = "neox"
    INTERLEAVED = "interleaved"


class RopeState(StrEnum):
    """Whether a tensor has been rotated."""

    PRE = "pre_rope"
    POST = "post_rope"


@dataclass(frozen=True)
class RopeRecord:
    """How q and the cached keys are rotated. The indexer has a record of its own.

    Attributes:
        theta: base of the frequencies ``theta ** (-2i / rotary_dim)``.
        layout: how elements pair.
        rotary_dim: rotated elements: the whole head for GQA, the last R of ``C + R`` for MLA.
        q_state, k_state: state of ``q`` and of the *cached* keys as given.
        q_dtype, k_dtype: dtype in which each leaves the rotation; they are separate, as a float32 query
            often meets bfloat16 keys. Tensors given post-RoPE are taken as they are.
        cast_before_rotation: true for an engine that casts first; replay refuses it.
        rotary_first: the rotated elements are the first ones, as in DeepSeek's indexer, not the last.
    """

    theta: float
    layout: RopeLayout
    rotary_dim: int
    q_state: RopeState = RopeState.POST
    k_state: RopeState = RopeState.POST
    q_dtype: torch.dtype = torch.float32
    k_dtype: torch.dtype = torch.float32
    cast_before_rotation: bool = False
    rotary_first: bool = False


def rotate(x: Tensor, positions: Tensor, record: RopeRecord) -> Tensor:
    """Rotate ``rotary_dim`` elements of ``x`` to ``positions``.

    Angles are float32 products of float32 positions and frequencies, as in vLLM and transformers: at position 32 k
    an exact angle would differ from theirs by up to 2e-3.

    Args:
        x: floating ``[..., D]``.
        positions: integer, broadcast against ``x.shape[:-1]``.

    Returns:
        float32 ``[..., D]``.
    """
    size = record.rotary_dim
    rest = x.shape[-1] - size
    parts = torch.split(x.float(), [size, rest] if record.rotary_first else [rest, size], dim=-1)
    turned, kept = parts if record.rotary_first else parts[::-1]
    exponent = torch.arange(0, size, 2, dtype=torch.float32, device=x.device) / size
    angle = positions.float().unsqueeze(-1) * (1.0 / record.theta**exponent)
    cos, sin = angle.cos(), angle.sin()
    if record.layout is RopeLayout.NEOX:
        first, second = turned.chunk(2, dim=-1)
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    else:
        first, second = turned[..., 0::2], turned[..., 1::2]
        turned = torch.stack([first * cos - second * sin, second * cos + first * sin], dim=-1).flatten(-2)
    # Positions may have more rows than x: then every row has its own copy of the unrotated part.
    kept = kept.expand(*turned.shape[:-1], rest)
    return torch.cat([turned, kept] if record.rotary_first else [kept, turned], dim=-1)
