"""Refusals that name field, batch row, slot and value."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvplugin.errors import ArgumentError

INDEX_DTYPES = (torch.int32, torch.int64)
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

Size = int | str


def refuse(field: str, found: str, allowed: str, error: type[ArgumentError] = ArgumentError) -> None:
    """Raise ``error`` about ``replay.<field>``."""
    raise error(f"replay.{field}", found, allowed)


def refuse_where(
    bad: Tensor,
    field: str,
    value: Tensor,
    axes: Sequence[str],
    allowed: str,
    error: type[ArgumentError] = ArgumentError,
    start: int = 0,
) -> None:
    """Refuse the first element that is ``bad``, by its coordinates and value; one read of the device if none is.

    Args:
        bad: bool, of ``value``'s shape.
        axes: name of each dimension, such as ``("row", "slot")``.
        start: what index 0 of the first dimension stands for.
    """
    if not bool(bad.any()):
        return
    index = tuple(bad.nonzero()[0].tolist())
    shown = (index[0] + start, *index[1:])
    place = ", ".join(f"{axis} {position}" for axis, position in zip(axes, shown, strict=True))
    refuse(field, f"{place}: {value[index].item()}", allowed, error)


def check_tensor(
    field: str, tensor: Tensor, shape: Sequence[Size], dtypes: Sequence[torch.dtype], device: torch.device
) -> None:
    """Refuse a wrong rank, size, dtype or device; a name in ``shape`` allows any size but 0."""
    fits = len(tensor.shape) == len(shape) and all(
        found > 0 if isinstance(wanted, str) else found == wanted
        for found, wanted in zip(tensor.shape, shape, strict=True)
    )
    if not fits or tensor.dtype not in dtypes or tensor.device != device:
        names = " or ".join(dtype_name(dtype) for dtype in dtypes)
        found = f"got {dtype_name(tensor.dtype)} {list(tensor.shape)} on {tensor.device}"
        refuse(field, found, f"must be {names} [{', '.join(map(str, shape))}] on {device}")


def check_positive(field: str, value: object) -> None:
    """Refuse anything but a positive finite number; True is not a number here."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type, operator]
        refuse(field, f"got {value!r}", "must be a positive finite number")


def check_count(field: str, value: object, multiple_of: int = 1) -> None:
    """Refuse anything but a positive integer that is a multiple of ``multiple_of``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % multiple_of:
        extra = f" and a multiple of {multiple_of}" if multiple_of > 1 else ""
        refuse(field, f"got {value!r}", f"must be a positive integer{extra}")


def dtype_name(dtype: torch.dtype) -> str:
    """``float32`` for ``torch.float32``."""
    return str(dtype).removeprefix("torch.")
