"""The signals on the CPU: one pass per sampled row; a row that is not sampled costs a hash.

What rows learned goes to the memory in a second pass, so that all of a call's rows are compared with what earlier calls
left there.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvplugin.config import Eviction, Mode, Witness
from kvplugin.topology.numba_args import IntArray, Matrix, Scores, matrix, score_bits
from kvplugin.topology.numba_jit import entry, kernel, source_stamp
from kvplugin.topology.numba_marks import Marks, entry_of, new_marks, put_mark
from kvplugin.topology.numba_ranking import nth_lowest
from kvplugin.topology.numba_workspace import workspace
from kvplugin.topology.signals.call import SignalCall
from kvplugin.topology.signals.counters import BOUNDS, COLUMNS_PER_SIGNAL, UNIT, Signal
from kvplugin.topology.table import FIELDS

_COLUMNS = [name for name, _ in FIELDS]
_MODE, _EVICTION, _MAX_ROW_LENGTH = map(_COLUMNS.index, ("mode", "eviction", "max_row_length"))
_ACTS_IN_PREFILL, _ACTS_IN_DECODE = map(_COLUMNS.index, ("acts_in_prefill", "acts_in_decode"))
_BLOCK_SIZE, _SINK, _SINK_IN_BLOCKS = map(_COLUMNS.index, ("block_size", "sink", "sink_in_blocks"))
_LOCAL, _LOCAL_IN_BLOCKS = map(_COLUMNS.index, ("local", "local_in_blocks"))
_WITNESS, _WITNESS_BLOCKS = map(_COLUMNS.index, ("witness", "witness_blocks"))
_DISABLED, _ONLY = list(Mode).index(Mode.DISABLED), list(Mode).index(Mode.ONLY)
_UNIFORM = list(Witness).index(Witness.UNIFORM)
_LOWEST_SCORE, _OLDEST = list(Eviction).index(Eviction.LOWEST_SCORE), list(Eviction).index(Eviction.OLDEST)
_NOTHING_LEAVES = list(Eviction).index(Eviction.NONE)

_SIGNALS = len(Signal)
_SINK_HIT, _LOCAL_HIT, _WITNESS_HIT = int(Signal.SINK_HIT), int(Signal.LOCAL_HIT), int(Signal.WITNESS_HIT)
_EVICTED_SHARE, _EVICTION_MARGIN = int(Signal.EVICTED_SHARE), int(Signal.EVICTION_MARGIN)
_STEP_OVERLAP, _LEADER_OVERLAP = int(Signal.STEP_OVERLAP), int(Signal.LEADER_OVERLAP)
_VALID_DEFICIT, _INVALID_SHARE = int(Signal.VALID_DEFICIT), int(Signal.INVALID_SHARE)

_LOW_32_BITS, _INT32_MAX = 0xFFFFFFFF, 2**31 - 1
_BFLOAT16_INFINITY = 0x7F80
_STRUCTURAL = 2**62
"""Key of a token that cannot leave: above all others."""

_NO_TOKENS, _NO_TAGS = np.empty((0, 0, 0), np.int32), np.empty((0, 0, 2), np.int32)
_NO_SCORES, _NO_REQUESTS, _INT32 = np.empty(0, np.float32), np.empty(0, np.int32), np.dtype(np.int32)


class SignalBatch(NamedTuple):
    """One call as its kernel receives it; ``tokens`` and ``tags`` without a leader where there is no memory."""

    learned: Matrix
    scores: Scores
    singles: NDArray[np.float32]
    facts: NDArray[np.void]
    arms: NDArray[np.int32]
    requests: NDArray[np.int32]
    policies: NDArray[np.int64]
    every: int
    counters: NDArray[np.int64]
    tokens: NDArray[np.int32]
    tags: NDArray[np.int32]
    leader: int


class Scratch(NamedTuple):
    """Room for one row of K slots; see :class:`kvplugin.topology.numba_workspace.Lane`."""

    tokens: NDArray[np.int32]
    keys: NDArray[np.int64]
    table: NDArray[np.int32]
    owner: NDArray[np.int64]
    epoch: NDArray[np.int64]


class Structure(NamedTuple):
    """A row's structural set: run ``i`` of ``runs``, from 1 on, begins at ``i * stride`` and has ``span`` tokens."""

    length: int
    sinks: int
    local_start: int
    stride: int
    runs: int
    span: int


def observe_into(call: SignalCall) -> None:
    """Add to ``call.counters`` and change the memory; see :func:`kvplugin.topology.signals.op.observe_signals`."""
    if not any_sampled(*_flat(call), call.every) or not call.enabled.item():
        return
    rows, width = call.learned.shape
    room = workspace()
    (lane,) = room.lanes(1, width, 0, _INT32)
    batch = SignalBatch(
        matrix(narrowed(call.learned)),
        score_bits(call.scores),
        _singles(call.scores),
        room.facts(call.row_lengths, call.row_live, call.row_phase, None, call.score_start),
        np.zeros(rows, np.int32) if call.row_arm is None else np.ascontiguousarray(call.row_arm.numpy()),
        np.zeros(rows, np.int32) if call.row_request is None else np.ascontiguousarray(call.row_request.numpy()),
        call.policies.numpy(),
        call.every,
        call.counters.numpy(),
        _NO_TOKENS if call.tokens is None else call.tokens.numpy(),
        _NO_TAGS if call.tags is None else call.tags.numpy(),
        call.leader,
    )
    scratch = Scratch(lane.tokens, lane.incoming, lane.table, lane.owner, lane.epoch)
    observe_rows(tuple(batch), width, tuple(scratch))


def _flat(call: SignalCall) -> tuple[IntArray, NDArray[np.int32]]:
    requests = _NO_REQUESTS if call.row_request is None else np.ascontiguousarray(call.row_request.numpy())
    return np.ascontiguousarray(call.row_lengths.numpy()), requests


def narrowed(learned: Tensor) -> Tensor:
    """Indices as int32, which holds all valid ones: one kernel less to compile, and engines have no others."""
    if learned.dtype is torch.int32:
        return learned
    return learned.clamp(-2, torch.iinfo(torch.int32).max).int()


def _singles(scores: Tensor | None) -> NDArray[np.float32]:
    """Scores of single precision as a flat array, indexed as their bits are."""
    return _NO_SCORES if scores is None or scores.dtype is not torch.float32 else matrix(scores.detach()).data


@kernel
def hash32(value: int) -> int:
    """The finaliser of MurmurHash3: 32 bits in, 32 well-mixed bits out."""
    value ^= value >> 16
    value = value * 0x85EBCA6B & _LOW_32_BITS
    value ^= value >> 13
    value = value * 0xC2B2AE35 & _LOW_32_BITS
    return value ^ value >> 16


@kernel
def is_drawn(length: int, request: int, every: int) -> bool:
    """Whether a row is in the sample: bursts of 8 lengths, so that steps can be compared."""
    burst = (length >> 3) * 0x9E3779B1 & _LOW_32_BITS
    return length > 0 and hash32(burst ^ int(request) & _LOW_32_BITS) % every == 0


@entry
def any_sampled(lengths: IntArray, requests: NDArray[np.int32], every: int) -> bool:
    """Whether some row is in the sample. Most decode steps have none, and to pass a whole call costs ten times this."""
    for row in range(lengths.size):  # noqa: SIM110 - numba compiles no generators here
        if is_drawn(lengths[row], requests[row] if requests.size > 0 else 0, every):
            return True
    return False


@kernel
def is_sampled(row: int, batch: SignalBatch) -> bool:
    """Whether a row is observed."""
    facts, arm = batch.facts[row], batch.arms[row]
    length = facts.length
    if not facts.live or arm < 0 or arm >= batch.policies.shape[0]:
        return False
    if not is_drawn(length, batch.requests[row], batch.every):
        return False
    policy = batch.policies[arm]
    acts = policy[_ACTS_IN_PREFILL] if facts.phase == 0 else policy[_ACTS_IN_DECODE]
    return bool(policy[_MODE] != _DISABLED and acts != 0 and length <= policy[_MAX_ROW_LENGTH])


@kernel
def score_at(scores: Scores, singles: NDArray[np.float32], at: int) -> float:
    """The score at an index as a float; NaN is -inf."""
    if not scores.is_half:
        single = float(singles[np.uintp(at)])
        return -np.inf if np.isnan(single) else single
    magnitude = int(scores.half[np.uintp(at)]) & scores.magnitude_mask
    if magnitude > scores.infinity:
        return -np.inf
    value = np.inf
    if magnitude < scores.infinity:
        # Bits of the fraction: where the lowest bit of the exponent, which is all ones in infinity, stands.
        bits, bias = (7, 127) if scores.infinity == _BFLOAT16_INFINITY else (10, 15)
        exponent, fraction = magnitude >> bits, magnitude & ((1 << bits) - 1)
        fraction += (1 << bits) if exponent > 0 else 0
        value = math.ldexp(float(fraction), max(exponent, 1) - bias - bits)
    return -value if scores.half[np.uintp(at)] < 0 else value


@kernel
def read_row(row: int, width: int, batch: SignalBatch, scratch: Scratch) -> tuple[int, int, Marks]:
    """Write a row's unique valid tokens to ``scratch.tokens`` and mark them; return how many, and how many are bad."""
    length, learned, bad = batch.facts[row].length, 0, 0
    marks = new_marks(scratch.table, scratch.owner, scratch.epoch, length, width)
    at = row * batch.learned.row_stride
    for j in range(width):
        token = batch.learned.data[np.uintp(at + j * batch.learned.column_stride)]
        if 0 <= token < length:
            index = entry_of(marks, token)
            if marks.table[index] < marks.base:
                put_mark(marks, index, token, marks.base)
                scratch.tokens[learned] = token
                learned += 1
        elif token != -1:
            bad += 1
    return learned, bad, marks


@kernel
def overlap(row: int, layer: int, length: int, learned: int, batch: SignalBatch, marks: Marks) -> float:
    """Jaccard index of a row's ``learned`` marked tokens and a layer's set of its request at some length, or NaN."""
    request = batch.requests[row]
    slot = request & (batch.tokens.shape[1] - 1)
    if layer < 0 or length <= 0 or batch.tags[layer, slot, 0] != request or batch.tags[layer, slot, 1] != length:
        return np.nan
    visible, stored, shared = batch.facts[row].length, 0, 0
    for token in batch.tokens[layer, slot]:
        if token < 0:
            break
        stored += 1
        if token < visible:
            shared += marks.table[entry_of(marks, token)] >= marks.base
    return shared / (stored + learned - shared) if stored + learned > 0 else np.nan


@kernel
def structure_of(length: int, policy: NDArray[np.int64]) -> Structure:
    """Sinks, local window and uniform witnesses of a row."""
    block, wanted, local = policy[_BLOCK_SIZE], policy[_WITNESS_BLOCKS], policy[_LOCAL]
    blocks = (length + block - 1) // block
    sinks = min(policy[_SINK] * (block if policy[_SINK_IN_BLOCKS] != 0 else 1), length)
    start = (blocks - local) * block if policy[_LOCAL_IN_BLOCKS] != 0 else length - local
    local_start = max(min(max(start, 0), length), sinks)
    count = wanted if policy[_WITNESS] == _UNIFORM else 0
    return Structure(length, sinks, local_start, max(blocks // (wanted + 1), 1) * block, count, block)


@kernel
def run_tokens_before(token: int, structure: Structure) -> int:
    """How many tokens of the runs are below a token."""
    run = token // structure.stride
    whole = min(max(run - 1, 0), structure.runs) * structure.span
    if run < 1 or run > structure.runs:
        return whole
    return whole + min(token - run * structure.stride, structure.span)


@kernel
def order_key(rule: int, slot: int, token: int, at: int, width: int, scores: Scores) -> int:
    """A number that ascends in the order in which tokens leave; ``at`` is the index of the token's score."""
    if rule == _OLDEST:
        return int(token)
    if rule != _LOWEST_SCORE:
        return int(width - slot)
    bits = int(scores.half[np.uintp(at)]) if scores.is_half else int(scores.single[np.uintp(at)])
    magnitude = bits & scores.magnitude_mask
    key = -magnitude if bits < 0 else magnitude
    if magnitude > scores.infinity:  # NaN
        key = -scores.infinity
    return (key << 31) + (_INT32_MAX - int(token))


@kernel
def put_eviction(row: int, learned: int, leaving: int, batch: SignalBatch, scratch: Scratch, found: IntArray) -> None:
    """The signals of an eviction: ``scratch.keys[:learned]`` say in which order tokens leave, and which cannot."""
    scores, keys = batch.scores, scratch.keys
    low, high = _STRUCTURAL, -_STRUCTURAL
    for j in range(learned):
        if keys[j] != _STRUCTURAL:
            low, high = min(low, keys[j]), max(high, keys[j])
    cut, _ = nth_lowest(keys, learned, leaving, low, high)
    weight, evicted = 0.0, 0.0
    lowest, highest, least, most = np.inf, -np.inf, np.inf, -np.inf
    at = row * scores.row_stride + batch.facts[row].start * scores.column_stride
    for j in range(learned):
        score = score_at(scores, batch.singles, at + scratch.tokens[j] * scores.column_stride)
        weight += max(score, 0.0)
        if np.isfinite(score):
            least, most = min(least, score), max(most, score)
        if keys[j] <= cut:
            evicted += max(score, 0.0)
            highest = max(highest, score)
        elif keys[j] != _STRUCTURAL:
            lowest = min(lowest, score)
    if weight > 0.0 and np.isfinite(weight):
        found[_EVICTED_SHARE] = evicted / weight
    if np.isfinite(lowest) and np.isfinite(highest) and most > least:
        found[_EVICTION_MARGIN] = (lowest - highest) / (most - least)


@kernel
def put_structure(row: int, learned: int, width: int, batch: SignalBatch, scratch: Scratch, found: IntArray) -> None:
    """The signals of a row longer than K: what it learned of its structure, and what would have to leave."""
    facts, scores, policy = batch.facts[row], batch.scores, batch.policies[batch.arms[row]]
    structure = structure_of(facts.length, policy)
    merges = policy[_MODE] != _ONLY and policy[_WITNESS] == _UNIFORM and policy[_EVICTION] != _NOTHING_LEAVES
    merges = merges and facts.start >= 0 and facts.start <= scores.columns - facts.length
    at = row * scores.row_stride + facts.start * scores.column_stride
    sinks, local, witnesses = 0, 0, 0
    for j in range(learned):
        token = int(scratch.tokens[j])
        run = token // structure.stride
        key = _STRUCTURAL
        if token < structure.sinks:
            sinks += 1
        elif token >= structure.local_start:
            local += 1
        elif 1 <= run <= structure.runs and token - run * structure.stride < structure.span:
            witnesses += 1
        elif merges:
            key = order_key(policy[_EVICTION], j, token, at + token * scores.column_stride, width, scores)
        scratch.keys[j] = key
    all_witnesses = run_tokens_before(structure.local_start, structure) - run_tokens_before(structure.sinks, structure)
    all_local = facts.length - structure.local_start
    if structure.sinks > 0:
        found[_SINK_HIT] = sinks / structure.sinks
    if all_local > 0:
        found[_LOCAL_HIT] = local / all_local
    if all_witnesses > 0:
        found[_WITNESS_HIT] = witnesses / all_witnesses
    missing = structure.sinks - sinks + all_local - local + all_witnesses - witnesses
    if merges and learned + missing > width:
        put_eviction(row, learned, learned + missing - width, batch, scratch, found)


@kernel
def observe_row(row: int, width: int, batch: SignalBatch, scratch: Scratch, found: IntArray) -> None:
    """Count the signals of a sampled row; ``found`` is scratch for their values, NaN where there is none."""
    facts = batch.facts[row]
    learned, bad, marks = read_row(row, width, batch, scratch)
    most = min(width, facts.length)
    found[:] = np.nan
    found[_INVALID_SHARE] = bad / width
    found[_VALID_DEFICIT] = (most - learned) / most
    if facts.phase != 0 and batch.tokens.shape[0] > 0:
        found[_STEP_OVERLAP] = overlap(row, batch.leader, facts.length - 1, learned, batch, marks)
        found[_LEADER_OVERLAP] = overlap(row, batch.leader - 1, facts.length, learned, batch, marks)
    if facts.length > width:
        put_structure(row, learned, width, batch, scratch, found)
    counts = batch.counters[batch.arms[row], 1 if facts.phase != 0 else 0]
    for signal in range(_SIGNALS):
        if not np.isnan(found[signal]):
            value = min(max(found[signal], 0.0), 1.0)
            bucket = 0
            for bound in BOUNDS:
                bucket += value > bound
            counts[signal * COLUMNS_PER_SIGNAL + bucket] += 1
            counts[signal * COLUMNS_PER_SIGNAL + COLUMNS_PER_SIGNAL - 1] += np.int64(np.floor(value * UNIT + 0.5))


@kernel
def remember_row(row: int, width: int, batch: SignalBatch, scratch: Scratch) -> None:
    """Put what a sampled row learned into the memory."""
    request = batch.requests[row]
    slot = request & (batch.tokens.shape[1] - 1)
    learned, _, _ = read_row(row, width, batch, scratch)
    stored = batch.tokens[batch.leader, slot]
    for j in range(width):
        stored[j] = scratch.tokens[j] if j < learned else -1
    batch.tags[batch.leader, slot, 0], batch.tags[batch.leader, slot, 1] = request, batch.facts[row].length


def _entry(stamp: int) -> Callable[..., int]:
    """Compile the kernel that Python calls. It returns the stamp, which thereby belongs to its cache key."""

    @entry
    def observe_rows(parts: tuple[Any, ...], width: int, room: tuple[Any, ...]) -> int:
        batch, scratch = SignalBatch(*parts), Scratch(*room)
        found = np.empty(_SIGNALS)
        to_remember = 0
        for row in range(batch.facts.size):
            if is_sampled(row, batch):
                observe_row(row, width, batch, scratch, found)
                to_remember += batch.facts[row].phase != 0
        if to_remember > 0 and batch.tokens.shape[0] > 0:
            for row in range(batch.facts.size):
                if batch.facts[row].phase != 0 and is_sampled(row, batch):
                    remember_row(row, width, batch, scratch)
        return stamp

    return observe_rows


_OWN_ENUMS = Path(__file__).with_name("counters.py").read_bytes()
observe_rows = _entry(zlib.crc32(_OWN_ENUMS, source_stamp()))
