"""Coverage segments of a row: which of them hold a selected token."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvplugin.topology.numba_args import IntArray
from kvplugin.topology.numba_jit import inlined, kernel


@kernel
def empty_segments(length: int, segments: int, bounds: NDArray[np.int64], filled: NDArray[np.bool_]) -> None:
    """Write the segments ``[bounds[s], bounds[s + 1])``, all of them without a token so far."""
    whole, rest = length // segments, length % segments  # s * length would overflow on garbage lengths
    for s in range(segments + 1):
        bounds[s] = s * whole + s * rest // segments
    for s in range(segments):
        filled[s] = False


@inlined
def fill_segment(token: int, length: int, segments: int, bounds: NDArray[np.int64], filled: NDArray[np.bool_]) -> None:
    """Note that the segment of ``token`` holds one."""
    s = min(segments - 1, int(token * (segments / length)))  # a guess that rounding may put off by one
    while bounds[s] > token:
        s -= 1
    while bounds[s + 1] <= token:
        s += 1
    filled[s] = True


@inlined
def is_gap(segment: int, bounds: NDArray[np.int64], filled: NDArray[np.bool_]) -> bool:
    """True for a segment of visible tokens of which none was noted."""
    return bounds[segment] < bounds[segment + 1] and not filled[segment]


@kernel
def count_gaps(
    tokens: IntArray, count: int, length: int, segments: int, bounds: NDArray[np.int64], filled: NDArray[np.bool_]
) -> int:
    """Number of segments of visible tokens that hold none of ``tokens[:count]``."""
    empty_segments(length, segments, bounds, filled)
    for j in range(count):
        fill_segment(tokens[j], length, segments, bounds, filled)
    gaps = 0
    for s in range(segments):
        gaps += is_gap(s, bounds, filled)
    return gaps
