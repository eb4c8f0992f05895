"""Reading and writing one row of the top-k buffer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvplugin.topology.numba_args import IntArray, Matrix
from kvplugin.topology.numba_jit import kernel
from kvplugin.topology.numba_marks import Marks, entry_of, put_mark


@kernel
def row_values(topk: Matrix, row: int, width: int, spare: IntArray) -> IntArray:
    """The row as a contiguous array, copied to ``spare`` only where its slots lie apart."""
    at = row * topk.row_stride
    if topk.column_stride == 1:
        return topk.data[at : at + width]
    for j in range(width):
        spare[j] = topk.data[np.uintp(at + j * topk.column_stride)]
    return spare[:width]


@kernel
def read_clean(values: IntArray, offset: int, length: int, marks: Marks, tokens: IntArray) -> bool:
    """Read a row whose slots all hold different valid tokens, as nearly every row does; False for any other row.

    The loops are free of branches, and narrow, so that the compiler can vectorise what it may.
    """
    first, last = values.dtype.type(offset), values.dtype.type(offset + length - 1)
    bad = np.int32(0)
    for j in range(values.size):
        bad = np.int32(bad + np.int32((values[j] < first) | (values[j] > last)))
        tokens[j] = values[j] - first
    if bad > 0:
        return False
    repeated = np.int32(0)
    for j in range(values.size):
        index = entry_of(marks, tokens[j])
        repeated = np.int32(repeated + np.int32(marks.table[index] >= marks.base))
        put_mark(marks, index, tokens[j], marks.base + j)
    return bool(repeated == 0)


@kernel
def read_any(
    values: IntArray,
    offset: int,
    length: int,
    check_duplicates: bool,
    marks: Marks,
    tokens: IntArray,
    first_bad: NDArray[np.int64],
) -> tuple[int, int]:
    """Write the row's unique valid tokens to ``tokens``, in slot order.

    A value reaches an index only after the check against the row's interval. Returns the number of tokens and that of
    bad slots, the first of which goes to ``first_bad[0]``.
    """
    last = offset + length - 1
    learned, bad = 0, 0
    for j in range(values.size):
        value = values[j]
        repeated = False
        if offset <= value <= last:
            token = value - offset
            index = entry_of(marks, token)
            repeated = marks.table[index] >= marks.base
            if not repeated:
                put_mark(marks, index, token, marks.base + learned)
                tokens[learned] = token
                learned += 1
                continue
        is_bad = check_duplicates if repeated else value != -1
        if is_bad:
            if bad == 0:
                first_bad[0] = value
            bad += 1
    return learned, bad


@kernel
def write_row(topk: Matrix, row: int, width: int, tokens: IntArray, count: int, offset: int) -> None:
    """Store ``tokens[:count]`` as absolute indices, then -1."""
    at = row * topk.row_stride
    for j in range(count):
        topk.data[np.uintp(at + j * topk.column_stride)] = tokens[j] + offset
    for j in range(count, width):
        topk.data[np.uintp(at + j * topk.column_stride)] = -1


@kernel
def write_slots(
    topk: Matrix, row: int, slots: NDArray[np.int32], tokens: NDArray[np.int64], count: int, offset: int
) -> None:
    """Store ``tokens[:count]`` as absolute indices in the given slots, and leave the other slots as they are."""
    at = row * topk.row_stride
    for i in range(count):
        topk.data[np.uintp(at + slots[i] * topk.column_stride)] = tokens[i] + offset
