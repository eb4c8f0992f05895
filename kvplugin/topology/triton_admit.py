"""Which rows the policy acts on, and what it counts, for kernels."""

from __future__ import annotations

import triton
import triton.language as tl

from kvplugin.config import Mode
from kvplugin.topology.counters import Counter
from kvplugin.topology.table import FIELDS
from kvplugin.topology.triton_plan import MODE, OBSERVE
from kvplugin.topology.triton_row import EVICTION, LOWEST_SCORE
from kvplugin.topology.triton_structure import column

DISABLED, MERGE, COMPRESS = (
    tl.constexpr(list(Mode).index(mode)) for mode in (Mode.DISABLED, Mode.SPARSE_MERGE, Mode.COMPRESS_SPARSE)
)
ACTS_IN_PREFILL, ACTS_IN_DECODE = column("acts_in_prefill"), column("acts_in_decode")
MAX_WIDTH, MAX_ROWS, MAX_ELEMENTS = column("max_width"), column("max_rows"), column("max_elements")
MAX_ROW_LENGTH = column("max_row_length")
POLICY_COLUMNS = tl.constexpr(len(FIELDS))

COUNTERS = tl.constexpr(len(Counter))
CELLS = tl.constexpr(triton.next_power_of_2(len(Counter)))
LEFT_ALONE = tl.constexpr(-1)
"""State of a row that is not looked at: dead, or its arm is off."""
ACTS = tl.constexpr(0)
"""State of a row that the policy acts on; any other state is the counter of a bypass reason."""
UNKNOWN_ARM, PHASE = tl.constexpr(int(Counter.BYPASS_UNKNOWN_ARM)), tl.constexpr(int(Counter.BYPASS_PHASE))
TOO_WIDE, TOO_LONG = tl.constexpr(int(Counter.BYPASS_MAX_WIDTH)), tl.constexpr(int(Counter.BYPASS_MAX_ROW_LENGTH))
TOO_MANY, TOO_MUCH = tl.constexpr(int(Counter.BYPASS_MAX_ROWS)), tl.constexpr(int(Counter.BYPASS_MAX_ELEMENTS))
BAD_OFFSET, NO_SCORES = tl.constexpr(int(Counter.BYPASS_BAD_OFFSET)), tl.constexpr(int(Counter.BYPASS_NO_SCORES))
SEEN = tl.constexpr(int(Counter.SEEN))


@triton.jit
def merges(mode):
    """Whether a mode joins structure and learned tokens."""
    return (mode == MERGE) | (mode == COMPRESS)


@triton.jit
def phase_and_arm(r, row_phase, row_arm, arms):
    """Phase of row ``r``, its arm, and whether there is such an arm (0 stands for one that there is not)."""
    phase = tl.full((), 1, tl.int32)
    if row_phase is not None:
        phase = (tl.load(row_phase + r) != 0).to(tl.int32)
    arm = tl.full((), 0, tl.int32)
    if row_arm is not None:
        arm = tl.load(row_arm + r)
    known = (arm >= 0) & (arm < arms)
    return phase, tl.where(known, arm, 0), known


@triton.jit
def is_live(r, length, row_live, enabled):
    """Whether row ``r`` is to be looked at."""
    live = (tl.load(enabled) != 0) & (length >= 0)
    if row_live is not None:
        live &= tl.load(row_live + r) != 0
    return live


@triton.jit
def call_state(policy, rows, width):
    """State that the shape of the call gives all its rows."""
    state = tl.full((), ACTS, tl.int32)
    state = tl.where(rows.to(tl.int64) * width > tl.load(policy + MAX_ELEMENTS), TOO_MUCH, state)
    state = tl.where(rows > tl.load(policy + MAX_ROWS), TOO_MANY, state)
    return tl.where(width > tl.load(policy + MAX_WIDTH), TOO_WIDE, state)


@triton.jit
def in_phase(policy, phase):
    """Whether the policy acts in a phase."""
    return tl.load(policy + tl.where(phase == 0, ACTS_IN_PREFILL, ACTS_IN_DECODE)) != 0


@triton.jit
def row_state(policy, known_arm, phase, length, low, start, rows, width, columns, highest_index, has_scores):
    """State of a live row whose numbers are int64; ``columns`` and ``start`` say where its scores lie."""
    mode = tl.load(policy + MODE)
    needs = (tl.load(policy + EVICTION) == LOWEST_SCORE) & (merges(mode) | (mode == OBSERVE))
    # Rearranged so that no intermediate result leaves int64, whatever the row holds.
    beyond = (has_scores == 0) | (start < 0) | (start > columns - length)
    state = tl.where(needs & (length > 0) & beyond, NO_SCORES, ACTS)
    state = tl.where((low < 0) | (low - 1 > highest_index - length), BAD_OFFSET, state)
    state = tl.where(length > tl.load(policy + MAX_ROW_LENGTH), TOO_LONG, state)
    state = tl.where(in_phase(policy, phase), state, PHASE)
    whole = call_state(policy, rows, width)
    state = tl.where(whole != ACTS, whole, state)
    state = tl.where(mode == DISABLED, LEFT_ALONE, state)
    return tl.where(known_arm, state, UNKNOWN_ARM)


@triton.jit
def add_counts(counters, r, stripes, arms, arm, phase, values):
    """Add int32 ``[CELLS]`` to the counters of an arm and phase, in the row's stripe."""
    cell = tl.arange(0, CELLS)
    line = ((r % stripes) * arms + arm).to(tl.int64) * 2 + phase
    mask = (cell < COUNTERS) & (values != 0)
    tl.atomic_add(counters + line * COUNTERS + cell, values.to(tl.int64), mask=mask, sem="relaxed")


@triton.jit
def bypass_counts(state):
    """Counts of a bypassed row."""
    cell = tl.arange(0, CELLS)
    return ((cell == SEEN) | (cell == state)).to(tl.int32)
