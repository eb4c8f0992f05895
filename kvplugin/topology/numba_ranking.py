"""Which learned tokens leave: integer keys that order like what ranks a token, and the cut at the n-th lowest."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from kvplugin.config import Eviction
from kvplugin.topology.numba_args import EVICTIONS, IntArray, KernelPolicy, RowFacts, Scores
from kvplugin.topology.numba_jit import kernel

_LOWEST_SCORE, _OLDEST = EVICTIONS.index(Eviction.LOWEST_SCORE), EVICTIONS.index(Eviction.OLDEST)
_CACHE_LINE = 64


@kernel
def rank_learned(
    tokens: IntArray,
    count: int,
    row: int,
    facts: RowFacts,
    policy: KernelPolicy,
    scores: Scores,
    spare: IntArray,
    keys: IntArray,
) -> tuple[int, int]:
    """Write the key of each of ``tokens[:count]``: the lowest key leaves first. Return the lowest and the highest key.

    All keys are below the highest value of their dtype, which therefore marks tokens that stay.
    """
    if policy.eviction == _LOWEST_SCORE:
        at = row * scores.row_stride + facts.start * scores.column_stride
        _gather_scores(tokens, count, at, facts.length, scores, spare, keys)
        return _order_bits(count, scores.magnitude_mask, scores.infinity, keys)
    if policy.eviction == _OLDEST:
        for j in range(count):
            keys[j] = tokens[j] - policy.highest_index - 1
        return -policy.highest_index - 1, -1
    for j in range(count):
        keys[j] = -j
    return -count, 0


@kernel
def _gather_scores(
    tokens: IntArray, count: int, at: int, length: int, scores: Scores, spare: IntArray, keys: IntArray
) -> None:
    """Write the bits of each token's score to ``keys``."""
    stride = scores.column_stride
    if scores.is_half:
        spare[0] = _read_ahead(scores.half, at, length, stride, count)
        for j in range(count):
            keys[j] = scores.half[np.uintp(at + tokens[j] * stride)]
    else:
        spare[0] = _read_ahead(scores.single, at, length, stride, count)
        if stride == 1:
            for j in range(count):
                keys[j] = scores.single[np.uintp(at + tokens[j])]
        else:
            for j in range(count):
                keys[j] = scores.single[np.uintp(at + tokens[j] * stride)]


@kernel
def _read_ahead(bits: IntArray, at: int, length: int, stride: int, count: int) -> int:
    """Load one score per cache line, in order, where the row has no more lines than it has learned tokens.

    Memory delivers lines in order several times faster than the same lines in the order of the tokens. The sum of what
    was loaded is of no use, except that the compiler cannot drop the loads.
    """
    total = 0
    step = max(1, _CACHE_LINE // (bits.itemsize * max(1, stride)))
    if length <= step * count:
        for token in range(0, length, step):
            total ^= bits[np.uintp(at + token * stride)]
    return total


@kernel
def _order_bits(count: int, magnitude_mask: int, infinity: int, keys: IntArray) -> tuple[int, int]:
    """Turn float bits into integers of the same order: magnitude with sign; both zeros are 0, NaN is -inf."""
    narrow = keys.dtype.type  # arithmetic of one width is vectorised
    mask, highest = narrow(magnitude_mask), narrow(infinity)
    lowest = narrow(-highest)
    low, high = highest, lowest
    for j in range(count):
        magnitude = narrow(keys[j] & mask)
        key = narrow(-magnitude) if keys[j] < narrow(0) else magnitude
        key = lowest if magnitude > highest else key
        keys[j] = key
        low = min(low, key)
        high = max(high, key)
    return low, high


@kernel
def choose_leaving(
    tokens: IntArray,
    keys: IntArray,
    count: int,
    n: int,
    low: int,
    high: int,
    spare: IntArray,
    slots: NDArray[np.int32],
) -> None:
    """Write to ``slots[:n]`` the slots of the ``n`` lowest keys; of equal ones the higher token leaves first.

    Args:
        tokens, keys: ``[:count]`` of each.
        low, high: bounds of the keys, those aside that mark tokens that stay.
        spare: scratch for ties.
    """
    cut, up_to_cut = nth_lowest(keys, count, n, low, high)
    if up_to_cut > n:
        _break_ties(tokens, keys, count, n, cut, spare)
    bound = keys.dtype.type(cut)
    leaving = 0
    for j in range(count):  # without a branch, which would be mispredicted for every other leaving token
        slots[np.uintp(leaving)] = j
        leaving += keys[j] <= bound


@kernel
def _break_ties(tokens: IntArray, keys: IntArray, count: int, n: int, cut: int, spare: IntArray) -> None:
    """Raise the key of those tokens at the cut that stay, so that exactly ``n`` keys are left at or below it."""
    tied, oldest, newest = 0, tokens[0], tokens[0]
    for j in range(count):
        n -= keys[j] < cut
        if keys[j] == cut:
            spare[tied] = -tokens[j]
            tied += 1
            oldest, newest = min(oldest, tokens[j]), max(newest, tokens[j])
    token_cut, _ = nth_lowest(spare, tied, n, -newest, -oldest)
    for j in range(count):
        keys[j] += keys[j] == cut and -tokens[j] > token_cut


@kernel
def nth_lowest(keys: IntArray, count: int, n: int, low: int, high: int) -> tuple[int, int]:
    """Find a cut with at least ``n`` of ``keys[:count]`` at or below it, and fewer than ``n`` below it unless exact.

    No key is below ``low``, and at least ``n`` are not above ``high``. Counting is one vectorised pass; guesses
    alternate between interpolation, which is quick on real scores, and the middle, which bounds the number of passes.

    Returns:
        The cut, and the number of keys at or below it.
    """
    below, up_to = 0, count
    interpolate = True
    while low < high:
        if interpolate:
            share = (n - below) / (up_to - below)
            guess = int(float(low) + (float(high) - float(low)) * share)
            guess = max(low, min(guess, high - 1))
        else:
            guess = (low & high) + ((low ^ high) >> 1)  # floor of the mean, without overflow
        interpolate = not interpolate
        found = _count_up_to(keys, count, guess)
        if found == n:
            return guess, n
        if found > n:
            high, up_to = guess, found
        else:
            low, below = guess + 1, found
    return low, _count_up_to(keys, count, low)


@kernel
def _count_up_to(keys: IntArray, count: int, cut: int) -> int:
    bound = keys.dtype.type(cut)
    above = np.int32(0)  # narrow types keep all vector lanes busy
    for j in range(count):
        above = np.int32(above + np.int32(keys[j] > bound))
    return count - int(above)
