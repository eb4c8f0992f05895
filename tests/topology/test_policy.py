"""Properties of the policy, for every implementation."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from assertions import assert_output_contract, assert_rows_equal
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from policy_cases import IMPLEMENTATIONS, Case, Outcome, every_cpu_form, every_implementation, run
from strategies import MERGE_MODES, cases

from kvplugin import topology
from kvplugin.config import Eviction, MismatchAction, Mode, PolicyConfig, Witness
from kvplugin.topology import BYPASS_REASONS, lower, new_counters, reference, triton_ops
from kvplugin.topology.counters import Counter

ORDER_FREE = tuple(eviction for eviction in Eviction if eviction is not Eviction.INPUT_ORDER)


def segment_bounds(case: Case, row: int) -> list[tuple[int, int]]:
    length, count = int(case.row_lengths[row]), case.params.segments
    low = case.per_row("offsets", 0)[row]
    return [(low + s * length // count, low + (s + 1) * length // count) for s in range(count)]


def assert_covered(case: Case, outcome: Outcome) -> None:
    """Every segment of every long enough row ends with a selected token."""
    for row, selected in enumerate(outcome.selections()):
        if case.acts(row) and int(case.row_lengths[row]) >= case.params.segments:
            for low, high in segment_bounds(case, row):
                assert any(low <= index < high for index in selected), f"row {row}: no token in [{low}, {high})"


def test_every_implementation_is_listed() -> None:
    folder = Path(topology.__file__).parent
    found = {path.stem for path in folder.glob("*_ops.py")} | {"reference"}
    assert found == set(IMPLEMENTATIONS)


@every_implementation
@given(case=cases(modes=tuple(Mode)))
def test_output_contract(implementation: ModuleType, case: Case) -> None:
    assert_output_contract(case, run(implementation, case))


@every_implementation
@pytest.mark.parametrize("mode", Mode)
def test_no_rows(implementation: ModuleType, mode: Mode) -> None:
    empty = torch.zeros(0, 7, dtype=torch.int32)
    params = lower(PolicyConfig(mode=mode, max_structural_fraction=1.0), 7)
    case = Case(topk=empty, row_lengths=torch.zeros(0, dtype=torch.int32), scores=torch.zeros(0, 21), params=params)
    assert not run(implementation, case).counters.any()


@every_cpu_form
@settings(max_examples=400)
@given(case=cases(unchecked_repeats=True))
def test_matches_reference(implementation: ModuleType, case: Case) -> None:
    assert_rows_equal(run(implementation, case), run(reference, case))


@settings(max_examples=80, phases=(Phase.explicit, Phase.generate))
@given(case=cases())
def test_triton_ops_match_reference(case: Case) -> None:
    assert_rows_equal(run(triton_ops, case), run(reference, case))


@every_implementation
@given(case=cases(unchecked_repeats=True, check_duplicates=False))
def test_a_row_with_unchecked_repeats_stays_in_range(implementation: ModuleType, case: Case) -> None:
    outcome = run(implementation, case)
    for row, (before, after) in enumerate(zip(case.topk.tolist(), outcome.topk.tolist(), strict=True)):
        low = case.per_row("offsets", 0)[row]
        if case.params.mode is Mode.OBSERVE or not case.acts(row):
            assert after == before, f"row {row} was touched"
        else:
            assert all(index == -1 or 0 <= index - low < int(case.row_lengths[row]) for index in after), after


@every_implementation
@given(case=cases(coordinate_mismatch=MismatchAction.RAISE), row=st.integers(0, 3))
def test_an_earlier_error_record_stands(implementation: ModuleType, case: Case, row: int) -> None:
    record = (row, 5, 6, 7)
    outcome = run(implementation, case, error=record)
    assert outcome.error.tolist() == (list(record) if row else run(reference, case, error=record).error.tolist())


@every_implementation
@given(case=st.sampled_from(ORDER_FREE).flatmap(lambda eviction: cases(eviction=eviction)), data=st.data())
def test_slot_order_carries_no_meaning(implementation: ModuleType, case: Case, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(case.params.width)))
    plain, shuffled = run(implementation, case), run(implementation, case.with_topk(case.topk[:, order]))
    touched = [row for row in range(len(case.topk)) if case.acts(row)]
    assert [plain.selections()[row] for row in touched] == [shuffled.selections()[row] for row in touched]
    assert torch.equal(plain.counters, shuffled.counters)


@every_implementation
@given(case=st.sampled_from((Witness.UNIFORM, Witness.DRIFT)).flatmap(lambda w: cases(clean=True, witness=w)))
def test_idempotent_as_a_set(implementation: ModuleType, case: Case) -> None:
    once = run(implementation, case)
    twice = run(implementation, case.with_topk(once.topk))
    assert twice.selections() == once.selections()
    if case.params.mode is not Mode.OBSERVE:
        assert twice.total(Counter.EVICTED, Counter.INJECTED, Counter.BACKFILLED, Counter.REWRITTEN) == 0


@every_implementation
@given(case=cases((*MERGE_MODES, Mode.ONLY), clean=True, eviction=Eviction.LOWEST_SCORE, witness=Witness.COVERAGE))
def test_coverage_leaves_no_segment_empty(implementation: ModuleType, case: Case) -> None:
    once = run(implementation, case)
    assert_covered(case, once)
    assert_covered(case, run(implementation, case.with_topk(once.topk)))
    assert once.total(Counter.SEGMENTS_EMPTY_AFTER) == 0


@every_implementation
@given(case=cases())
def test_counters_add_up(implementation: ModuleType, case: Case) -> None:
    outcome = run(implementation, case)
    acting = [row for row in range(len(case.topk)) if case.acts(row)]
    handled = (Counter.REWRITTEN, Counter.IDENTITY, *BYPASS_REASONS.values())
    assert outcome.total(Counter.SEEN) == outcome.total(*handled)
    assert outcome.total(Counter.REWRITTEN, Counter.IDENTITY) == len(acting)
    learned = sum(len(case.learned(row)) for row in acting)
    assert outcome.total(Counter.KEPT, Counter.EVICTED) == learned
    if case.params.mode is not Mode.OBSERVE:
        selected = sum(len(outcome.selections()[row]) for row in acting)
        assert outcome.total(Counter.KEPT, Counter.INJECTED, Counter.BACKFILLED) == selected


@every_implementation
@given(case=cases(modes=(Mode.OBSERVE,)))
def test_observe_counts_what_a_merge_would_do(implementation: ModuleType, case: Case) -> None:
    observed, merged = (run(implementation, case.with_params(mode=mode)) for mode in (Mode.OBSERVE, Mode.SPARSE_MERGE))
    observed.counters[:, Counter.EMPTY] = 0
    assert torch.equal(observed.counters, merged.counters)


@every_implementation
@given(case=cases(clean=True))
def test_a_row_does_not_depend_on_the_others(implementation: ModuleType, case: Case) -> None:
    batch = run(implementation, case)
    alone = [run(implementation, case.only_row(row)) for row in range(len(case.topk))]
    assert [outcome.selections()[0] for outcome in alone] == batch.selections()
    assert torch.equal(sum((outcome.counters for outcome in alone), new_counters()), batch.counters)
