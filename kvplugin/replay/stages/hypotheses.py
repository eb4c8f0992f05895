"""What would explain a drift in attention: known faults, each replayed; one that reproduces the engine is named.

Nothing is guessed. A hypothesis appears in a report only if the replay *with that fault* gives the engine's output and
log-sum-exp within tolerance, which the replay without it does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from kvplugin.replay.capture.records import Record
from kvplugin.replay.compute import Replayed, compute, merge_ranks
from kvplugin.replay.drift import measure
from kvplugin.replay.inputs import Floor, LseBase, Observed, ReplayInputs
from kvplugin.replay.lse_base import to_base_e
from kvplugin.replay.merge import LOG2_E
from kvplugin.replay.pages import PageFormat
from kvplugin.replay.reconstruct import float_query
from kvplugin.replay.reference import Attention
from kvplugin.replay.rope import RopeLayout, RopeState
from kvplugin.replay.stages.selection import group_name
from kvplugin.replay.tolerance import lse_tolerance, out_tolerance


class Hypothesis(NamedTuple):
    """A fault, and the attention an engine with that fault would compute."""

    text: str
    attention: Callable[[], Attention]


def explain(record: Record, others: Sequence[Record], replayed: Replayed) -> list[str]:
    """Texts of the faults under which the replay gives what the engine gave; none where it does without a fault.

    The latter happens in strict comparisons, where other bits are a drift: any fault that changes nothing, such as a
    newest key that was not selected, would "reproduce" them.
    """
    if reproduces(record.observed, replayed.flat, replayed.tokens, record.floor):
        return []
    return [
        f"reproduced by: {hypothesis.text}"
        for hypothesis in hypotheses(record, others, replayed)
        if reproduces(record.observed, hypothesis.attention(), replayed.tokens, record.floor)
    ]


def hypotheses(record: Record, others: Sequence[Record], replayed: Replayed) -> Iterator[Hypothesis]:
    """Every fault that these inputs can have."""
    inputs = record.inputs
    for text, changed in (
        *_dropped_key(inputs),
        *_casts(inputs),
        *_scales(inputs),
        *_layouts(inputs),
        *_selections(record, others),
    ):
        yield Hypothesis(text, lambda changed=changed: compute(changed).flat)  # type: ignore[misc]
    yield from _rank_bases(replayed)


def reproduces(observed: Observed, attention: Attention, tokens: Tensor, floor: Floor) -> bool:
    """Whether the engine's output and log-sum-exp are those of ``attention``."""
    matches = []
    if observed.out is not None:
        expected = attention.out.to(observed.out.dtype)
        tolerance = out_tolerance(expected, attention.lse, tokens, observed.out.dtype)
        matches.append(measure("", observed.out, expected, tolerance, "bhsd", floor=floor.out).within)
    if observed.lse is not None:
        found = to_base_e(observed.lse, observed.lse_base or LseBase.E)
        tolerance = lse_tolerance(attention.lse)
        matches.append(measure("", found, attention.lse, tolerance, "bhs", floor=floor.lse).within)
    return bool(matches) and all(matches)


Changed = Iterator[tuple[str, ReplayInputs]]


def _dropped_key(inputs: ReplayInputs) -> Changed:
    # Rotated first: only what the query sees may change, not where it stands.
    query = torch.stack([float_query(inputs, row) for row in range(len(inputs.q))])
    rotated = replace(inputs, q=query, rope=replace(inputs.rope, q_state=RopeState.POST))
    yield "the newest key is not attended to", replace(rotated, query_position_ids=inputs.query_position_ids - 1)


def _casts(inputs: ReplayInputs) -> Changed:
    pool, rope = inputs.pool, inputs.rope
    text = f"cached keys cast through q's dtype ({str(inputs.q.dtype).removeprefix('torch.')})"
    if rope.k_state is RopeState.PRE and rope.k_dtype is not inputs.q.dtype:
        yield f"{text} after the rotation", replace(inputs, rope=replace(rope, k_dtype=inputs.q.dtype))
    if pool.format is not PageFormat.FP8_DS_MLA and pool.keys.dtype is not inputs.q.dtype:
        keys = pool.keys.to(inputs.q.dtype).to(pool.keys.dtype)
        yield f"{text} before use", replace(inputs, pool=replace(pool, keys=keys))


def _scales(inputs: ReplayInputs) -> Changed:
    """The scale of a head size that counts the RoPE dimensions wrongly, or the default one."""
    size = 1 / inputs.scale**2
    rotary, dim = inputs.rope.rotary_dim, inputs.q.shape[-1]
    for text, other in (
        (f"scale without the {rotary} RoPE dimensions", size - rotary),
        (f"scale with {rotary} RoPE dimensions too many", size + rotary),
        (f"scale of the whole row, 1/sqrt({dim})", float(dim)),
        ("no scale", 1.0),
    ):
        if other > 0 and not math.isclose(other, size, rel_tol=1e-6):
            yield f"{text}: {other**-0.5:.6g} instead of {inputs.scale:.6g}", replace(inputs, scale=other**-0.5)


def _layouts(inputs: ReplayInputs) -> Changed:
    rope = inputs.rope
    if RopeState.PRE in (rope.q_state, rope.k_state):
        other = RopeLayout.NEOX if rope.layout is RopeLayout.INTERLEAVED else RopeLayout.INTERLEAVED
        yield f"RoPE layout {other} instead of {rope.layout}", replace(inputs, rope=replace(rope, layout=other))


def _selections(record: Record, others: Sequence[Record]) -> Changed:
    inputs = record.inputs
    if inputs.selection is None:
        return
    yield "the selection is ignored: dense attention", replace(inputs, selection=None)
    if record.selection_before is not None:
        before = record.selection_before.unsqueeze(0)
        yield "the selection before the policy, not the one after it", replace(inputs, selection=before)
    for other in others:
        selection = other.inputs.selection
        if selection is not None and selection.shape[:2] == inputs.selection.shape[:2]:
            text = f"the selection of {group_name(other)}, not that of {group_name(record)}"
            yield text, replace(inputs, selection=selection)


def _rank_bases(replayed: Replayed) -> Iterator[Hypothesis]:
    """One rank's log-sum-exp merged in base 2 although the others are in base e."""
    if replayed.ranks is None:
        return
    for rank in range(len(replayed.ranks.lse)):
        lse = replayed.ranks.lse.clone()
        lse[rank] *= LOG2_E
        wrong = Attention(replayed.ranks.out, lse)
        yield Hypothesis(f"rank {rank}'s LSE is in base 2", lambda wrong=wrong: merge_ranks(wrong))  # type: ignore[misc]
