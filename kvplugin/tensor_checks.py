"""The one shape, dtype and device check of tensors that callers pass in."""

from __future__ import annotations

import torch
from torch import Tensor

from kvplugin.errors import ArgumentError


def check_tensor(
    where: str,
    name: str,
    tensor: Tensor,
    shape: tuple[int | str, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
) -> None:
    """Refuse a tensor of another rank, size, dtype or device.

    Args:
        where: the function that received it, as it shall be named in the message.
        name: its argument.
        shape: wanted sizes; a letter stands for any size.
        dtypes: accepted dtypes.
        device: wanted device.

    Raises:
        ArgumentError: naming the argument, what was found and what is accepted.
    """
    if tensor.dtype not in dtypes or tensor.device != device or not _fits(tensor.shape, shape):
        kinds = " or ".join(_plain(dtype) for dtype in dtypes)
        found = f"{_plain(tensor.dtype)} {list(tensor.shape)} on {tensor.device}"
        raise ArgumentError(
            f"{where}.{name}", f"got {found}", f"must be {kinds} [{', '.join(map(str, shape))}] on {device}"
        )


def _fits(found: torch.Size, wanted: tuple[int | str, ...]) -> bool:
    if len(found) != len(wanted):
        return False
    for size, want in zip(found, wanted, strict=True):  # noqa: SIM110 - on the hot path, and a generator costs more
        if size != want and not isinstance(want, str):
            return False
    return True


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
