"""Small cases with selections and counters worked out by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType
from typing import NamedTuple

import pytest
import torch
from assertions import assert_output_contract
from policy_cases import CPU_FORMS, Case, every_implementation, one_row, run
from strategies import NAN_LOGITS_INDEX

from kvplugin.config import Mode, PolicyConfig
from kvplugin.topology import Counter, lower, reference

MERGE = {"mode": Mode.SPARSE_MERGE, "max_structural_fraction": 0.5, "sink_tokens": 1, "local_tokens": 1}
SINK_ONLY = MERGE | {"local_tokens": 0}
BARE = {"mode": Mode.SPARSE_MERGE, "max_structural_fraction": 1.0, "sink_tokens": 0, "local_tokens": 0}
BLOCKS = {"mode": Mode.SPARSE_MERGE, "max_structural_fraction": 1.0, "block_size": 2}
ONLY = {"mode": Mode.ONLY, "sink_tokens": 1, "local_tokens": 1}
HOLE, NAN = -1, math.nan


class Named(NamedTuple):
    """A case of one row, the set it becomes, and the counters that say why."""

    name: str
    case: Case
    selection: set[int]
    counts: dict[Counter, int]


def token_counts(kept: int, evicted: int, injected: int, backfilled: int) -> dict[Counter, int]:
    return {
        Counter.KEPT: kept,
        Counter.EVICTED: evicted,
        Counter.INJECTED: injected,
        Counter.BACKFILLED: backfilled,
    }


def drift(block_scores: list[float], windows: int = 0) -> Case:
    """Sixteen tokens in eight blocks of two, the two best blocks as witnesses, the last six tokens learned."""
    config = BARE | {"sink_tokens": windows, "local_tokens": windows}
    case = one_row([15, 14, 13, 12, 11, 10], 16, **config, block_size=2, witness="drift", witness_blocks=2)
    return replace(case, witness_scores=torch.tensor([block_scores]))


STRUCTURE = [
    Named("a sink takes the slot of the worst", one_row([11, 10, 9, 8], 12, **MERGE, block_size=4), {0, 11, 10, 9},
          token_counts(3, 1, 1, 0) | {Counter.SINK_HIT: 0, Counter.LOCAL_HIT: 1, Counter.REWRITTEN: 1}),
    Named("structure already learned", one_row([11, 0, 9, 8], 12, **MERGE), {0, 11, 9, 8},
          token_counts(4, 0, 0, 0) | {Counter.SINK_HIT: 1, Counter.LOCAL_HIT: 1, Counter.IDENTITY: 1}),
    Named("windows in blocks", one_row([10, 9, 8, 7, 6, 5, 4, 3], 12, **BLOCKS, sink_blocks=1, local_blocks=1),
          {0, 1, 10, 11, 9, 8, 7, 6}, token_counts(5, 3, 3, 0)),
    Named("a local block of one token, just after a boundary",
          one_row([7, 6, 5, 4, 3, 2, 1, 0], 9, **(BARE | {"local_tokens": None}), block_size=4, local_blocks=1),
          {8, 7, 6, 5, 4, 3, 2, 1}, token_counts(7, 1, 1, 0) | {Counter.LOCAL_POSSIBLE: 1}),
    Named("windows that overlap", one_row([HOLE] * 4, 3, **(BARE | {"sink_tokens": 2, "local_tokens": 2})), {0, 1, 2},
          {Counter.SINK_POSSIBLE: 2, Counter.LOCAL_POSSIBLE: 1}),
    # Ten blocks of two: step 10 // 3 = 3, so blocks 3 and 6.
    Named("uniform witnesses", one_row([19, 18, 17, 16, 15, 14], 20, **BARE, block_size=2, witness_blocks=2),
          {6, 7, 12, 13, 19, 18}, token_counts(2, 4, 4, 0) | {Counter.WITNESS_HIT: 0, Counter.WITNESS_POSSIBLE: 4}),
    Named("a witness block that meets the local window",
          one_row([7, 6, 1, 2, 3, 4], 8, **(BARE | {"local_tokens": 2}), block_size=4, witness_blocks=1),
          {4, 5, 6, 7, 3, 2}, {Counter.WITNESS_POSSIBLE: 2, Counter.WITNESS_HIT: 1, Counter.LOCAL_HIT: 2}),
    Named("drift takes the blocks that moved most", drift([0, 1, 7, 1, 9, 1, 0, 0]), {4, 5, 8, 9, 15, 14},
          token_counts(2, 4, 4, 0)),
    Named("drift ties go to the lower block", drift([0, 2, 2, 2, 2, 2, 2, 2]), {2, 3, 4, 5, 15, 14}, {}),
    Named("drift reads NaN as -inf", drift([NAN, NAN, -math.inf, -5, NAN, -6]), {6, 7, 10, 11, 15, 14}, {}),
    Named("drift leaves out sink and local blocks", drift([9, 1, 3, 0, 2, 0, 0, 9], windows=1),
          {0, 15, 4, 5, 8, 9}, {Counter.WITNESS_POSSIBLE: 4}),
    # Two slots are left beside four reserved ones: 15 and 14. Segments of four tokens: 0, 1 and 2 are empty.
    Named("coverage fills empty segments first",
          one_row([15, 14, 13, 12, 11, 10], 16, **BARE, witness="coverage", coverage_segments=4),
          {3, 7, 11, 15, 14, 13}, token_counts(4, 2, 2, 0)
          | {Counter.SEGMENTS: 4, Counter.SEGMENTS_EMPTY_BEFORE: 2, Counter.SEGMENTS_EMPTY_AFTER: 0}),
    Named("structure alone", one_row([3, 4, 5, 6], 12, **ONLY), {0, 11, 10, 9}, token_counts(0, 4, 2, 2)),
    Named("structure alone, unfilled (never narrower)", one_row([0, 4, 5, 6, 7, 8, 9, 10], 12, **ONLY, fill="none"),
          {0, 11}, token_counts(1, 7, 1, 0)),
    Named("structure alone, a learned token in the grown window", one_row([10, 4, 5, 6], 12, **ONLY), {0, 11, 10, 9},
          token_counts(1, 3, 2, 1)),
]  # fmt: skip

EVICTION = [
    Named("ties at zero: the higher token leaves first",
          one_row([9, 8, 7, 6, 5, 4], 12, scores=[0.0] * 12, **MERGE), {0, 11, 4, 5, 6, 7}, token_counts(4, 2, 2, 0)),
    Named("-0.0 equals 0.0",
          one_row([1, 2, 3, 4], 8, scores=[0, -0.0, 0.0, 1, 2, 0, 0, 0], **SINK_ONLY), {0, 1, 3, 4}, {}),
    Named("NaN equals -inf",
          one_row([1, 2, 3, 4], 8, scores=[0, NAN, -math.inf, 1, 2, 0, 0, 0], **SINK_ONLY), {0, 1, 3, 4}, {}),
    Named("none: a full row stays", one_row([7, 6, 5, 4], 12, **MERGE, eviction="none"), {7, 6, 5, 4},
          token_counts(4, 0, 0, 0) | {Counter.IDENTITY: 1}),
    Named("none: the newest structure takes the free slot", one_row([7, HOLE, 5, 4], 12, **MERGE, eviction="none"),
          {7, 5, 4, 11}, token_counts(3, 0, 1, 0)),
    Named("oldest: the lowest token leaves", one_row([11, 3, 5, 9], 12, **MERGE, eviction="oldest"), {0, 11, 5, 9}, {}),
    Named("input_order: the last slot leaves", one_row([3, 9, 5, 11], 12, **SINK_ONLY, eviction="input_order"),
          {0, 3, 9, 5}, {}),
]  # fmt: skip

FAULTS = [
    Named("a short row is backfilled", one_row([3, *[HOLE] * 7], 16, **(MERGE | {"max_structural_fraction": 0.25})),
          {0, 3, 10, 11, 12, 13, 14, 15}, token_counts(1, 0, 2, 5) | {Counter.RESCUED: 0, Counter.INVALID: 0}),
    Named("1: an index from NaN logits, fallback", one_row([NAN_LOGITS_INDEX, 6, 3, 2], 8, **MERGE), {6, 3, 2, 7},
          token_counts(3, 0, 0, 1) | {Counter.INVALID: 1, Counter.FALLBACK: 1, Counter.SINK_POSSIBLE: 0}),
    Named("1: an index from NaN logits, drop",
          one_row([NAN_LOGITS_INDEX, 6, 3, 2], 8, **MERGE, coordinate_mismatch="drop"), {0, 7, 6, 3},
          token_counts(2, 1, 2, 0) | {Counter.INVALID: 1, Counter.FALLBACK: 0}),
    Named("1: an index from NaN logits in a row that fits the slots",
          one_row([2, NAN_LOGITS_INDEX, HOLE, 0], 3, **MERGE), {0, 1, 2},
          token_counts(2, 0, 0, 1) | {Counter.INVALID: 1, Counter.FALLBACK: 1}),
    Named("1: an index of L", one_row([8, 7, 3, 2], 8, **MERGE), {7, 3, 2, 6}, {Counter.INVALID: 1}),
    Named("1: an int64 index whose lower half is a token",
          one_row([2**32 + 1, 7, 3, 2], 8, dtype=torch.int64, **MERGE), {7, 3, 2, 6}, {Counter.INVALID: 1}),
    Named("4: one token more than slots, sinks lost", one_row([8, 7, 6, 5, 4, 3, 2, 1], 9, **MERGE),
          {0, 8, 7, 6, 5, 4, 3, 2}, token_counts(7, 1, 1, 0) | {Counter.SINK_HIT: 0, Counter.SINK_POSSIBLE: 1}),
    Named("5: fewer tokens than slots", one_row([4, 1, *[HOLE] * 6], 5, **MERGE), {0, 1, 2, 3, 4},
          token_counts(2, 0, 1, 2) | {Counter.LOCAL_HIT: 1}),
    Named("6: a row that starts at 12", one_row([23, 22, 21, 20], 12, offset=12, **MERGE), {12, 23, 22, 21},
          token_counts(3, 1, 1, 0)),
    Named("6: a relative index in such a row", one_row([23, 22, 21, 11], 12, offset=12, **MERGE), {23, 22, 21, 20},
          {Counter.INVALID: 1, Counter.FALLBACK: 1}),
    Named("6: a row that ends at the last int32", one_row([2**31 - 1, *[HOLE] * 3], 12, offset=2**31 - 12, **MERGE),
          {2**31 - 12, 2**31 - 1, 2**31 - 2, 2**31 - 3}, token_counts(1, 0, 1, 2)),
    Named("9: nothing learned", one_row([HOLE] * 4, 8, **MERGE), {0, 7, 6, 5},
          token_counts(0, 0, 2, 2) | {Counter.RESCUED: 1, Counter.EMPTY: 0}),
    # The newest 2176 of 5000 tokens: four sinks take the place of the four worst, which are the oldest.
    Named("12: a buffer wider than index_topk", one_row(range(2824, 5000), 5000, mode=Mode.SPARSE_MERGE),
          {0, 1, 2, 3, *range(2828, 5000)}, token_counts(2172, 4, 4, 0) | {Counter.LOCAL_HIT: 64}),
    Named("14: stale slots behind the valid ones",
          one_row([1, 0, 7, 7], 2, **MERGE, coordinate_mismatch="drop"), {0, 1}, {Counter.INVALID: 2}),
    Named("15: a warm-up row of length 0", one_row([5, 6, 7, 8], 0, **MERGE), set(),
          token_counts(0, 0, 0, 0) | {Counter.IDENTITY: 1, Counter.INVALID: 0, Counter.RESCUED: 0}),
    Named("a repeated index, checked", one_row([3, 9, 3, 5], 12, **MERGE, check_duplicates=True), {3, 9, 5, 11},
          {Counter.INVALID: 1, Counter.FALLBACK: 1}),
    Named("a row of 2**31 - 1 tokens", one_row([5, 6, 7, HOLE], 2**31 - 1, scores=[0], **MERGE, eviction="oldest"),
          {0, 2**31 - 2, 6, 7}, token_counts(2, 1, 2, 0)),
]  # fmt: skip


def test_of_a_repeated_token_the_first_slot_counts() -> None:
    """Kernels do not look for repetitions; the other forms find them anyway."""
    case = one_row([9, 5, 7, 5, 9, 3], 12, **SINK_ONLY, eviction="input_order")
    for implementation in (reference, *filter(None, CPU_FORMS.values())):
        outcome = run(implementation, case)
        assert outcome.selections() == [[0, 3, 5, 7, 9, 11]]
        assert {counter: outcome.total(counter) for counter in token_counts(4, 0, 1, 1)} == token_counts(4, 0, 1, 1)


@every_implementation
@pytest.mark.parametrize("named", [*STRUCTURE, *EVICTION, *FAULTS], ids=lambda named: named.name)
def test_named_case(implementation: ModuleType, named: Named) -> None:
    outcome = run(implementation, named.case)
    assert outcome.selections() == [sorted(named.selection)]
    assert {counter: outcome.total(counter) for counter in named.counts} == named.counts
    assert_output_contract(named.case, outcome)


LEFT_ALONE = [
    ("8: a row marked to be left alone", one_row([5, 5, 99, -7], -1, **MERGE), None),
    ("disabled", one_row([5, 5, 99, -7], 12, **(MERGE | {"mode": Mode.DISABLED})), None),
    ("another phase", one_row([5, 6, 7, 8], 12, **MERGE, phases=["prefill"]), Counter.BYPASS_PHASE),
    ("row too long", one_row([5, 6, 7, 8], 12, **MERGE, limits={"max_row_length": 11}), Counter.BYPASS_MAX_ROW_LENGTH),
    ("buffer too wide", one_row([5, 6, 7, 8], 12, **MERGE, limits={"max_width": 3}), Counter.BYPASS_MAX_WIDTH),
    ("too many slots", one_row([5, 6, 7, 8], 12, **MERGE, limits={"max_elements": 3}), Counter.BYPASS_MAX_ELEMENTS),
    ("scores too short", one_row([5, 6, 7, 8], 12, scores=[0.0] * 11, **MERGE), Counter.BYPASS_NO_SCORES),
    ("beyond int32", one_row([5, 6, 7, 8], 12, offset=2**31 - 11, **MERGE), Counter.BYPASS_BAD_OFFSET),
]


@every_implementation
@pytest.mark.parametrize(("case", "reason"), [row[1:] for row in LEFT_ALONE], ids=[row[0] for row in LEFT_ALONE])
def test_row_left_alone(implementation: ModuleType, case: Case, reason: Counter | None) -> None:
    outcome = run(implementation, case)
    assert torch.equal(outcome.topk, case.topk)
    counted = {counter: 1 for counter in (Counter.SEEN, reason) if reason is not None}
    assert {counter: outcome.total(counter) for counter in Counter if outcome.total(counter)} == counted


@every_implementation
def test_9_observe_counts_a_live_row_without_tokens(implementation: ModuleType) -> None:
    outcome = run(implementation, one_row([HOLE] * 4, 8, **(MERGE | {"mode": Mode.OBSERVE})))
    assert outcome.topk.tolist() == [[HOLE] * 4]
    assert (outcome.total(Counter.EMPTY), outcome.total(Counter.RESCUED), outcome.total(Counter.REWRITTEN)) == (1, 1, 1)


@every_implementation
def test_2_two_ranks_with_one_set_in_two_orders(implementation: ModuleType) -> None:
    ranks = [one_row(row, 12, scores=[1.0] * 12, **MERGE) for row in ([5, 9, 2, 7], [7, 2, 9, 5])]
    assert [run(implementation, rank).selections() for rank in ranks] == [[[0, 2, 5, 11]]] * 2


@every_implementation
def test_6_two_requests_behind_each_other(implementation: ModuleType) -> None:
    """Each request of 8 tokens has its own part of one score row; the other's part would lead to another choice."""
    case = Case(
        topk=torch.tensor([[1, 2, 3, 4], [9, 10, 11, 12]]),
        row_lengths=torch.tensor([8, 8]),
        offsets=torch.tensor([0, 8]),
        score_start=torch.tensor([0, 8]),
        scores=torch.tensor([[0, 1, 2, 3, 4, 0, 0, 0, 0, 4, 3, 2, 1, 0, 0, 0]]).repeat(2, 1).float(),
        params=lower(PolicyConfig(**MERGE), 4),
    )
    assert run(implementation, case).selections() == [[0, 3, 4, 7], [8, 9, 10, 15]]


@every_implementation
def test_11_sixty_five_rows_decide_as_one(implementation: ModuleType) -> None:
    case = one_row([11, 10, 9, 8], 12, **MERGE)
    outcome = run(
        implementation,
        replace(
            case,
            topk=case.topk.repeat(65, 1),
            row_lengths=case.row_lengths.repeat(65),
            scores=case.scores.repeat(65, 1),
        ),
    )
    assert outcome.selections() == [[0, 9, 10, 11]] * 65
    assert outcome.total(Counter.KEPT) == 65 * 3


@every_implementation
def test_the_lowest_bad_row_is_recorded_with_its_first_bad_slot(implementation: ModuleType) -> None:
    config = PolicyConfig(**MERGE, coordinate_mismatch="raise")
    case = Case(
        topk=torch.tensor([[99, 1, 2, 3], [4, 5, 6, 7], [8, 12, 9, -2], [77, 1, 2, 3]]),
        row_lengths=torch.tensor([12, 12, 12, 12]),
        row_live=torch.tensor([False, True, True, True]),
        scores=torch.zeros(4, 12),
        params=lower(config, 4),
    )
    assert run(implementation, case).error.tolist() == [3, 12, 0, 12]
