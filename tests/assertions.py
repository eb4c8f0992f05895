"""Assertions that name the row, the slot and both values."""

from __future__ import annotations

from policy_cases import Case, Outcome
from torch import Tensor

from kvplugin.config import Fill, Mode
from kvplugin.topology import PHASE_ROWS
from kvplugin.topology.counters import Counter


def assert_rows_equal(actual: Outcome, expected: Outcome) -> None:
    """Fail unless both selected the same sets, counted the same and recorded the same error."""
    problems = [*_first_difference(actual.topk, expected.topk), *_counter_differences(actual, expected)]
    if actual.error.tolist() != expected.error.tolist():
        problems.append(f"error record: {actual.error.tolist()}, expected {expected.error.tolist()}")
    if problems:
        raise AssertionError("\n".join(problems))


def assert_output_contract(case: Case, outcome: Outcome) -> None:
    """Fail unless every row keeps the output contract, or every byte where the policy had to leave it alone."""
    assert outcome.topk.shape == case.topk.shape
    assert outcome.topk.dtype == case.topk.dtype
    for row, (before, after) in enumerate(zip(case.topk.tolist(), outcome.topk.tolist(), strict=True)):
        if case.params.mode is Mode.OBSERVE or not case.acts(row):
            assert after == before, f"row {row} was touched"
            continue
        length, low = int(case.row_lengths[row]), case.per_row("offsets", 0)[row]
        size = after.index(-1) if -1 in after else len(after)
        selected = after[:size]
        assert set(after[size:]) <= {-1}, f"row {row} has an index after -1, at slot {size} or later: {after}"
        assert len(set(selected)) == size, f"row {row} repeats an index: {selected}"
        assert all(low <= index < low + length for index in selected), (
            f"row {row} leaves [{low}, {low + length}): {after}"
        )
        if case.params.fill is not Fill.NONE:
            assert size == min(case.params.width, length), f"row {row} has {size} of min(K, L) tokens"


def _first_difference(actual: Tensor, expected: Tensor) -> list[str]:
    """Rows are sets, so slots are those of the rows in descending order."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return [f"topk is {actual.dtype} {list(actual.shape)}, expected {expected.dtype} {list(expected.shape)}"]
    ordered, wanted = actual.sort(1, descending=True).values, expected.sort(1, descending=True).values
    different = (ordered != wanted).nonzero().tolist()
    if not different:
        return []
    row, slot = different[0]
    found, want = int(ordered[row, slot]), int(wanted[row, slot])
    return [f"row {row}, slot {slot} in descending order: {found}, expected {want} ({len(different)} slots differ)"]


def _counter_differences(actual: Outcome, expected: Outcome) -> list[str]:
    different = (actual.counters != expected.counters).nonzero().tolist()
    return [
        f"{PHASE_ROWS[row]} {Counter(column).name}: {found}, expected {want}"
        for row, column in different
        for found, want in [(int(actual.counters[row, column]), int(expected.counters[row, column]))]
    ]
