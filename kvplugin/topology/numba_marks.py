"""Which tokens of a row are taken, and where: a table whose entries expire by themselves when the row ends."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from kvplugin.topology.numba_jit import inlined, kernel

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio: spreads neighbouring tokens over the table
_LAST_EPOCH = 2**31 - 1


class Marks(NamedTuple):
    """The marked tokens of one row.

    An entry at or above ``base`` belongs to this row: ``base + slot`` for a learned token, ``structural`` for a token
    of the structural set that was not learned; anything lower was left behind by an earlier row.

    Attributes:
        table: indexed by token where the row is short enough, else by a hash of the token.
        owner: the token behind each entry of the hash table.
        base: lowest mark of this row.
        structural: highest mark of this row.
        direct: the row is short enough.
        shift: number of hash bits to drop.
    """

    table: NDArray[np.int32]
    owner: NDArray[np.int64]
    base: int
    structural: int
    direct: bool
    shift: int


@kernel
def new_marks(
    table: NDArray[np.int32], owner: NDArray[np.int64], epoch: NDArray[np.int64], length: int, width: int
) -> Marks:
    """An empty set of marks for a row of ``length`` tokens and ``width`` slots; ``epoch[0]`` is the next free mark."""
    base = epoch[0]
    if base + width >= _LAST_EPOCH:
        table[:] = 0
        base = 1
    epoch[0] = base + width + 1
    shift = 64
    while 1 << (64 - shift) < owner.size:
        shift -= 1
    return Marks(table, owner, base, base + width, length <= table.size, shift)


@inlined
def entry_of(marks: Marks, token: int) -> Any:
    """Index of the entry that holds ``token`` or would hold it."""
    if marks.direct:
        return np.uintp(token)
    index = np.uintp((np.uint64(token) * _GOLDEN) >> np.uint64(marks.shift))
    last = np.uintp(marks.owner.size - 1)
    while marks.table[index] >= marks.base and marks.owner[index] != token:
        index = (index + np.uintp(1)) & last
    return index


@inlined
def put_mark(marks: Marks, index: int, token: int, mark: int) -> None:
    """Store a mark in the entry that ``entry_of`` found."""
    marks.table[index] = mark
    if not marks.direct:
        marks.owner[index] = token
