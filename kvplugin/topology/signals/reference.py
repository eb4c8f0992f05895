"""The signals in plain Python, one row and one set at a time, obviously right. The oracle of the other forms."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping

from kvplugin.config import Eviction, Mode, Witness
from kvplugin.topology.params import PolicyParams
from kvplugin.topology.reference import best_first, structure_of
from kvplugin.topology.signals.call import SignalCall
from kvplugin.topology.signals.counters import BOUNDS, UNIT, Signal, columns_of
from kvplugin.topology.table import tables_arms

LOW_32_BITS = 0xFFFFFFFF


def hash32(value: int) -> int:
    """The finaliser of MurmurHash3: 32 bits in, 32 well-mixed bits out."""
    value ^= value >> 16
    value = value * 0x85EBCA6B & LOW_32_BITS
    value ^= value >> 13
    value = value * 0xC2B2AE35 & LOW_32_BITS
    return value ^ value >> 16


def is_sampled(length: int, request: int, every: int) -> bool:
    """Whether rows of this length and request are observed: bursts of 8 lengths, so that steps can be compared."""
    burst = (length >> 3) * 0x9E3779B1 & LOW_32_BITS
    return hash32(burst ^ request & LOW_32_BITS) % every == 0


def observe_into(call: SignalCall) -> None:
    """Add to ``call.counters`` and change the memory; see :func:`kvplugin.topology.signals.op.observe_signals`."""
    if not call.enabled.item():
        return
    arms = tables_arms(call.policies)
    tokens = None if call.tokens is None else call.tokens.clone()
    tags = None if call.tags is None else call.tags.clone()
    for row, values in enumerate(call.learned.tolist()):
        arm = 0 if call.row_arm is None else int(call.row_arm[row])
        phase = 1 if call.row_phase is None or call.row_phase[row] else 0
        request = 0 if call.row_request is None else int(call.row_request[row])
        length = int(call.row_lengths[row])
        if (call.row_live is not None and not call.row_live[row]) or not 0 <= arm < len(arms):
            continue
        p = arms[arm]
        acts = p.mode is not Mode.DISABLED and (p.acts_in_decode if phase else p.acts_in_prefill)
        if not acts or not 0 < length <= p.max_row_length or not is_sampled(length, request, call.every):
            continue
        found: dict[Signal, float] = dict(_of_the_row(call, row, values, length, p))
        if phase == 1 and call.tokens is not None and call.tags is not None and tokens is not None and tags is not None:
            learned, leader, slot = valid_tokens(values, length), call.leader, request & (tokens.shape[1] - 1)
            for signal, layer, other in (
                (Signal.STEP_OVERLAP, leader, length - 1),
                (Signal.LEADER_OVERLAP, leader - 1, length),
            ):
                if layer >= 0 and other > 0 and tags[layer, slot].tolist() == [request, other]:
                    stored = {token for token in tokens[layer, slot].tolist() if token != -1}
                    if stored or learned:
                        found[signal] = len(stored & set(learned)) / len(stored | set(learned))
            call.tokens[leader, slot] = -1
            for place, token in enumerate(learned):
                call.tokens[leader, slot, place] = token
            call.tags[leader, slot, 0], call.tags[leader, slot, 1] = request, length
        for signal, value in found.items():
            columns = columns_of(signal)
            call.counters[arm, phase, columns[bisect_left(BOUNDS, value)]] += 1
            call.counters[arm, phase, columns[-1]] += math.floor(value * UNIT + 0.5)


def valid_tokens(values: list[int], length: int) -> dict[int, None]:
    """The learned tokens of a row: a set that keeps slot order."""
    return dict.fromkeys(value for value in values if 0 <= value < length)


def _of_the_row(
    call: SignalCall, row: int, values: list[int], length: int, p: PolicyParams
) -> Iterator[tuple[Signal, float]]:
    """The signals for which nothing but the row is needed."""
    learned, width = valid_tokens(values, length), p.width
    yield Signal.INVALID_SHARE, sum(value != -1 and not 0 <= value < length for value in values) / width
    most = min(width, length)
    yield Signal.VALID_DEFICIT, max(0, most - len(learned)) / most
    if length <= width:
        return
    structure = structure_of(length, p, None)
    for signal, kind in (
        (Signal.SINK_HIT, structure.sink),
        (Signal.LOCAL_HIT, structure.local),
        (Signal.WITNESS_HIT, structure.witness),
    ):
        if kind:
            yield signal, len(kind & learned.keys()) / len(kind)
    start = 0 if call.score_start is None else int(call.score_start[row])
    merges = p.mode.merges or p.mode is Mode.OBSERVE
    if not merges or p.witness is not Witness.UNIFORM or p.eviction is Eviction.NONE:
        return
    if call.scores is None or start < 0 or start + length > call.scores.shape[1]:
        return
    scores = {token: float(call.scores[row, start + token].float()) for token in learned}
    scores = {token: -math.inf if math.isnan(score) else score for token, score in scores.items()}
    leaving = max(0, len(learned) + len(structure.all - learned.keys()) - width)
    if leaving:
        ranked = best_first([token for token in learned if token not in structure.all], p, scores)
        yield from _of_the_eviction(ranked[:-leaving], ranked[-leaving:], scores)


def _of_the_eviction(
    kept: list[int], evicted: list[int], scores: Mapping[int, float]
) -> Iterator[tuple[Signal, float]]:
    """What leaves, and how far below what stays; ``scores`` are those of all learned tokens."""
    weight = sum(max(score, 0.0) for score in scores.values())
    if 0 < weight < math.inf:
        share = sum(max(scores[token], 0.0) for token in evicted) / weight
        yield Signal.EVICTED_SHARE, min(share, 1.0)
    finite = [score for score in scores.values() if math.isfinite(score)]
    lowest = min((scores[token] for token in kept), default=math.inf)
    highest = max(scores[token] for token in evicted)
    if math.isfinite(lowest) and math.isfinite(highest) and max(finite) > min(finite):
        margin = (lowest - highest) / (max(finite) - min(finite))
        yield Signal.EVICTION_MARGIN, min(max(margin, 0.0), 1.0)
