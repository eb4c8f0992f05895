"""The ``before_topk`` placement: a top-k over lifted scores returns what the merge would have selected."""

from __future__ import annotations

from types import ModuleType

import torch
from hypothesis import given
from policy_cases import Case, bits, every_fast_implementation, every_implementation, lift, run
from strategies import MERGE_MODES, cases
from torch import Tensor

from kvplugin.config import Eviction, Witness
from kvplugin.topology import reference

LIFTABLE = {"eviction": Eviction.LOWEST_SCORE, "witness": Witness.UNIFORM}


def top_k(case: Case, scores: Tensor) -> Tensor:
    """A stable top-k of each row's window, as absolute indices: ties go to the lower token, the tail is -1."""
    topk = torch.full_like(case.topk, -1)
    starts, offsets = case.per_row("score_start", 0), case.per_row("offsets", 0)
    for row, length in enumerate(case.row_lengths.tolist()):
        window = scores[row, starts[row] : starts[row] + max(length, 0)].float()
        best = window.sort(descending=True, stable=True).indices[: topk.shape[1]]
        topk[row, : len(best)] = offsets[row] + best
    return topk


@every_implementation
@given(case=cases(MERGE_MODES, clean=True, finite=True, long_rows=False, **LIFTABLE))
def test_lift_then_top_k_equals_top_k_then_merge(implementation: ModuleType, case: Case) -> None:
    merged = run(implementation, case.with_topk(top_k(case, case.scores)))
    lifted = top_k(case, lift(implementation, case))
    assert merged.selections() == [sorted(set(row) - {-1}) for row in lifted.tolist()]


@every_fast_implementation
@given(case=cases(**LIFTABLE))
def test_lift_matches_reference(implementation: ModuleType, case: Case) -> None:
    assert torch.equal(bits(lift(implementation, case)), bits(lift(reference, case)))


@every_implementation
@given(case=cases(MERGE_MODES, **LIFTABLE))
def test_lift_writes_inside_the_window_only(implementation: ModuleType, case: Case) -> None:
    lifted = lift(implementation, case)
    column = torch.arange(lifted.shape[1])
    starts = torch.tensor(case.per_row("score_start", 0)).unsqueeze(1)
    window = (column >= starts) & (column < starts + case.row_lengths.unsqueeze(1))
    changed = bits(lifted) != bits(case.scores)
    assert not (changed & ~window).any()
    assert (lifted[changed] == torch.inf).all()
    for row, live in enumerate(case.per_row("row_live", 1)):
        assert live or not changed[row].any()
