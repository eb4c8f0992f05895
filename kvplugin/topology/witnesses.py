"""Block scores for drift witnesses: how far the content of a block moves from that of the block before it."""

from __future__ import annotations

import torch
from torch import Tensor

from kvplugin.errors import ArgumentError


def block_centroids(keys: Tensor, block_size: int) -> Tensor:
    """Mean key of each policy block, the tail block by its true count.

    Args:
        keys: floating ``[..., L, D]``, one key per token in logical order.
        block_size: tokens per block, at least 1.

    Returns:
        ``[..., ceil(L / block_size), D]``: float64 for float64 keys, else float32 (half precision sums in float32).

    Raises:
        ArgumentError: keys are not floating or have fewer than two dimensions, or block_size is below 1.
    """
    if keys.dim() < 2 or not keys.is_floating_point():
        raise ArgumentError(
            "block_centroids.keys", f"got {keys.dtype} {list(keys.shape)}", "must be floating [..., L, D]"
        )
    if block_size < 1:
        raise ArgumentError("block_centroids.block_size", f"got {block_size}", "must be at least 1")
    length = keys.shape[-2]
    blocks = -(-length // block_size)
    exact = keys if keys.dtype == torch.float64 else keys.float()
    padded: Tensor = torch.nn.functional.pad(exact, (0, 0, 0, blocks * block_size - length))
    sums = padded.reshape(*keys.shape[:-2], blocks, block_size, keys.shape[-1]).sum(-2)
    starts = torch.arange(blocks, device=keys.device) * block_size
    return sums / (length - starts).clamp(max=block_size).unsqueeze(-1)


def centroid_drift(centroids: Tensor) -> Tensor:
    """Witness score of each block: ``d[0] = 0``, ``d[i] = ||c[i] - c[i-1]||`` (Euclidean).

    Args:
        centroids: floating ``[..., B, D]``.

    Returns:
        ``[..., B]``: float64 for float64 centroids, else float32.

    Raises:
        ArgumentError: centroids are not floating or have fewer than two dimensions.
    """
    if centroids.dim() < 2 or not centroids.is_floating_point():
        raise ArgumentError(
            "centroid_drift.centroids", f"got {centroids.dtype} {list(centroids.shape)}", "must be floating [..., B, D]"
        )
    exact = centroids if centroids.dtype == torch.float64 else centroids.float()
    steps = torch.linalg.vector_norm(exact.diff(dim=-2), dim=-1)
    padded: Tensor = torch.nn.functional.pad(steps, (1, 0))
    return padded[..., : centroids.shape[-2]]
