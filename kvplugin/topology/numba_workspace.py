"""The scratch memory of the numba kernels: one workspace per calling thread, grown on demand and used again."""

from __future__ import annotations

import threading
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from kvplugin.topology.counters import PHASE_ROWS, Counter
from kvplugin.topology.numba_args import ROW_FACTS, IntArray

DIRECT_TOKENS = 2**16
"""Rows up to this length mark their tokens in a table indexed by token; longer ones in a hash table."""


class Lane(NamedTuple):
    """Scratch of one worker, for rows of K slots. Contents are meaningless between rows, save ``table`` and ``epoch``.

    Attributes:
        tokens: learned tokens, then the selection; the index dtype, ``[K]``.
        keys: what each learned token is ranked by, lowest leaves first; the index dtype, ``[K]``.
        spare: the row itself where its slots lie apart, then tokens that tie; the index dtype, ``[K]``.
        incoming: tokens to add, int64 ``[K]``.
        slots: positions in ``tokens``, int32 ``[K]``.
        starts, stops: ranges of the structural set, int64 ``[K + 2]``.
        bounds, filled: coverage segments, int64 ``[K + 1]`` and bool ``[K]``.
        drift: ranking of the blocks, int64 ``[B]``.
        table, owner, epoch: see :class:`kvplugin.topology.numba_marks.Marks`.
        counts: int64 ``[2, len(Counter)]`` of the current call.
        error: int64 ``[4]``, the first coordinate mismatch of the current call.
    """

    tokens: IntArray
    keys: IntArray
    spare: IntArray
    incoming: NDArray[np.int64]
    slots: NDArray[np.int32]
    starts: NDArray[np.int64]
    stops: NDArray[np.int64]
    bounds: NDArray[np.int64]
    filled: NDArray[np.bool_]
    drift: NDArray[np.int64]
    table: NDArray[np.int32]
    owner: NDArray[np.int64]
    epoch: NDArray[np.int64]
    counts: NDArray[np.int64]
    error: NDArray[np.int64]


def new_lane(width: int, blocks: int, index_dtype: np.dtype[np.signedinteger]) -> Lane:
    """Allocate one lane."""
    hashed = 1 << (4 * width - 1).bit_length()
    return Lane(
        tokens=np.empty(width, index_dtype),
        keys=np.empty(width, index_dtype),
        spare=np.empty(width, index_dtype),
        incoming=np.empty(width, np.int64),
        slots=np.empty(width, np.int32),
        starts=np.empty(width + 2, np.int64),
        stops=np.empty(width + 2, np.int64),
        bounds=np.empty(width + 1, np.int64),
        filled=np.empty(width, np.bool_),
        drift=np.empty(blocks, np.int64),
        table=np.zeros(max(DIRECT_TOKENS, hashed), np.int32),
        owner=np.empty(hashed, np.int64),
        epoch=np.ones(1, np.int64),
        counts=np.zeros((len(PHASE_ROWS), len(Counter)), np.int64),
        error=np.zeros(4, np.int64),
    )


class Workspace:
    """The scratch of one calling thread. Buffers only grow, so repeated calls of one shape allocate nothing.

    Attributes:
        cursor: int64 ``[1]``, the first row of a call that no lane has taken yet.
    """

    def __init__(self) -> None:
        self.cursor = np.zeros(1, np.int64)
        self._facts = np.zeros(0, ROW_FACTS)
        self._lanes: dict[np.dtype[np.signedinteger], list[Lane]] = {}
        self._block_scores = np.empty(0, np.float64)

    def facts(
        self,
        lengths: Tensor,
        live: Tensor | None,
        phases: Tensor | None,
        offsets: Tensor | None,
        starts: Tensor | None,
    ) -> NDArray[np.void]:
        """Copy the metadata of the rows, or their defaults, into records with the fields of :class:`RowFacts`."""
        rows = lengths.shape[0]
        if self._facts.size < rows:
            self._facts = np.zeros(rows, ROW_FACTS)
        facts = self._facts[:rows]
        facts["length"] = lengths.numpy()
        facts["live"] = True if live is None else live.numpy()
        facts["phase"] = 1 if phases is None else phases.numpy()
        facts["offset"] = 0 if offsets is None else offsets.numpy()
        facts["start"] = 0 if starts is None else starts.numpy()
        return facts

    def block_scores(self, scores: Tensor | None, rows: int) -> NDArray[np.int64]:
        """Bits of the witness scores as float64 (exact), ``[T, B]``; B = 0 without scores."""
        if scores is None:
            return np.empty((rows, 0), np.int64)
        blocks = scores.shape[1]
        if self._block_scores.size < rows * blocks:
            self._block_scores = np.empty(rows * blocks, np.float64)
        copy = self._block_scores[: rows * blocks].reshape(rows, blocks)
        copy[:] = scores.detach().numpy()
        return copy.view(np.int64)

    def lanes(self, count: int, width: int, blocks: int, index_dtype: np.dtype[np.signedinteger]) -> list[Lane]:
        """``count`` lanes with room for rows of ``width`` slots and ``blocks`` witness scores, nothing counted yet."""
        lanes = self._lanes.setdefault(index_dtype, [])
        if lanes:  # all of one size, so that any of them serves the widest row so far
            size = lanes[0].tokens.size, lanes[0].drift.size
            width, blocks = max(width, size[0]), max(blocks, size[1])
            if (width, blocks) != size:
                lanes.clear()
        while len(lanes) < count:
            lanes.append(new_lane(width, blocks, index_dtype))
        for lane in lanes[:count]:
            lane.counts.fill(0)
            lane.error.fill(0)
        return lanes[:count]


class _Workspaces(threading.local):
    """Gives each Python thread its own workspace, so that calls at the same time never share scratch."""

    def __init__(self) -> None:
        self.own = Workspace()


_WORKSPACES = _Workspaces()


def workspace() -> Workspace:
    """The calling thread's workspace."""
    return _WORKSPACES.own
