"""What the numba kernels receive: tensors as flat arrays with strides, and the policy as plain numbers."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvplugin.config import Eviction, Fill, MismatchAction, Mode, Witness
from kvplugin.topology.counters import Counter
from kvplugin.topology.params import PolicyParams

EVICTIONS = tuple(Eviction)
WITNESSES = tuple(Witness)

IntArray = NDArray[Any]
"""An integer array whose width depends on the dtype of the caller's tensor."""


class Matrix(NamedTuple):
    """A two-dimensional tensor of any layout: element ``(r, c)`` is ``data[r * row_stride + c * column_stride]``."""

    data: IntArray
    row_stride: int
    column_stride: int


class Scores(NamedTuple):
    """The indexer's scores as raw bits: the sign and magnitude of each float, which order like its value.

    Element ``(r, c)`` is at ``r * row_stride + c * column_stride`` of the array that fits; the other is empty.

    Attributes:
        single: int32, the bits of float32 scores.
        half: int16, the bits of bfloat16 or float16 scores.
        is_half: which of the two.
        columns: number of columns, or -1 where the call has no scores.
        magnitude_mask: every bit but the sign.
        infinity: bits of +inf; larger magnitudes are NaN.
    """

    single: NDArray[np.int32]
    half: NDArray[np.int16]
    is_half: bool
    row_stride: int
    column_stride: int
    columns: int
    magnitude_mask: int
    infinity: int


class RowFacts(NamedTuple):
    """Metadata of a row, as the fields of a record."""

    length: int
    live: bool
    phase: int
    offset: int
    start: int


class KernelPolicy(NamedTuple):
    """:class:`PolicyParams` for a kernel, as the fields of a record: integers and flags, enums by their position.

    Attributes:
        falls_back: a row with bad input gets no structure.
        call_bypass: counter of the reason to leave the whole call alone, or -1.
        highest_index: largest value of the index dtype.
    """

    width: int
    block_size: int
    sink: int
    local: int
    local_in_blocks: bool
    witness: int
    witness_blocks: int
    segments: int
    eviction: int
    only: bool
    observe: bool
    fill_local: bool
    falls_back: bool
    check_duplicates: bool
    needs_scores: bool
    acts_in_prefill: bool
    acts_in_decode: bool
    max_row_length: int
    call_bypass: int
    highest_index: int


def record_dtype(fields: type) -> np.dtype[np.void]:
    """The numpy record with the fields of a NamedTuple: a kernel reads it through one pointer, not many arguments."""
    kinds = {int: np.int64, bool: np.bool_}
    return np.dtype([(name, kinds[kind]) for name, kind in get_type_hints(fields).items()])


ROW_FACTS = record_dtype(RowFacts)
_KERNEL_POLICY = record_dtype(KernelPolicy)


@lru_cache(maxsize=256)
def kernel_policy(
    params: PolicyParams, index_dtype: torch.dtype, *, call_bypass: Counter | None = None, lifts: bool = False
) -> NDArray[np.void]:
    """Lower ``params`` for a kernel: an array of one record with the fields of :class:`KernelPolicy`."""
    only = params.mode is Mode.ONLY
    policy = KernelPolicy(
        width=params.width,
        block_size=params.block_size,
        sink=params.sink_tokens,
        local=params.local,
        local_in_blocks=params.local_in_blocks,
        witness=WITNESSES.index(params.witness),
        witness_blocks=params.witness_blocks,
        segments=params.segments,
        eviction=EVICTIONS.index(params.eviction),
        only=only,
        observe=params.mode is Mode.OBSERVE,
        fill_local=params.fill is Fill.LOCAL,
        falls_back=params.mismatch is not MismatchAction.DROP and not only,
        check_duplicates=params.check_duplicates,
        needs_scores=params.needs_scores or lifts,
        acts_in_prefill=params.acts_in_prefill,
        acts_in_decode=params.acts_in_decode,
        max_row_length=params.max_row_length,
        call_bypass=-1 if call_bypass is None else int(call_bypass),
        highest_index=torch.iinfo(index_dtype).max,
    )
    return np.array([policy], _KERNEL_POLICY)


def matrix(tensor: Tensor) -> Matrix:
    """View an integer tensor ``[R, C]`` as a flat array; nothing is copied, so stores reach the tensor."""
    rows, columns = tensor.shape
    row_stride, column_stride = tensor.stride()
    span = 1 + (rows - 1) * row_stride + (columns - 1) * column_stride if tensor.numel() else 0
    return Matrix(tensor.as_strided((span,), (1,)).numpy(), row_stride, column_stride)


_SINGLE, _HALF = np.empty(0, np.int32), np.empty(0, np.int16)
_INFINITY = {torch.float32: 0x7F800000, torch.bfloat16: 0x7F80, torch.float16: 0x7C00}


def score_bits(scores: Tensor | None) -> Scores:
    """View scores as integers without converting them."""
    if scores is None:
        return Scores(_SINGLE, _HALF, False, 0, 0, -1, 0, 0)
    if scores.requires_grad:
        scores = scores.detach()
    columns, infinity = scores.shape[1], _INFINITY[scores.dtype]
    if scores.dtype is torch.float32:
        bits, row_stride, column_stride = matrix(scores.view(torch.int32))
        return Scores(bits, _HALF, False, row_stride, column_stride, columns, 0x7FFFFFFF, infinity)
    bits, row_stride, column_stride = matrix(scores.view(torch.int16))
    return Scores(_SINGLE, bits, True, row_stride, column_stride, columns, 0x7FFF, infinity)
