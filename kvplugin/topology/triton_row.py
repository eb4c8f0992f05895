"""The selection of one row, for kernels: which learned tokens keep their slots and which tokens come in.

Nothing is sorted and nothing is stored on the way. A row's selection is a *plan* of a few numbers:

* learned tokens stay in their slots if they are candidates, at or above the eviction cut, and below ``window_start``;
* the structural tokens from ``structure_from`` on, with the local window grown back to ``window_start``, take the other
  slots in order.

That is possible because rows are sets and a selection either fills all slots or holds no learned token. Both cuts are
found by bisection: over order-preserving keys of the scores, then over token ids among ties, and over positions. A row
of at most ``BLOCK`` slots stays in registers; a wider one is read again in every pass, tile by tile.

A *row* is the tuple ``(pointer, stride, width, low, length, check_duplicates)``: address and stride of its slots, the
number of slots, its offset, L, and the setting.
"""

from __future__ import annotations

import triton
import triton.language as tl

from kvplugin.config import Eviction
from kvplugin.topology.triton_structure import column, is_structural

EVICTION = column("eviction")
LOWEST_SCORE = tl.constexpr(list(Eviction).index(Eviction.LOWEST_SCORE))
OLDEST = tl.constexpr(list(Eviction).index(Eviction.OLDEST))
NOTHING_LEAVES = tl.constexpr(list(Eviction).index(Eviction.NONE))

NO_KEY = tl.constexpr(0xFFFFFFFF)
"""Key of what is no candidate: above the key of +inf, so that no cut reaches it."""
HIGHEST_BIT = tl.constexpr(0x80000000)
INT32_MAX = tl.constexpr(2**31 - 1)


@triton.jit
def read_slots(row, first, BLOCK: tl.constexpr):
    """One tile of a row: raw values, logical tokens (0 where there is none), valid and bad slots."""
    pointer, stride, width, low, length, check_duplicates = row
    slot = first + tl.arange(0, BLOCK)
    inside = slot < width
    value = tl.load(pointer + slot * stride, mask=inside, other=-1)
    start = low.to(value.dtype)
    # Compared before it is subtracted from: a garbage value may be anything.
    valid = inside & (value >= start)
    token = tl.where(valid, value - start, 0)
    valid &= token < length
    token = tl.where(valid, token, 0).to(tl.int32)
    bad = inside & (valid == 0) & (value != -1) & (length > 0)
    if check_duplicates != 0:
        repeated = tl.full((BLOCK,), 0, tl.int32)
        for other in range(width):
            same = tl.load(pointer) == value
            repeated |= (same & (slot > other)).to(tl.int32)
            pointer += stride
        repeated = (repeated != 0) & valid
        bad |= repeated
        valid &= repeated == 0
    return value, token, valid, bad


@triton.jit
def eviction_keys(token, candidate, first, policy, scores, width, BLOCK: tl.constexpr, HAS_SCORES: tl.constexpr):
    """uint32 keys that ascend in the order in which candidates leave; equal only for equal scores."""
    rule = tl.load(policy + EVICTION)
    key = token
    if rule != OLDEST:
        key = width - (first + tl.arange(0, BLOCK))
    if HAS_SCORES:
        if rule == LOWEST_SCORE:
            pointer, stride = scores
            score = tl.load(pointer + token.to(tl.int64) * stride, mask=candidate, other=0.0).to(tl.float32)
            bits = score.to(tl.int32, bitcast=True)
            bits = tl.where(score == 0.0, 0, bits)  # -0.0 equals 0.0
            bits = tl.where(score != score, -8388608, bits)  # NaN counts as -inf
            # Read as integers, negative floats ascend in the wrong direction: flip all their bits but the sign.
            key = bits ^ ((bits >> 31) & 0x7FFFFFFF) ^ -2147483648
    return tl.where(candidate, key.to(tl.uint32, bitcast=True), NO_KEY)


@triton.jit
def no_keys(candidate):
    """Keys where nothing has to leave, so that scores need not be read."""
    return tl.where(candidate, 0, NO_KEY).to(tl.uint32)


@triton.jit
def tie_keys(token, tied):
    """uint32 keys that ascend in the order in which candidates of equal score leave: higher token ids first."""
    return tl.where(tied, (token ^ INT32_MAX).to(tl.uint32, bitcast=True), NO_KEY)


@triton.jit
def candidates(token, valid, structural, structure_from):
    """Valid learned tokens that no structural token stands for."""
    return valid & ((structural & (token >= structure_from)) == 0)


@triton.jit
def stays(token, candidate, key, cut):
    """Candidates that are not evicted."""
    least_key, least_tie_key = cut
    tied = key == least_key
    return candidate & ((key > least_key) | (tied & (tie_keys(token, tied) >= least_tie_key)))


@triton.jit
def keep_all():
    """The cut that nothing falls under."""
    zero = tl.full((), 0, tl.uint32)
    return zero, zero


@triton.jit
def keep_none():
    """The cut that every candidate falls under."""
    most = tl.full((), 0xFFFFFFFF, tl.uint32)
    return most, most


@triton.jit
def _tile_keys(
    row, first, structure, policy, scores, LISTED: tl.constexpr, BLOCK: tl.constexpr, HAS_SCORES: tl.constexpr
):
    _, token, valid, _ = read_slots(row, first, BLOCK)
    candidate = candidates(token, valid, is_structural(token, structure, LISTED), 0)
    return token, eviction_keys(token, candidate, first, policy, scores, row[2], BLOCK, HAS_SCORES)


@triton.jit
def eviction_cut(
    need,
    tile,
    row,
    structure,
    policy,
    scores,
    LISTED: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_TILE: tl.constexpr,
    HAS_SCORES: tl.constexpr,
):
    """The cut under which exactly ``need`` candidates fall; ``tile`` holds tokens and keys of a row of one tile.

    Each loop looks for the largest cut with at most ``need`` keys below it, from the highest bit on, and ends early
    where it has met ``need``.
    """
    width = row[2]
    token, key = tile
    cut, tie_cut = tl.full((), 0, tl.uint32), tl.full((), 0, tl.uint32)
    under = tl.full((), 0, tl.int32)
    bit = tl.where(need > 0, tl.full((), HIGHEST_BIT, tl.uint32), tl.full((), 0, tl.uint32))
    while bit != 0:
        probe = cut | bit
        count = tl.full((), 0, tl.int32)
        if ONE_TILE:
            count = tl.sum((key < probe).to(tl.int32), 0)
        else:
            for first in range(0, width, BLOCK):
                _, more = _tile_keys(row, first, structure, policy, scores, LISTED, BLOCK, HAS_SCORES)
                count += tl.sum((more < probe).to(tl.int32), 0)
        fits = count <= need
        cut = tl.where(fits, probe, cut)
        under = tl.where(fits, count, under)
        bit = tl.where(count == need, bit * 0, bit >> 1)
    left = need - under
    under = under * 0
    bit = tl.where(left > 0, tl.full((), HIGHEST_BIT, tl.uint32), tl.full((), 0, tl.uint32))
    while bit != 0:
        probe = tie_cut | bit
        count = tl.full((), 0, tl.int32)
        if ONE_TILE:
            count = tl.sum((tie_keys(token, key == cut) < probe).to(tl.int32), 0)
        else:
            for first in range(0, width, BLOCK):
                also, more = _tile_keys(row, first, structure, policy, scores, LISTED, BLOCK, HAS_SCORES)
                count += tl.sum((tie_keys(also, more == cut) < probe).to(tl.int32), 0)
        tie_cut = tl.where(count <= left, probe, tie_cut)
        bit = tl.where(count == left, bit * 0, bit >> 1)
    return cut, tie_cut
