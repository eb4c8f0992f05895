"""The structural set of a row as ranges of tokens: sinks, witness blocks, local window."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvplugin.config import Witness
from kvplugin.topology.numba_args import WITNESSES, KernelPolicy
from kvplugin.topology.numba_jit import kernel
from kvplugin.topology.numba_ranking import nth_lowest

_UNIFORM = WITNESSES.index(Witness.UNIFORM)

_FLOAT64_MAGNITUDE, _FLOAT64_INFINITY = 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000


@kernel
def structure_ranges(
    length: int,
    policy: KernelPolicy,
    block_scores: NDArray[np.int64],
    drift: NDArray[np.int64],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> int:
    """Write the ranges of the structural set, coverage gaps aside, and return their number.

    Ranges are disjoint and ascend: sinks first, then witnesses, the local window last. Some may be empty.

    Args:
        length: L > 0.
        policy: the policy.
        block_scores: bits of the float64 witness score of each block.
        drift: scratch of the size of ``block_scores``.
        starts, stops: receive the ranges.
    """
    sinks = min(policy.sink, length)
    local = policy.local
    if policy.local_in_blocks and local > 0:
        local = (local - 1) * policy.block_size + (length - 1) % policy.block_size + 1
    local_start = max(sinks, length - local)
    starts[0], stops[0] = 0, sinks
    if policy.witness_blocks == 0:
        last = 1
    elif policy.witness == _UNIFORM:
        last = _uniform_ranges(length, sinks, local_start, policy, starts, stops)
    else:
        last = _drift_ranges(length, sinks, local_start, policy, block_scores, drift, starts, stops)
    starts[last], stops[last] = local_start, length
    return last + 1


@kernel
def _uniform_ranges(
    length: int,
    sinks: int,
    local_start: int,
    policy: KernelPolicy,
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> int:
    size = policy.block_size
    blocks = (length - 1) // size + 1
    step = max(1, blocks // (policy.witness_blocks + 1))
    count = min(policy.witness_blocks, (blocks - 1) // step)
    for i in range(1, count + 1):
        start = step * i * size
        starts[i] = max(start, sinks)
        stops[i] = min(start + min(size, length - start), local_start)
    return count + 1


@kernel
def _drift_ranges(
    length: int,
    sinks: int,
    local_start: int,
    policy: KernelPolicy,
    block_scores: NDArray[np.int64],
    drift: NDArray[np.int64],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
) -> int:
    size = policy.block_size
    first = (sinks + size - 1) // size
    blocks = local_start // size if local_start < length else (length - 1) // size + 1
    count = min(blocks, block_scores.size) - first
    if count <= 0:
        return 1
    for i in range(count):
        drift[i] = -_float64_key(block_scores[first + i])
    wanted = min(policy.witness_blocks, count)
    cut, _ = nth_lowest(drift, count, wanted, -_FLOAT64_INFINITY, _FLOAT64_INFINITY)
    at_cut = wanted
    for i in range(count):
        at_cut -= drift[i] < cut
    last = 1
    for i in range(count):
        if drift[i] < cut or (drift[i] == cut and at_cut > 0):
            at_cut -= drift[i] == cut
            starts[last] = (first + i) * size
            stops[last] = starts[last] + min(size, length - starts[last])
            last += 1
    return last


@kernel
def _float64_key(bits: int) -> int:
    """Order-preserving integer of a float64; both zeros are 0, NaN is -inf."""
    magnitude = bits & _FLOAT64_MAGNITUDE
    if magnitude > _FLOAT64_INFINITY:
        return -_FLOAT64_INFINITY
    return -magnitude if bits < 0 else magnitude
