"""Block centroids and drift, against numpy in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from kvplugin.errors import ArgumentError
from kvplugin.topology import block_centroids, centroid_drift

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def random_keys(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)


def numpy_centroids(keys: torch.Tensor, block_size: int) -> NDArray[np.float64]:
    rows = keys.double().numpy()
    blocks = [rows[start : start + block_size].mean(0) for start in range(0, len(rows), block_size)]
    return np.array(blocks).reshape(len(blocks), rows.shape[1])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 40])
def test_centroids_average_each_block_by_its_true_count(dtype: torch.dtype, length: int) -> None:
    keys = random_keys(length, 8, dtype=dtype)
    centroids = block_centroids(keys, 16)
    assert centroids.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    np.testing.assert_allclose(centroids.numpy(), numpy_centroids(keys, 16), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keys_are_summed_in_float32(dtype: torch.dtype) -> None:
    """A running sum of ones in bfloat16 stands still at 256, in float16 at 2048."""
    assert block_centroids(torch.ones(4096, 1, dtype=dtype), 4096).item() == 1.0


def test_float64_keys_stay_float64() -> None:
    keys = torch.tensor([[1.0], [1.0 + 2**-40]], dtype=torch.float64)
    assert block_centroids(keys, 2).item() == 1.0 + 2**-41
    assert centroid_drift(keys).tolist() == [0.0, 2**-40]


@pytest.mark.parametrize("dtype", DTYPES)
def test_drift_is_the_distance_to_the_block_before(dtype: torch.dtype) -> None:
    centroids = random_keys(6, 8, dtype=dtype)
    drift = centroid_drift(centroids)
    assert drift.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = np.linalg.norm(np.diff(centroids.double().numpy(), axis=0), axis=1)
    np.testing.assert_allclose(drift.numpy(), [0.0, *expected], rtol=1e-5)


def test_half_precision_drift_is_computed_in_float32() -> None:
    """The square of 300 is beyond float16."""
    assert centroid_drift(torch.tensor([[0.0], [300.0]], dtype=torch.float16)).tolist() == [0.0, 300.0]


def test_leading_dimensions_are_kept() -> None:
    keys = random_keys(2, 3, 20, 4)
    centroids = block_centroids(keys, 8)
    assert centroids.shape == (2, 3, 3, 4)
    drift = centroid_drift(centroids)
    assert drift.shape == (2, 3, 3)
    torch.testing.assert_close(centroids[1, 2], block_centroids(keys[1, 2], 8))
    torch.testing.assert_close(drift[1, 2], centroid_drift(centroids[1, 2]))


def test_one_block_and_no_block() -> None:
    assert centroid_drift(random_keys(1, 4)).tolist() == [0.0]
    assert block_centroids(random_keys(0, 4), 8).shape == (0, 4)
    assert centroid_drift(random_keys(0, 4)).shape == (0,)


REFUSED = [
    (lambda: block_centroids(torch.zeros(4), 2),
     "block_centroids.keys: got torch.float32 [4]; must be floating [..., L, D]"),
    (lambda: block_centroids(torch.zeros(4, 2, dtype=torch.int32), 2),
     "block_centroids.keys: got torch.int32 [4, 2]; must be floating [..., L, D]"),
    (lambda: block_centroids(torch.zeros(4, 2), 0), "block_centroids.block_size: got 0; must be at least 1"),
    (lambda: centroid_drift(torch.zeros(4)),
     "centroid_drift.centroids: got torch.float32 [4]; must be floating [..., B, D]"),
    (lambda: centroid_drift(torch.zeros(4, 2, dtype=torch.int64)),
     "centroid_drift.centroids: got torch.int64 [4, 2]; must be floating [..., B, D]"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), REFUSED)
def test_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError) as refusal:
        call()
    assert str(refusal.value) == message
