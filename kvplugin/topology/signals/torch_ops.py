"""The signals in vectorised torch, on any device; it waits for none and can be captured in a graph.

Shapes do not depend on values, so that all rows cost what a sampled one does. Long batches are cut into chunks of rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from kvplugin.config import Eviction, Mode, Witness
from kvplugin.topology.signals.call import SignalCall
from kvplugin.topology.signals.counters import BOUNDS, COLUMNS_PER_SIGNAL, UNIT, Signal
from kvplugin.topology.table import FIELDS
from kvplugin.topology.torch_ops import CHUNK_SLOTS
from kvplugin.topology.torch_structure import comparable

LOW_32_BITS = 0xFFFFFFFF
_MODES, _WITNESSES, _EVICTIONS = list(Mode), list(Witness), list(Eviction)
_COLUMNS = [name for name, _ in FIELDS]
_LAST = torch.iinfo(torch.int64).max
"""Sort key of what cannot leave."""

Values = Iterator[tuple[Signal, Tensor, Tensor]]
"""A signal, the value of each row, float64 ``[T]``, and the rows that have one, bool ``[T]``."""


class Rows(NamedTuple):
    """Metadata of the rows, int64 ``[T]``; ``policy`` is int64 ``[T, len(FIELDS)]``; ``length`` is 0 if not sampled."""

    sampled: Tensor
    length: Tensor
    decodes: Tensor
    arm: Tensor
    request: Tensor
    start: Tensor
    policy: Tensor

    def setting(self, name: str) -> Tensor:
        """A setting of each row's policy, int64 ``[T]``."""
        return self.policy[:, _COLUMNS.index(name)]

    def cut(self, rows: slice) -> Rows:
        """Some of the rows."""
        return Rows(*(each[rows] for each in self))


def hash32(value: Tensor) -> Tensor:
    """The finaliser of MurmurHash3: 32 bits in, 32 well-mixed bits out, in int64."""
    value = value ^ (value >> 16)
    value = value * 0x85EBCA6B & LOW_32_BITS
    value = value ^ (value >> 13)
    value = value * 0xC2B2AE35 & LOW_32_BITS
    return value ^ (value >> 16)


def rows_of(call: SignalCall) -> Rows:
    """Which rows are sampled: bursts of 8 lengths, so that steps can be compared."""
    length, zero = call.row_lengths.long(), torch.zeros_like(call.row_lengths, dtype=torch.int64)
    arm = zero if call.row_arm is None else call.row_arm.long()
    request = zero if call.row_request is None else call.row_request.long()
    start = zero if call.score_start is None else call.score_start.long()
    decodes = zero == 0 if call.row_phase is None else call.row_phase != 0
    sampled = (call.enabled != 0) & (arm >= 0) & (arm < len(call.policies)) & (length > 0)
    if call.row_live is not None:
        sampled &= call.row_live
    arm = arm.clamp(0, len(call.policies) - 1)
    rows = Rows(sampled, length, decodes, arm, request, start, call.policies[arm])
    burst = (length.clamp(min=0) >> 3) * 0x9E3779B1 & LOW_32_BITS
    sampled &= hash32(burst ^ (request & LOW_32_BITS)) % call.every == 0
    sampled &= torch.where(decodes, rows.setting("acts_in_decode"), rows.setting("acts_in_prefill")) != 0
    sampled &= (rows.setting("mode") != _MODES.index(Mode.DISABLED)) & (length <= rows.setting("max_row_length"))
    return rows._replace(sampled=sampled, length=torch.where(sampled, length, 0))


class Structure(NamedTuple):
    """Structural sets in closed form, int64 ``[T, 1]``; run ``i`` of ``runs``, from 1 on, begins at ``i * stride``."""

    length: Tensor
    sinks: Tensor
    local_start: Tensor
    stride: Tensor
    runs: Tensor
    span: Tensor

    @classmethod
    def of(cls, rows: Rows) -> Structure:
        """Sinks, local window and uniform witnesses."""

        def setting(name: str) -> Tensor:
            return rows.setting(name).unsqueeze(1)

        length, block = rows.length.unsqueeze(1), setting("block_size").clamp(min=1)
        sinks = torch.minimum(setting("sink") * torch.where(setting("sink_in_blocks") != 0, block, 1), length)
        blocks, local = (length + block - 1) // block, setting("local")
        start = torch.where(setting("local_in_blocks") != 0, (blocks - local) * block, length - local)
        local_start = torch.maximum(torch.minimum(start.clamp(min=0), length), sinks)
        wanted = setting("witness_blocks")
        stride = (blocks // (wanted + 1)).clamp(min=1) * block
        count = torch.where(setting("witness") == _WITNESSES.index(Witness.UNIFORM), wanted, 0)
        return cls(length, sinks, local_start, stride, count, block)

    def is_witness(self, tokens: Tensor) -> Tensor:
        """Which tokens are witnesses."""
        run = tokens // self.stride
        inside = (run >= 1) & (run <= self.runs) & (tokens - run * self.stride < self.span)
        return inside & (tokens >= self.sinks) & (tokens < self.local_start)

    def witnesses(self) -> Tensor:
        """How many there are."""
        return self._run_tokens_before(self.local_start) - self._run_tokens_before(self.sinks)

    def _run_tokens_before(self, token: Tensor) -> Tensor:
        run = token // self.stride
        whole = torch.minimum((run - 1).clamp(min=0), self.runs) * self.span
        inside = torch.minimum(token - run * self.stride, self.span)
        return whole + torch.where((run >= 1) & (run <= self.runs), inside, 0)


def observe_into(call: SignalCall) -> None:
    """Add to ``call.counters`` and change the memory; see :func:`kvplugin.topology.signals.op.observe_signals`."""
    count, width = call.learned.shape
    rows, chunk = rows_of(call), max(1, CHUNK_SLOTS // width)
    chunks = [slice(first, first + chunk) for first in range(0, count, chunk)]
    for part in chunks:
        _observe(_part(call, part), rows.cut(part))
    if call.tokens is not None and call.tags is not None:
        for part in chunks:
            _remember(call.learned[part], rows.cut(part), call.tokens[call.leader], call.tags[call.leader])


def _part(call: SignalCall, rows: slice) -> SignalCall:
    return call._replace(learned=call.learned[rows], scores=None if call.scores is None else call.scores[rows])


def _observe(call: SignalCall, rows: Rows) -> None:
    tokens = call.learned.long()
    valid = (tokens >= 0) & (tokens < rows.length.unsqueeze(1))
    base = (rows.arm * 2 + rows.decodes.long()) * call.counters.shape[2]
    cells = call.counters.view(-1)
    for signal, value, seen in _signals(call, rows, tokens, valid):
        value, counted = value.clamp(0, 1), seen & rows.sampled
        bucket = torch.stack([value > bound for bound in BOUNDS]).sum(0)
        units = torch.where(counted, torch.floor(torch.where(counted, value, 0) * UNIT + 0.5).long(), 0)
        first = base + signal * COLUMNS_PER_SIGNAL
        cells.index_add_(0, first + bucket, counted.long())
        cells.index_add_(0, first + COLUMNS_PER_SIGNAL - 1, units)


def _share(part: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """One of two numbers as a share of the other, and where that is not 0."""
    return part.double() / whole.clamp(min=1).double(), whole > 0


def _signals(call: SignalCall, rows: Rows, tokens: Tensor, valid: Tensor) -> Values:
    width = tokens.shape[1]
    found, most = valid.sum(1), rows.length.clamp(max=width)
    bad = (~valid & (tokens != -1)).sum(1)
    yield Signal.INVALID_SHARE, *_share(bad, torch.full_like(bad, width))
    yield Signal.VALID_DEFICIT, *_share(most - found, most)
    if call.tokens is not None and call.tags is not None:
        for signal, layer, length in (
            (Signal.STEP_OVERLAP, call.leader, rows.length - 1),
            (Signal.LEADER_OVERLAP, call.leader - 1, rows.length),
        ):
            if layer >= 0:
                value, seen = _overlap(rows, tokens, valid, call.tokens[layer], call.tags[layer], length)
                yield signal, value, seen & rows.decodes
    structure, long = Structure.of(rows), rows.length > width
    sink, local, witness = tokens < structure.sinks, tokens >= structure.local_start, structure.is_witness(tokens)
    sizes = structure.sinks, structure.length - structure.local_start, structure.witnesses()
    for signal, kind, size in zip(
        (Signal.SINK_HIT, Signal.LOCAL_HIT, Signal.WITNESS_HIT), (sink, local, witness), sizes, strict=True
    ):
        value, seen = _share((valid & kind).sum(1), size.squeeze(1))
        yield signal, value, seen & long
    if call.scores is not None and call.scores.shape[1]:
        structural = valid & (sink | local | witness)
        need = found - structural.sum(1) + sum(sizes).squeeze(1) - width  # type: ignore[union-attr]
        for signal, value, seen in _eviction(call.scores, rows, tokens, valid, structural, need):
            yield signal, value, seen & long


def _overlap(
    rows: Rows, tokens: Tensor, valid: Tensor, stored: Tensor, tags: Tensor, length: Tensor
) -> tuple[Tensor, Tensor]:
    """Jaccard index of each row's valid tokens and what a layer's memory holds of its request at some length."""
    slot = rows.request & (len(tags) - 1)
    tag = tags[slot].long()
    there = (length > 0) & (tag[:, 0] == rows.request) & (tag[:, 1] == length)
    ordered = stored[slot].long().sort(1).values
    place = torch.searchsorted(ordered, tokens.contiguous()).clamp(max=tokens.shape[1] - 1)
    shared = (valid & (ordered.gather(1, place) == tokens)).sum(1)
    value, seen = _share(shared, (ordered >= 0).sum(1) + valid.sum(1) - shared)
    return value, seen & there


def _eviction(scores: Tensor, rows: Rows, tokens: Tensor, valid: Tensor, structural: Tensor, need: Tensor) -> Values:
    """What leaves, and how far below what stays, where ``need`` > 0 learned tokens leave."""
    rule, mode, width = rows.setting("eviction").unsqueeze(1), rows.setting("mode"), tokens.shape[1]
    acts = (need > 0) & (rows.start >= 0) & (rows.start <= scores.shape[1] - rows.length)
    acts &= (mode != _MODES.index(Mode.ONLY)) & (rows.setting("eviction") != _EVICTIONS.index(Eviction.NONE))
    acts &= rows.setting("witness") == _WITNESSES.index(Witness.UNIFORM)
    column = torch.where(valid & acts.unsqueeze(1), rows.start.unsqueeze(1) + tokens, 0)
    score = comparable(scores.gather(1, column).float())
    bits = score.view(torch.int32)
    # Read as integers, negative floats ascend in the wrong direction: flip all their bits but the sign.
    ascending = (bits ^ ((bits >> 31) & 0x7FFFFFFF)).long()
    key = (ascending << 32) | (0x7FFFFFFF - torch.where(valid, tokens, 0))
    key = torch.where(rule == _EVICTIONS.index(Eviction.OLDEST), tokens, key)
    slots = torch.arange(width, device=tokens.device)
    key = torch.where(rule == _EVICTIONS.index(Eviction.INPUT_ORDER), width - slots, key)
    candidate = valid & ~structural
    rank = torch.where(candidate, key, _LAST).argsort(1).argsort(1)
    leaves = candidate & (rank < need.unsqueeze(1))
    score = score.double()
    worth = torch.where(valid, score.clamp(min=0), 0)
    weight, evicted = worth.sum(1), torch.where(leaves, worth, 0).sum(1)
    weighs = (weight > 0) & weight.isfinite()
    yield Signal.EVICTED_SHARE, evicted / torch.where(weighs, weight, 1), acts & weighs
    lowest = torch.where(candidate & ~leaves, score, torch.inf).amin(1)
    highest = torch.where(leaves, score, -torch.inf).amax(1)
    finite = valid & score.isfinite()
    span = torch.where(finite, score, -torch.inf).amax(1) - torch.where(finite, score, torch.inf).amin(1)
    apart = (span > 0) & lowest.isfinite() & highest.isfinite()
    yield Signal.EVICTION_MARGIN, (lowest - highest) / torch.where(apart, span, 1), acts & apart


def _remember(learned: Tensor, rows: Rows, stored: Tensor, tags: Tensor) -> None:
    """Put what sampled decode rows learned into a layer's memory; of several rows of a slot, all write the last one."""
    slot, tokens = rows.request & (len(tags) - 1), learned.long()
    row = torch.where(rows.sampled & rows.decodes, torch.arange(len(tokens), device=tokens.device), -1)
    owner = torch.full((len(tags),), -1, dtype=torch.int64, device=tokens.device)
    source = owner.scatter_reduce(0, slot, row, "amax")[slot]
    taken, source = (source >= 0).unsqueeze(1), source.clamp(min=0)
    valid = (tokens >= 0) & (tokens < rows.length.unsqueeze(1))
    packed = torch.where(valid, tokens, -1).sort(1, descending=True).values[source].int()
    tag = torch.stack([rows.request, rows.length], 1)[source].int()
    stored[slot] = torch.where(taken, packed, stored[slot])
    tags[slot] = torch.where(taken, tag, tags[slot])
