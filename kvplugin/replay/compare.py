"""``compare``: validate once, replay, and measure every difference that the inputs allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from kvplugin.replay.compute import Replayed, compute, oracle_states
from kvplugin.replay.drift import Drift, measure
from kvplugin.replay.fingerprint import ContentDigest, request_digest
from kvplugin.replay.inputs import CompareSettings, Observed, ReplayInputs
from kvplugin.replay.log_probs import selected_log_probs
from kvplugin.replay.lse_base import named_ratio, to_base_e
from kvplugin.replay.merge import merge_states
from kvplugin.replay.oracle import MergeOracle, transformer_engine_oracle
from kvplugin.replay.provenance import fingerprints, provenance
from kvplugin.replay.reconstruct import requests
from kvplugin.replay.reference import Attention
from kvplugin.replay.report import ComparisonReport, UnavailableOracle
from kvplugin.replay.tolerance import log_prob_tolerance, lse_tolerance, out_tolerance
from kvplugin.replay.validate import check_content, check_prefix, validate

OUT_AXES = ("row", "head", "query", "element")
LSE_AXES = OUT_AXES[:3]


class Comparison(NamedTuple):
    """The report, and the tensors it was measured on."""

    report: ComparisonReport
    replayed: Replayed


@cache
def default_oracles() -> tuple[MergeOracle, ...]:
    """The oracles of this machine, probed once per process."""
    return (transformer_engine_oracle(),)


def compare(
    inputs: ReplayInputs,
    observed: Observed | None = None,
    settings: CompareSettings | None = None,
    oracles: Sequence[MergeOracle] | None = None,
) -> Comparison:
    """Replay one decode step and compare: replay with full prefill, merge forms with each other, engine with replay.

    Args:
        observed: what the engine computed; without it the paged path alone is checked.
        oracles: second opinions on the merge; default :func:`default_oracles`.

    Raises:
        ArgumentError: the inputs are malformed; field, batch row, slot and value are named.
        IdentityError: the engine's bookkeeping contradicts itself, or a prefix is not what it was.
    """
    observed, settings = observed or Observed(), settings or CompareSettings()
    validate(inputs, observed, settings)
    replayed = compute(inputs, settings)
    digests = _checked_content(inputs, replayed)
    notes: list[str] = []
    drifts = [*_prefill_drifts(inputs, replayed), *_hierarchy_drifts(inputs, replayed)]
    drifts += _observed_drifts(inputs, observed, settings, replayed, notes)
    drifts += _rank_drifts(inputs, observed, settings, replayed, notes)
    oracle_drifts, unavailable = _oracle_drifts(replayed, default_oracles() if oracles is None else oracles)
    report = ComparisonReport(
        drifts=[*drifts, *oracle_drifts],
        notes=notes,
        fingerprints=fingerprints(inputs, settings, replayed, digests),
        provenance=provenance(inputs, settings, replayed),
        unavailable=unavailable,
    )
    return Comparison(report, replayed)


def _checked_content(inputs: ReplayInputs, replayed: Replayed) -> list[ContentDigest]:
    """Digests of each request's content, which must be finite, and its prefix what it was."""
    found = []
    for request, states in zip(requests(inputs), replayed.states, strict=True):
        if not states.finite:  # the content, or a product of large but finite values
            check_content(inputs, request)
        prefix = inputs.prefixes[request.row] if inputs.prefixes else None
        found.append(request_digest(inputs, request, (prefix and prefix.length) or 0))
        check_prefix(prefix, request.row, found[-1])
    return found


def _prefill_drifts(inputs: ReplayInputs, replayed: Replayed) -> Iterator[Drift]:
    dtype = inputs.final_dtype
    yield from _pair("replay vs prefill", replayed.flat, replayed.prefill, replayed.tokens, dtype)
    if inputs.head is not None and bool(inputs.head.mask.any()):
        found = selected_log_probs(replayed.flat.out.to(dtype), inputs.head)
        expected = selected_log_probs(replayed.prefill.out.to(dtype), inputs.head)
        tolerance = log_prob_tolerance(expected.logits, inputs.head.weight.shape[1], dtype)
        yield measure(
            "log-prob, replay vs prefill",
            found.log_probs,
            expected.log_probs,
            tolerance,
            ("row", "query"),
            active=inputs.head.mask,
        )


def _hierarchy_drifts(inputs: ReplayInputs, replayed: Replayed) -> Iterator[Drift]:
    if replayed.hierarchical is not None:
        yield from _pair(
            "hierarchical vs flat", replayed.hierarchical, replayed.flat, replayed.tokens, inputs.final_dtype
        )


def _observed_drifts(
    inputs: ReplayInputs, observed: Observed, settings: CompareSettings, replayed: Replayed, notes: list[str]
) -> Iterator[Drift]:
    floor = settings.floor
    if observed.out is not None:
        expected = replayed.flat.out.to(observed.out.dtype)
        tolerance = out_tolerance(expected, replayed.flat.lse, replayed.tokens, observed.out.dtype)
        yield measure(
            "out, engine vs replay",
            observed.out,
            expected,
            tolerance,
            OUT_AXES,
            floor=floor.out,
            bitwise=settings.strict,
        )
    if observed.lse is not None and observed.lse_base is not None:
        found = to_base_e(observed.lse, observed.lse_base)
        drift = _lse_drift("lse, engine vs replay", found, replayed.flat.lse, settings)
        if not drift.within and (ratio := named_ratio(found, replayed.flat.lse)):
            notes.append(f"the engine's LSE is {ratio} times the replay's, stated base {observed.lse_base}: wrong base")
        yield drift


def _rank_drifts(
    inputs: ReplayInputs, observed: Observed, settings: CompareSettings, replayed: Replayed, notes: list[str]
) -> Iterator[Drift]:
    if replayed.ranks is None:
        return
    for rank in range(len(replayed.ranks.lse)):
        if observed.rank_out is not None:
            found = observed.rank_out[rank]
            expected = replayed.ranks.out[rank].to(found.dtype)
            tolerance = out_tolerance(expected, replayed.ranks.lse[rank], replayed.tokens, found.dtype)
            name = f"rank {rank} out, engine vs replay"
            yield measure(name, found, expected, tolerance, OUT_AXES, floor=settings.floor.out, bitwise=settings.strict)
        if observed.rank_lse is not None and observed.lse_base is not None:
            found = to_base_e(observed.rank_lse[rank], observed.lse_base)
            drift = _lse_drift(f"rank {rank} lse, engine vs replay", found, replayed.ranks.lse[rank], settings)
            if not drift.within and (ratio := named_ratio(found, replayed.ranks.lse[rank])):
                notes.append(
                    f"rank {rank}'s LSE is {ratio} times the replay's, stated base {observed.lse_base}: wrong base"
                )
            yield drift


def _oracle_drifts(replayed: Replayed, oracles: Sequence[MergeOracle]) -> tuple[list[Drift], list[UnavailableOracle]]:
    drifts: list[Drift] = []
    unavailable: list[UnavailableOracle] = []
    for oracle in oracles:
        if oracle.merge is None:
            unavailable.append(UnavailableOracle(name=oracle.name, reason=oracle.reason))
            continue
        found, expected = [], []
        for states in replayed.states:
            for out, lse in oracle_states(states):
                found.append(oracle.merge(out, lse))
                expected.append(merge_states(out, lse))
        if found:
            a, b = _rows(found), _rows(expected)
            tokens = replayed.tokens[replayed.tokens > 0].view(-1, 1, 1, 1)
            drifts += _pair(f"{oracle.name} merge vs replay", a, b, tokens, torch.float32)
    return drifts, unavailable


def _rows(parts: list[Attention]) -> Attention:
    """States of single queries as ``[N, Hq, 1, ...]``."""
    return Attention(torch.stack([part.out for part in parts]), torch.stack([part.lse for part in parts]))


def _pair(name: str, found: Attention, expected: Attention, tokens: Tensor, dtype: torch.dtype) -> Iterator[Drift]:
    """Drift of output, cast down once, and of log-sum-exp."""
    out = expected.out.to(dtype)
    yield measure(f"out, {name}", found.out.to(dtype), out, out_tolerance(out, expected.lse, tokens, dtype), OUT_AXES)
    yield measure(f"lse, {name}", found.lse, expected.lse, lse_tolerance(expected.lse), LSE_AXES)


def _lse_drift(name: str, found: Tensor, expected: Tensor, settings: CompareSettings) -> Drift:
    return measure(
        name,
        found,
        expected,
        lse_tolerance(expected),
        LSE_AXES,
        floor=settings.floor.lse,
        bitwise=settings.strict,
    )
