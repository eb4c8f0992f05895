"""What one layer asks of the remap in one step, and what two layers must share to share its result."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from kvplugin.remap.call import Member


class LayerCall(NamedTuple):
    """The indices that one layer wants converted; tensors as in :func:`kvplugin.remap.remap_grouped`.

    Attributes:
        step: as :meth:`kvplugin.remap.memo.GroupMemo.begin_step` returned it for the batch of these rows.
        layer: number of the layer.
        member: its place in its KV pool.
    """

    step: int
    layer: int
    member: Member
    topk: Tensor
    request_of_row: Tensor
    block_table: Tensor
    block_size: int
    num_blocks: int

    @property
    def shared(self) -> SharedInputs:
        """What another layer's call must be equal in, if this one's conversion is to serve it."""
        return SharedInputs(_identity(self.topk), _identity(self.block_table), self.block_size, self.num_blocks)


class _Identity(NamedTuple):
    """A tensor as far as it is compared. Its contents are not: within a step, nobody writes to inputs of the remap."""

    address: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]


class SharedInputs(NamedTuple):
    """The inputs that all readers of one step's conversion have in common.

    The request of each row is not among them: the step's batch decides it, and engines keep copies.
    """

    topk: _Identity
    block_table: _Identity
    block_size: int
    num_blocks: int

    def first_difference(self, other: SharedInputs) -> str | None:
        """Name of the first field that differs, or None where all agree."""
        pairs = zip(self._fields, self, other, strict=True)
        return next((name for name, mine, theirs in pairs if mine != theirs), None)


def _identity(tensor: Tensor) -> _Identity:
    return _Identity(tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
